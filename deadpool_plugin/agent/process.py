"""The agent: one asyncio loop around the controller. Collects inputs, steps, carries out the actions in their order.

Rules of this file: nothing is decided here and nothing waits here between an input and its actions; each action is one
line that goes to the part whose duty it is. An input that comes while another's actions are being carried out waits.
"""

from __future__ import annotations

import asyncio
import signal
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from .. import events
from ..config import Config
from ..core import api, local
from ..core.controller import Controller
from ..core.messages import AnyMessage, Goodbye, RankCalls, Verdict
from ..core.types import NodeId, World, listed
from ..errors import EXIT_CONFIG, EXIT_FENCED, EXIT_OK, DeadpoolError, InvariantViolated, PeerRefused
from ..host.contacts import FOLDER
from ..host.repeats import Cuts
from ..transport.flight_recorder import read_calls
from ..transport.handshake import Credentials
from ..transport.rendezvous import Hello
from ..transport.tasks import begin
from ..transport.unix import LocalPeer
from .fetching import Fetches
from .fullness import Fullness
from .host import Host
from .joining import Job
from .lives import Lives
from .meeting import Links
from .mirroring import Mirroring
from .reports import Reports
from .settings import policy_of, timing_of
from .slots import Slot
from .spares import Spares
from .takeover import TakeOvers
from .unwinding import Unwinding
from .witness import Claims
from .workers import Workers
from .world import Place, described, form_world, rack_named

WORKERS_KILL_S = 0.5
SUPERVISORS_END_S = 4.0
WITHDRAW_S = 1.0


