"""One simulated node: its clock, its power, its agent around the real controller.

Rules of this file: the contract of agent/process.py. Every action the controller returns is carried out in its order
before the next input; an input that comes meanwhile waits. A paused node does nothing and finds everything that came
for it when it wakes; a node that is gone never does anything again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core import io
from ..core.controller import Controller
from ..core.messages import AnyMessage, Goodbye, Verdict
from ..core.types import EXIT_FENCED, Generation, NodeId, Rank, Step, World
from .mirroring import Mirroring
from .network import UNANSWERED
from .processes import Processes
from .store import Store
from .takeover import Rehearsals, TakeOvers
from .training import State
from .worker import Process

if TYPE_CHECKING:
    from .cluster import Cluster


ASKS = 2
"""Within its patience a node that is silent is asked so often."""


class Node:
    """`drift`: how much faster than the simulation's clock its own runs. A node that is not `up` answers with resets or
    not at all if it is dark (network.py). `exit` is (code, reason)."""

    def __init__(self, cluster: Cluster, number: NodeId, slots: int, drift: float, offset_s: float) -> None:
        self.cluster, self.number = cluster, number
        self.timeline, self.network = cluster.timeline, cluster.network
        self.timing, self.policy = cluster.timing, cluster.policy
        self._rate, self._offset_s = 1.0 + drift, offset_s
        self._tick_s = self.timing.heartbeat_interval_s / 4 / self._rate
        self.up, self.paused = True, False
        self.exit: tuple[int, str] | None = None
        self.barred: set[NodeId] = set()
        self.verdict: Verdict | None = None
        """How the job has ended, if a member that has left said so."""
        self._acted_on: Generation = 0
        self._backlog: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._inputs: deque[io.Input] = deque()
        self._stepping = False
        self.store = Store(lambda rank, step: cluster.checkers.memory_changed(number, rank, step))
        self.processes = Processes(self, slots)
        self.mirroring = Mirroring(self)
        self.rehearsals = Rehearsals(self)
        self.takeovers = TakeOvers(self)
        self.controller = Controller(number, self.timing, self.policy)
        self.ends: dict[Rank, tuple[Generation, Step, State | None]] = {}
        """The generation, step and state in which each rank here has come to the end of its script."""
        self._actions: dict[type[io.Action], Callable[[Any], object]] = {
            io.Send: lambda action: self.network.send(number, action.to, action.message),
            io.StartWorkers: lambda action: self.processes.start_groups(action.world.generation, action.store),
            io.StartRehearsal: self.rehearsals.order,
            io.Commit: self._commit,
            io.AbortWorkers: self._abort,
            io.PauseWorkers: lambda action: self.processes.pause(),
            io.ResumeWorkers: lambda action: self.processes.resume(self.store.fence, self._acted_on),
            io.Reconfigure: self._reconfigure,
            io.ReadCalls: self._read_calls,
            io.EndRank: lambda action: self.processes.end_rank(action.rank, action.reason),
            io.Claim: lambda action: cluster.claim(self, action.plan),
            io.Look: lambda action: cluster.look(self, action.generation),
            io.Emit: lambda action: cluster.said(self, action),
            io.Leave: self._leave,
        }

    def do(self, work: Callable[..., object], *arguments: Any) -> None:
        """Here and now; later if it is paused; never if it is gone."""
        if self.paused:
            self._backlog.append((work, arguments))
        elif self.up:
            work(*arguments)

    # -- life --------------------------------------------------------------------------------------------------

    def enter(self, world: World) -> None:
        """Rendezvous is over."""
        self.mirroring.enter(world)
        self.processes.form(world)
        self.feed(io.WorldFormed(world))
        self.start_clock()

    def start_clock(self) -> None:
        self.timeline.after(self.cluster.rng.random() * self._tick_s, self.do, self._tick)

    def _tick(self) -> None:
        self.feed(io.Ticked())
        if self.up:
            self.timeline.after(self._tick_s, self.do, self._tick)

    def pause(self) -> None:
        self.paused = True

    def wake(self) -> None:
        """It goes on where it was, with everything that came meanwhile in hand; its own clock may speak first."""
        if not self.paused:
            return
        self.paused = False
        backlog, self._backlog = self._backlog, deque()
        if self.cluster.rng.random() < 0.5:
            self.do(self.feed, io.Ticked())
        for work, arguments in backlog:
            self.do(work, *arguments)

    def die(self) -> None:
        """Everything that runs here ends at once."""
        self._backlog.clear()
        self.takeovers.cancel()
        for process in self.processes.alive:
            process.end()
        self.stop()

    def stop(self) -> None:
        """Its agent is no more."""
        self.up = self.paused = False
        self.cluster.gone(self)

    # -- inputs ------------------------------------------------------------------------------------------------

    def feed(self, event: io.Input) -> None:
        """Give the controller one input and carry out what it says."""
        if self._stepping:
            self._inputs.append(event)
        elif self.up:
            self._stepping = True
            self._step(event)
            while self._inputs and self.up:
                self._step(self._inputs.popleft())
            self._stepping = False

    def _step(self, event: io.Input) -> None:
        cluster = self.cluster
        cluster.coverage.sees(self.controller, event)
        now = self._offset_s + self._rate * self.timeline.now  # what its monotonic clock shows
        actions = self.controller.step(event, now)
        cluster.stepped(self, event, actions)
        for action in actions:
            self._actions[type(action)](action)
            if cluster.strikes.listens:
                cluster.acted(self, action)
            if not self.up:
                return

    def received(self, source: NodeId, message: AnyMessage) -> None:
        if isinstance(message, Goodbye):
            self.barred.add(source)
            self.verdict = self.verdict or message.verdict
        self.feed(io.Received(source, message))

    def link_lost(self, peer: NodeId, reason: str) -> None:
        if peer not in self.barred:
            self.feed(io.LinkLost(peer, reason, silent=reason == UNANSWERED))
            if reason == UNANSWERED:
                self._ask_later(peer)

    def _ask_later(self, peer: NodeId) -> None:
        self.timeline.after(self.timing.silent_after_s / ASKS, self.do, self._ask_still, peer)

    def _ask_still(self, peer: NodeId) -> None:
        """As transport/renewal.py: who was given up as silent is asked for a connection until it is lost to the job."""
        if peer in self.barred or not self.up:
            return
        if not self.network.answers(self.number, peer):
            self.feed(io.LinkLost(peer, UNANSWERED, silent=True, still=True))
        self._ask_later(peer)

    def heard(self, process: Process, handle: Callable[..., object], *arguments: Any) -> None:
        """A process of this node says something; last words of one that was replaced mean nothing."""
        if not self.processes.is_forgotten(process):
            handle(process, *arguments)

    def finished(self, process: Process) -> None:
        self.ends[process.rank] = (self.controller.generation, process.step, process.state)
        self.feed(io.WorkerFinished(process.rank))

    def saved(self, process: Process, step: Step) -> None:
        self.feed(io.CheckpointSaved(step, f"checkpoints/{step}"))

    # -- actions -----------------------------------------------------------------------------------------------

    def _read_calls(self, action: io.ReadCalls) -> None:
        self.feed(io.CallsRead(action.generation, self.processes.calls(action.generation)))

    def _commit(self, action: io.Commit) -> None:
        self.processes.commit(action.step)
        self.mirroring.committed()

    def _abort(self, action: io.AbortWorkers) -> None:
        self.takeovers.cancel()
        self.processes.abort(action.generation)
        self.store.fence = max(self.store.fence, action.generation)

    def _reconfigure(self, action: io.Reconfigure) -> None:
        self.cluster.checkers.reconfigured(self, action.plan)
        self._acted_on = action.plan.world.generation
        self.takeovers.act(action.plan)
        for node in action.plan.lost_nodes:
            self.barred.add(node)
            self.network.close(self.number, node, "dropped", keeps=True)

    def _leave(self, action: io.Leave) -> None:
        self.exit = (action.exit_code, action.reason)
        self.cluster.checkers.left(self, action)
        self.takeovers.cancel()
        self.processes.end()
        for peer in sorted(number for number, node in self.cluster.nodes.items() if node.up and node is not self):
            if action.exit_code != EXIT_FENCED:
                self.network.send(self.number, peer, Goodbye(self.controller.generation, action.verdict))
            self.network.close(self.number, peer, "connection closed", keeps=True)
        self.stop()
