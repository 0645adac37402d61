"""One simulated host: its clock, its power, and the real agent on it.

Rules of this file: every action the agent's controller asks for is seen before and after it is carried out, and nothing
of the agent is replaced. A paused host does nothing and finds everything that came for it when it wakes; one that is
gone never does anything again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from deadpool_plugin.agent.process import Agent
from deadpool_plugin.agent.world import Invitation, Job, Place
from deadpool_plugin.core import api, local
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.types import Generation, NodeId, Rank, Step
from deadpool_plugin.errors import DeadpoolError, InvariantViolated
from deadpool_plugin.transport.handshake import Credentials

from .loop import HostLoop
from .machine import Machine, Store, ToyPair
from .network import address_of
from .processes import Peer
from .training import State
from .violation import Violation

if TYPE_CHECKING:
    from .cluster import Cluster

SECRET = b"the secret of a simulated job"
MASTER_PORT = 29500


class Killed(BaseException):
    """The host has died in the middle of what its agent did."""


class Watched(Controller):
    """A controller that shows what it takes in and what becomes of it."""

    def __init__(self, node: Node, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._node, self._cluster = node, node.cluster
        self._ticks = node.number  # the hosts are counted by turns

    def step(self, event: api.Input, now: float) -> Iterable[api.Action]:  # type: ignore[override]
        node, cluster = self._node, self._cluster
        if type(event) is api.Ticked:  # most of what there is: every eighth is counted
            self._ticks += 1
            if not (self._ticks & 7 or self._ctx.ended):
                cluster.coverage.sees(self, event)
        else:
            if not self._ctx.ended:
                cluster.coverage.sees(self, event)
            if isinstance(event, local.WorkerFinished):
                node.finished(event.rank)
        actions: Sequence[api.Action] = Controller.step(self, event, now)
        if not actions and cluster.nobody_watches:
            return ()
        cluster.stepped(node, event, actions)
        node.must_live()
        return self._carried_out(actions) if actions else ()

    def _carried_out(self, actions: Sequence[api.Action]) -> Iterator[api.Action]:
        """The agent goes on with the next action when the one before is carried out."""
        node, cluster = self._node, self._cluster
        for action in actions:
            if isinstance(action, api.Reconfigure):
                cluster.checkers.reconfigured(node, action.plan)
            elif isinstance(action, api.Leave):
                node.exit = (action.exit_code, action.reason)
                cluster.checkers.left(node, action)
            yield action
            if isinstance(action, api.Emit):
                cluster.said(node, action)
            elif isinstance(action, api.Leave):
                node.leave()
            if cluster.strikes.armed:
                cluster.acted(node, action)
            node.must_live()


class SimulatedAgent(Agent):
    """The agent, whose controller is watched, and whose failures are the run's."""

    def __init__(self, node: Node, *arguments: Any) -> None:
        super().__init__(*arguments)
        ours = self._controller
        self._controller = Watched(node, ours._ctx.node, ours._ctx.timing, ours._ctx.policy)
        self._host_node, self._duplicates = node, node.cluster.blows.duplicates

    def _broke(self, error: BaseException) -> None:
        if isinstance(error, Killed):
            return
        if not isinstance(error, DeadpoolError) or isinstance(error, InvariantViolated):
            self._host_node.cluster.broke(error)
            return
        self._host_node.reason = str(error)
        super()._broke(error)

    def feed(self, event: api.Input) -> None:
        copies = 1
        if self._duplicates and isinstance(event, api.Received):
            copies = self._host_node.cluster.copies(event.sender, self._host_node.number)
        for _ in range(copies):
            Agent.feed(self, event)