class Agent:
    """One node's agent; `run` once, on the loop on which it was made.

    Args:
        host: the machine it runs on, its own.
        place: this node in the launcher's world.
        credentials: the host's, too; their `job` is filled in when the nodes have met.
        job: what this node was started with, and whether it joins a job that runs.
    """

    def __init__(self, host: Host, place: Place, config: Config, credentials: Credentials, job: Job) -> None:
        self._host, self._config, self._job = host, config, job
        node = self._node = place.node
        self._credentials = credentials
        self._in_job = job.invitation is None
        """False until a host that joins has asked to. Until then the node id may turn out to be another host's."""
        self._verdict: Verdict | None = None
        self._inputs: deque[api.Input] = deque()
        self._stepping = False
        self._actions: dict[type[api.Action], Callable[[Any], None]] = {
            api.Send: lambda action: self._links.mesh.send(action.to, action.message),
            api.StartWorkers: lambda action: self._workers.start_groups(action.world.generation, action.store),
            api.StartRehearsal: lambda action: self._spares.order(action),
            api.Commit: self._commit,
            api.AbortWorkers: self._abort,
            api.PauseWorkers: self._pause,
            api.ResumeWorkers: self._resume,
            api.ReadCalls: self._read_calls,
            api.EndRank: lambda action: self._lives.end_rank(action.rank, action.reason),
            api.Claim: lambda action: self._claims.claim(action),
            api.Look: lambda action: self._claims.look(action),
            api.Reconfigure: self._reconfigure,
            api.Emit: self._emit,
            api.Leave: self._leave,
        }
        loop = self._loop = asyncio.get_running_loop()
        self._left: asyncio.Future[int] = loop.create_future()
        loop.set_exception_handler(lambda _, context: self._unhandled(context))
        self._cuts = Cuts(node, host.output, config.output_dir, lambda: credentials.job)
        self._links = Links(place, config, credentials, job, host, self)
        self._store = host.store
        self._reports = Reports(node, host.output, config.output_dir, self._links.roster.hosts)
        self._mirroring = Mirroring(node, config.copies, host, config.patience_s, self.feed)
        slots = [Slot(local_rank) for local_rank in range(place.local_size)]
        self._lives = Lives(
            node, slots, host.processes, self.feed, lambda slot: self._spares.replace(slot),
            lambda text: self._reports.emit(events.Note(text=text)),
        )  # fmt: skip
        self._workers = Workers(
            place, host, config.output_dir, slots, self._lives, self.feed,
            self._heard, lambda: credentials.job,
        )  # fmt: skip
        fetches = Fetches(node, host, config.patience_s, self._reports, self.feed)
        self._spares = Spares(
            node, self._workers, host, fetches, self._reports, self._mirroring.check_memory,
            config.history_limit_bytes, self.feed,
        )  # fmt: skip
        self._fullness = Fullness(self._store, self._reports, config.history_limit_bytes, self.feed)
        self._takeovers = TakeOvers(
            node, self._workers, self._mirroring, self._spares, fetches, self._store,
            config.start_timeout_s, self.feed,
        )  # fmt: skip
        self._unwinding = Unwinding(slots, self._lives, config.phase_timeout_s, config.saving_timeout_s)
        self._controller = Controller(node, timing_of(config), policy_of(config))
        self._claims = Claims(host, lambda: credentials.job, self._reports, self.feed)
        host.serve(self._workers.on_message, self._lives.closed)
        loop.add_signal_handler(signal.SIGTERM, self._lives.told, f"the agent of node {node} was told to end (SIGTERM)")

    async def run(self) -> int:
        """From the first connection to the last; the exit code."""
        alive, starting = [asyncio.create_task(self._guarded(work)) for work in (self._say_alive(), self._start())]
        self._ticking: asyncio.Handle = self._loop.call_soon(self._tick)
        try:
            exit_code = await self._left
            self._ticking.cancel()
            starting.cancel()
            return await self._end(exit_code)
        finally:
            alive.cancel()
            self._host.end()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """`work`, whose failure is this node's end."""
        try:
            await work
        except Exception as error:
            self._broke(error)

    def _broke(self, error: BaseException) -> None:
        """An error nobody can handle: say it and leave; to the others this node is lost."""
        if not isinstance(error, DeadpoolError) or isinstance(error, InvariantViolated):
            traceback.print_exception(error)
        if self._controller.world is None or self._left.done():
            self._reports.say(f"node {self._node}: {error}")
        else:
            self._reports.emit(events.NodeFenced(reason=f"its agent failed: {error!r}"))
        self._leave(api.Leave(getattr(error, "exit_code", EXIT_FENCED), str(error)))

    def _unhandled(self, context: dict[str, Any]) -> None:
        """Something failed in a callback of the loop."""
        error = context.get("exception")
        if error is None:
            self._reports.emit(events.Note(text=str(context.get("message"))))
        else:
            self._broke(error)

    # ---- starting

    async def _start(self) -> None:
        """Meet the others, link up, and let the controller begin. Raises: DeadpoolError."""
        hello = await self._links.listen(self._mirroring.on_mirrored)
        if self._job.invitation:
            arrival = await self._links.join(hello)
            self._publishing = begin(self._publish(hello))  # the file system may hang
            for one in arrival.hellos:
                self._host.bulk.know(one.node, one.bulk)
            self._claims.check(False, lambda error: self.feed(api.NodeGivenUp(str(error))))
            self._ask_to_join(arrival.members)
        else:
            hellos = await self._links.meet(hello)
            self._publishing = begin(self._publish(hello))  # the file system may hang
            self._claims.check(self._node == 0, lambda error: self.feed(api.StopRequested(str(error), EXIT_CONFIG)))
            for one in hellos:
                self._host.bulk.know(one.node, one.bulk)
            config = self._config
            world = form_world(hellos, config.spares, config.racks, config.copies)
            self._enter(world, [f"{one.host} ({one.control[0]})" for one in hellos])

    async def _publish(self, hello: Hello) -> None:
        secret_files, job = self._job.secret_files, self._credentials.job
        try:
            await self._host.at_files(lambda: self._host.publish(hello, secret_files, job))
        except OSError as error:  # a full disk is not worth a node
            folder = self._config.output_dir / FOLDER
            self._reports.say(f"node {self._node} is not in {folder} ({error.strerror}): only `--to` finds it there")

    def _ask_to_join(self, members: tuple[NodeId, ...]) -> None:
        """The job runs already: this host's first world is that of the plan that takes it in."""
        host, self._in_job = self._host.name, True
        self._reports.emit(events.NodeJoined(host=host, ranks=(), spare=True))
        self.feed(api.Joining(members, rack_named(self._node, host, self._config.racks)))

    def _enter(self, world: World, hosts: list[str]) -> None:
        self._mirroring.enter(world)
        self._workers.form(world)
        self.feed(api.WorldFormed(world))
        if self._node == 0:
            for line in (*described(world, hosts), self._links.how_to_join):
                self._reports.say(line)
            if self._reports.follows_another_job:
                folder = self._config.output_dir.absolute()
                self._reports.say(
                    f"output_dir {folder} has files of an earlier job; this job's lines are added to them"
                )
        ranks = world.ranks_of(self._node)
        self._reports.emit(events.NodeJoined(host=self._host.name, ranks=ranks, spare=not ranks))

    def _tick(self) -> None:
        self._ticking = self._loop.call_later(self._config.tick_s, self._tick)
        self.feed(api.Ticked())
        self._reports.await_ranks(self._controller.awaited, self._controller.world, self._loop.time())

    async def _say_alive(self) -> None:
        """A job that waits, or is slow, shall not be taken for one that is gone. What scripts do after the training is
        each node's own."""
        while True:
            await asyncio.sleep(events.ALIVE_S)
            if self._controller.world is not None and (self._lives.ending or self._controller.leads):
                self._reports.emit(events.Alive())

    # ---- inputs

    def feed(self, event: api.Input) -> None:
        """Give the controller one input and carry out what it says."""
        self._inputs.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._inputs:
                for action in self._controller.step(self._inputs.popleft(), self._loop.time()):
                    self._actions[type(action)](action)
        except Exception as error:  # not the fault of whoever sent the message
            self._broke(error)
        finally:
            self._stepping = False

    @property
    def world(self) -> World | None:
        return self._controller.world

    def admitted(self, hello: Hello) -> None:
        self._host.bulk.know(hello.node, hello.bulk)

    def received(self, node: NodeId, message: AnyMessage) -> None:
        self._links.roster.heard(node, message)
        self.feed(api.Received(node, message))

    def link_lost(self, node: NodeId, reason: str) -> None:
        self._links.roster.gone(node)
        self.feed(api.LinkLost(node, reason, silent=node in self._links.mesh.silent))

    def still_silent(self, node: NodeId, reason: str) -> None:
        self.feed(api.LinkLost(node, reason, silent=True, still=True))

    def told_to_stop(self, host: str) -> None:
        self.feed(api.StopRequested(f"ended by `deadpool stop` on {host}", 128 + signal.SIGINT))

    def refused(self, error: PeerRefused) -> None:
        self._reports.emit(events.PeerRefused(address=error.address, reason=str(error)))

    def _heard(self, slot: Slot, peer: LocalPeer, message: local.LocalMessage) -> None:
        """Hand what a slot's process, or who looks after it, says to the part whose duty it is."""
        match message:
            case local.WorkerHello():
                self._spares.introduced(slot, peer, message)
            case local.RankReady():
                self._mirroring.rank_ready(slot, peer, message)
            case local.Staged():
                self._mirroring.staged(slot, message)
            case local.Progress(rank=rank):
                self.feed(api.WorkerMoved(rank))
            case local.Finished(rank=rank):
                self.feed(api.WorkerFinished(rank))
            case local.Saved(step=step, path=path, whole=whole):
                self.feed(api.CheckpointSaved(step, path, whole))
            case local.ConnectionBroke():
                self.feed(api.ConnectionBroke(message.rank, message.generation, message.peers, message.reason))
            case local.Unwound():
                self._unwinding.unwound(slot, message)
            case local.Saving():
                self._unwinding.saving(slot, message)
            case local.Restored():
                self._unwinding.unwound(slot, message)
                self._workers.restored(slot, message)
            case local.Rehearsed():
                self._spares.rehearsed(slot, message)
            case local.Moved():
                self._spares.moved(slot, message)
            case local.Failing():
                self._spares.failing(slot, message)
            case local.StoreOffer():
                self._workers.store_offer(slot, message)
            case local.OutOfReach():
                self._lives.out_of_reach(slot, message)
            case local.WorkerEvent(kind=kind, fields=fields):
                self._cuts.heard(slot.pipe, kind, fields)
                self._reports.worker_event(kind, fields)
            case local.WorkerExited():
                self._lives.exited(slot, message)
            case local.StandbyExited():
                self._lives.standby_exited(slot, message)
            case local.CannotEnd():
                self._lives.cannot_end(slot, message)
            case local.Leaving():
                self._lives.leaving(slot, message)
            case _:
                raise InvariantViolated(f"{type(message).__name__} came from local rank {slot.local_rank}")

    # ---- actions

    def _commit(self, action: api.Commit) -> None:
        self._workers.commit(action.step)
        self._spares.committed(action.step)
        self._mirroring.committed()
        self._fullness.look(self._mirroring.world.ranks_of(self._node), action.step)

    def _abort(self, action: api.AbortWorkers) -> None:
        self._takeovers.cancel()
        self._store.announce(action.generation)  # so that all can know before the first of them is cut off
        self._workers.abort(action.generation)
        if not self._lives.paused:
            self._unwinding.begin(action.generation)
        self._store.fence(action.generation)

    def _read_calls(self, action: api.ReadCalls) -> None:
        own = ((slot.rank, self._store.own(slot.rank)) for slot in self._workers.slots if slot.rank >= 0)
        ranks = [RankCalls(rank, read_calls(pair.calls, action.generation)) for rank, pair in own if pair is not None]
        self.feed(api.CallsRead(action.generation, tuple(ranks)))

    def _pause(self, action: api.PauseWorkers) -> None:
        self._lives.pause()
        self._unwinding.pause()

    def _resume(self, action: api.ResumeWorkers) -> None:
        self._lives.resume()
        if self._store.generation > self._reports.generation:  # fenced meanwhile: the time to unwind begins now
            self._unwinding.begin(self._store.generation)

    def _reconfigure(self, action: api.Reconfigure) -> None:
        plan = action.plan
        self._reports.generation = plan.world.generation
        self._takeovers.act(plan)
        self._links.roster.missed.clear()
        for node in plan.lost_nodes:
            self._links.mesh.drop(node)
            self._links.roster.gone(node)
        self._forgetting = asyncio.create_task(self._host.bulk.forget(plan.lost_nodes))

    def _emit(self, action: api.Emit) -> None:
        event, world = action.event, self._controller.world
        self._reports.leads = self._controller.leads
        self._reports.emit(event)
        if isinstance(event, events.NodeLost):
            self._links.roster.missed |= {*event.lost}
        if isinstance(event, (events.WaitingForHost, events.SwapDone)):
            left = len(world.spares) if world is not None else 0
            self._reports.say(f"spares left: {left}; {self._links.how_to_join}")

    def _leave(self, action: api.Leave) -> None:
        if not self._left.done():
            self._verdict = action.verdict
            self._left.set_result(action.exit_code)

    # ---- the end

    async def _end(self, exit_code: int) -> int:
        """Tell the others, let or make the workers end, then the supervisors; every wait but one has a deadline.

        Returns: the node's exit code: a worker may still fail after everyone's training has ended well.
        """
        lives = self._lives
        self._takeovers.cancel()
        self._spares.drop()
        lives.end(exit_code)
        goodbye = Goodbye(self._controller.generation, self._verdict) if exit_code != EXIT_FENCED else None
        await self._links.mesh.close(goodbye)
        withdrawing = begin(self._host.at_files(self._host.withdraw))
        if exit_code == EXIT_OK:
            exit_code = await self._last_work()
        else:
            await lives.wait(lambda: lives.workers_gone, WORKERS_KILL_S)
        lives.end_supervisors(exit_code)
        await lives.wait(lambda: lives.supervisors_gone, SUPERVISORS_END_S)
        await self._drain()
        await self._host.close()
        await asyncio.wait([withdrawing], timeout=WITHDRAW_S)  # the file system may hang
        if dropped := self._host.output.dropped_bytes:
            self._reports.say(f"node {self._node}: {dropped} bytes of output could not be written")
        if self._in_job:
            self._reports.emit(events.NodeEnded(exit_code=exit_code))
        return exit_code

    async def _last_work(self) -> int:
        """Training is over everywhere: what scripts still do takes as long as it takes. The worst exit code of them."""
        lives, timeout_s, told = self._lives, self._config.decision_timeout_s, ""
        while not await lives.wait(lambda: not lives.at_work, timeout_s):
            if not told:
                ranks = listed(sorted(lives.at_work))
                told = f"node {self._node}: training is over; the script(s) of rank(s) {ranks} still run"
                self._reports.say(told)
        if await lives.wait(lambda: lives.workers_gone, timeout_s) or not (held := lives.unended):
            return lives.late_exit_code
        ranks = listed(sorted(held))
        self._reports.say(f"node {self._node}: the process(es) of rank(s) {ranks} did not end and are killed")
        return lives.late_exit_code or 1

    async def _drain(self) -> None:
        """The last words of the workers are still in their pipes."""
        self._workers.hear_unnamed()
        pipes = [slot.pipe for slot in self._workers.slots if slot.pipe is not None]
        waits = [asyncio.create_task(pipe.ended.wait()) for pipe in pipes]
        if waits:
            await asyncio.wait(waits, timeout=WORKERS_KILL_S)
        for pipe in pipes:
            pipe.close()