class Node:
    """`drift`: how much faster than the simulation's clock its own runs. `up`: its agent is in the job, or on its way
    there; `runs`: something runs on it. `exit` is (code, reason)."""

    def __init__(self, cluster: Cluster, number: NodeId, drift: float, offset_s: float) -> None:
        self.cluster, self.number, self.timeline = cluster, number, cluster.timeline
        self.timing, self.policy = cluster.timing, cluster.policy
        self.loop = HostLoop(cluster.timeline, 1.0 + drift, offset_s)  # type: ignore[abstract]  # as is asyncio's
        self.kernel = cluster.network.attach(number, self.loop)
        self.up = self.runs = True
        self.exit: tuple[int, str] | None = None
        self.reason = ""
        self._backlog: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.ends: dict[Rank, tuple[Generation, Step, State | None]] = {}
        """The generation, step and state in which each rank here has come to the end of its script."""
        self.machine = Machine(self)
        self.agent: SimulatedAgent | None = None
        self._nobody = Controller(number, self.timing, self.policy)

    # -- life --------------------------------------------------------------------------------------------------

    def begin(self, invitation: Invitation | None = None) -> None:
        """Start its agent; `invitation`: to a job that runs."""
        self.loop.call_soon(self._begin, invitation)

    def _begin(self, invitation: Invitation | None) -> None:
        cluster = self.cluster
        place = Place(self.number, len(cluster.world.members), cluster.scenario.slots, address_of(0), MASTER_PORT)
        job = Job(["script"], "/", "", {}, invitation=invitation)
        self.credentials = Credentials(SECRET)
        self.agent = SimulatedAgent(self, self.machine, place, cluster.config, self.credentials, job)
        self.loop.create_task(self._run(self.agent))

    async def _run(self, agent: SimulatedAgent) -> None:
        try:
            exit_code = await agent.run()
        except Violation as violation:
            self.cluster.broke(violation)
            return
        self.exit = (exit_code, self.exit[1] if self.exit is not None else self.reason)
        self._stop()

    @property
    def controller(self) -> Controller:
        """Its agent's; one that knows nobody until there is an agent."""
        return self.agent._controller if self.agent is not None else self._nobody

    @property
    def store(self) -> Store:
        return self.machine.store

    @property
    def processes(self) -> Any:
        return self.machine.processes

    @property
    def paused(self) -> bool:
        return self.loop.paused

    def pause(self) -> None:
        self.loop.pause()

    def wake(self) -> None:
        """It goes on where it was, with everything that came meanwhile in hand; its own clock may speak first."""
        if not self.paused:
            return
        self.loop.wake(timers_first=self.cluster.rng.random() < 0.5)
        backlog, self._backlog = self._backlog, deque()
        for work, arguments in backlog:
            self.do(work, *arguments)

    def do(self, work: Callable[..., object], *arguments: Any) -> None:
        """Here and now; later if it is paused; never if it is gone."""
        if self.paused:
            self._backlog.append((work, arguments))
        elif self.runs:
            work(*arguments)

    def find_nobody(self) -> None:
        """There is no job that it could join."""
        self.exit = (1, "no member of a running job was found")
        self._stop()

    def die(self) -> None:
        """Everything that runs here ends at once."""
        self.loop.end()
        self._backlog.clear()
        for process in self.processes.alive:
            process.end()
        self._stop()

    def _stop(self) -> None:
        """Nothing runs here any more."""
        self.loop.end()
        self.loop.paused = False
        for process in self.processes.alive:
            process.end()
        self.runs = False
        self.leave()
        self.cluster.stopped(self)

    def leave(self) -> None:
        if self.up:
            self.up = False
            self.cluster.gone(self)

    def feed(self, event: api.Input) -> None:
        """An input of the fault's."""
        if self.agent is not None:
            self.agent.feed(event)

    def must_live(self) -> None:
        """Raises: Killed, which nothing of a dead host catches."""
        if not self.runs:
            raise Killed

    def finished(self, rank: Rank) -> None:
        process = self.processes.of(rank)
        if process is not None:
            self.ends[rank] = (self.controller.generation, process.step, process.state)

    # -- its memory and its processes --------------------------------------------------------------------------

    def memory_changed(self, rank: Rank, step: Step) -> None:
        self.cluster.checkers.memory_changed(self.number, rank, step)

    def pair_of(self, fd: int) -> ToyPair:
        """The slots that came with a message as `fd`."""
        return self.store.made[fd]

    def new_peer(self, pid: int, hear: Callable[[Any, tuple[int, ...]], None]) -> Peer:
        return Peer(self, pid, hear)
