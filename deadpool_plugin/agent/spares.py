"""Rehearsals: a process that goes through a rank's script alone, and is kept at the committed step.

Rules of this file: a rehearsal has one process, one recording and one growing history. Records are pulled from the
node that runs the rank, in step order, some steps at a time, and only up to what is committed. On a spare a rehearsal
begins on order and follows. On the rank's own node it begins when the rank has lost its process, and has all it needs
in this node's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field

from .. import events
from ..core import api, local
from ..core.placement import LocalSlot
from ..core.types import NO_STEP, NodeId, Rank, Step
from ..errors import DeadpoolError, MemoryShortage
from ..mirror.records import CallHistory, HistoryPruned
from ..mirror.wire import RefusedByPeer, how_many_fit
from ..transport.tasks import loop_time
from ..transport.unix import LocalPeer
from .mirroring import Mirroring, decode_profile
from .node import LocalNode, Process, Slot
from .process_monitor import ProcessMonitor
from .workers import Workers

PULL_STEPS = 1024
"""The most steps whose records one request asks for. Each request has a connection of its own."""
CHUNK_STEPS = 64
"""Records that one message to the process holds."""
DIFFERS_CODE = 1
"""Exit code of a job whose data cannot be read again."""
SAY_MOVED_S = 10.0
"""Between two lines about a newcomer on its way."""
_RETRY_S = 0.2


@dataclass(eq=False)
class Rehearsal:
    """One slot's rehearsal of one rank. `history` is what has been pulled; `told` the newest step its process knows."""

    slot: Slot
    process: Process
    profile: local.RankReady
    source: NodeId
    history: CallHistory
    told: Step = NO_STEP
    doubted: bool = False
    """People have been told that it could not be told of the first steps."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    pulling: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def rank(self) -> Rank:
        return self.process.rank

    @property
    def alive(self) -> bool:
        return self.slot.living is self.process

    @property
    def listener(self) -> LocalPeer | None:
        """The connection to its process, None if it can be told nothing."""
        return self.process.peer if self.alive else None

    async def tell(self) -> None:
        """Pass on to the process what it does not know yet, as fast as it reads. Raises: HistoryPruned."""
        last = self.history.last
        while self.told < last and (peer := self.listener) is not None:
            first, until = self.told + 1, min(last, self.told + CHUNK_STEPS)
            records = self.history.get(first, until)
            fitting = how_many_fit(records)
            peer.send(local.History(records[:fitting]))
            self.told += fitting
            await peer.drained()


class Spares:
    """The rehearsals of this node's slots."""

    def __init__(self, node: LocalNode, monitor: ProcessMonitor, workers: Workers, mirroring: Mirroring) -> None:
        self._node, self._monitor, self._workers, self._mirroring = node, monitor, workers, mirroring
        self._committed: Step = NO_STEP
        self._said_at, self._said_of = 0.0, -1
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ordered: dict[int, Rank] = {}
        """The next rehearsal of each slot, until it has begun."""
        self.rehearsals: dict[int, Rehearsal] = {}

    def order(self, local_slot: int, rank: Rank, source: NodeId) -> None:
        self._ordered[local_slot] = rank
        self._start(self._node.slots[local_slot], rank, source)

    def replace(self, slot: Slot) -> None:
        """Rehearse the rank of a slot that has lost its process, while the others agree on what to do."""
        if slot.rank in self._node.host.store.recordings:
            self._start(slot, slot.rank, self._node.id)

    def _start(self, slot: Slot, rank: Rank, source: NodeId) -> None:
        self._run(slot, self._begin_in_time(slot, rank, source))

    def _run(self, slot: Slot, work: Coroutine[None, None, None]) -> None:
        self.stop_following(slot)
        self._tasks[slot.local_rank] = asyncio.get_running_loop().create_task(work)

    async def _begin_in_time(self, slot: Slot, rank: Rank, source: NodeId) -> None:
        began = loop_time()
        while True:
            try:
                await self.begin(slot, rank, source)
                return
            except DeadpoolError as error:  # who has come to run the rank just now may not hold its recording yet
                if not isinstance(error, RefusedByPeer) or loop_time() - began >= self._node.config.patience_s:
                    self._ordered.pop(slot.local_rank, None)
                    return self._fail(slot, rank, str(error))
            await asyncio.sleep(_RETRY_S)

    async def begin(self, slot: Slot, rank: Rank, source: NodeId) -> Rehearsal:
        """Get the rank's recording, from `source` if it is not here, and have a process rehearse it."""
        profile = decode_profile(await self._mirroring.recording(source, rank))
        process = self._workers.order(slot, rank, rehearses=True)
        history = CallHistory(self._node.config.history_limit_bytes)
        rehearsal = self.rehearsals[slot.local_rank] = Rehearsal(slot, process, profile, source, history)
        self._ordered.pop(slot.local_rank, None)
        self._drop_unused()
        return rehearsal

    def _drop_unused(self) -> None:
        self._node.host.store.drop_prepared({other.rank for other in self.rehearsals.values() if other.alive})

    def of(self, slot: Slot, rank: Rank) -> Rehearsal | None:
        """Return the rehearsal of `rank` that is under way (or done) in `slot`, if its process lives."""
        rehearsal = self.rehearsals.get(slot.local_rank)
        return rehearsal if rehearsal is not None and rehearsal.alive and rehearsal.rank == rank else None

    def seen(self, slot: Slot) -> LocalSlot:
        """Return the slot as a plan sees it."""
        rehearsal = self.rehearsals.get(slot.local_rank)
        rehearsed = rehearsal.rank if rehearsal is not None and rehearsal.alive else -1
        return LocalSlot(slot.rank, slot.serving is not None, rehearsed)

    def introduced(self, slot: Slot, peer: LocalPeer, message: local.WorkerHello) -> None:
        if (rehearsal := self.of(slot, message.rank)) is not None:
            peer.send(local.Recording(message.rank, rehearsal.profile.recording))

    def rehearsed(self, slot: Slot, message: local.Rehearsed) -> None:
        rehearsal = self.of(slot, message.rank)
        if rehearsal is None:
            return
        rehearsal.finished.set()
        self._node.reports.emit(events.Rehearsed(rank=message.rank, duration_s=message.duration_s))
        if slot.rank < 0:
            if all(other.finished.is_set() for other in self.rehearsals.values()):
                # First: a spare that is short of memory for the mirrors that come with its ranks is not called ready.
                # It stays: another attempt would cost a rehearsal and find no more memory, the last one would cost the
                # spare (and everybody a swap), and the next loss then ends a job whose state it could have saved.
                try:
                    self._mirroring.check_memory(rehearsal.profile, rehearsal.source)
                except MemoryShortage as error:
                    lost = f"memory here does not hold what node {rehearsal.source} runs and mirrors"
                    self._doubt(rehearsal, f"{lost}: {error}")
            self._node.feed(api.SpareRehearsed(slot.local_rank, message.rank))
            self._run(slot, self._prepare(rehearsal))

    def _doubt(self, rehearsal: Rehearsal, reason: str) -> None:
        self._node.reports.emit(events.RehearsalFailed(rank=rehearsal.rank, reason=reason))
        self._node.feed(api.SpareUnable(reason))

    async def _prepare(self, rehearsal: Rehearsal) -> None:
        rank, profile, host = rehearsal.rank, rehearsal.profile, self._node.host
        try:
            await host.in_thread(lambda: host.store.prepare_own(rank, profile.header_bytes, profile.payload_bytes))
        except DeadpoolError as error:
            self._node.reports.emit(events.Note(text=f"no arena for rank {rank} beforehand: {error}"))
        await self._follow(rehearsal)

    def moved(self, slot: Slot, message: local.Moved) -> None:
        """Report on a newcomer on its way through past steps, for whom everybody waits; of several, on one."""
        if slot.rank != message.rank or slot.process is None:
            return
        self._node.feed(api.WorkerMoved(message.rank))
        now, step, target = loop_time(), message.step, self._workers.committed
        slot.process.moved_from = began, first = slot.process.moved_from or (now, step)
        quiet_s = now - self._said_at
        if quiet_s >= SAY_MOVED_S and (message.rank == self._said_of or quiet_s >= 2 * SAY_MOVED_S):
            self._said_at, self._said_of = now, message.rank
            left_s = (target - step) * (now - began) / (step - first) if first < step <= target else -1.0
            self._node.reports.emit(events.CatchingUp(rank=message.rank, step=step, target=target, left_s=left_s))

    def failing(self, slot: Slot, message: local.Failing) -> None:
        """Report the error a script ends with; before it trains that also ends the rehearsal."""
        if slot.process is not None:
            slot.process.failing = message.reason
        if slot.pipe is not None and slot.rank == message.rank:
            slot.pipe.note(f"rank {message.rank}'s script ended: {message.reason}")
        if message.differs and slot.rank == message.rank and slot.living is not None:
            self._node.reports.emit(events.RehearsalFailed(rank=message.rank, reason=message.reason))
            # As any script's failure: another process begins anew; if that reads other data, too, the job ends.
            self._monitor.kill(slot, slot.living, message.reason, DIFFERS_CODE)
        elif self.of(slot, message.rank) is not None:
            self._fail(slot, message.rank, message.reason)

    def _fail(self, slot: Slot, rank: Rank, reason: str) -> None:
        self._node.reports.emit(events.RehearsalFailed(rank=rank, reason=reason))
        self.give_up(slot, rank, reason)

    def give_up(self, slot: Slot, rank: Rank, reason: str) -> None:
        """Abandon this attempt at `rank`; its process, if there is one, goes."""
        rehearsal = self.of(slot, rank)
        if rehearsal is not None:
            self._monitor.kill(slot, rehearsal.process, reason)
        elif slot.rank == rank:
            self._node.feed(api.WorkerLost(rank, reason))
        else:
            self._node.feed(api.SpareFailed(slot.local_rank, rank, reason))

    def committed(self, step: Step) -> None:
        """Have spares follow to `step`."""
        self._committed = max(self._committed, step)
        for rehearsal in self.rehearsals.values():
            task = self._tasks.get(rehearsal.slot.local_rank)
            follows = rehearsal.finished.is_set() and rehearsal.alive and rehearsal.slot.rank < 0
            if follows and (task is None or task.done()):
                self._run(rehearsal.slot, self._follow(rehearsal))

    async def _follow(self, rehearsal: Rehearsal) -> None:
        try:
            while rehearsal.told < self._committed and rehearsal.listener is not None:
                await self.pull(rehearsal, rehearsal.source, self._committed)
                await rehearsal.tell()
        except DeadpoolError as error:
            self._node.reports.emit(events.Note(text=f"cannot follow rank {rehearsal.rank} now: {error}"))
            refused = isinstance(error, (RefusedByPeer, HistoryPruned))
            if refused and rehearsal.told == NO_STEP and not rehearsal.doubted:
                rehearsal.doubted = True  # what a process must begin with may have been dropped for good
                self._doubt(rehearsal, str(error))

    async def pull(self, rehearsal: Rehearsal, source: NodeId, last: Step) -> None:
        """Have the records up to `last`, from `source`. Raises: TransportError, HistoryPruned."""
        history = rehearsal.history
        async with rehearsal.pulling:
            while history.last < last:
                first, until = history.last + 1, min(last, history.last + PULL_STEPS)
                records = await self._mirroring.records(source, rehearsal.rank, first, until)
                for step, record in enumerate(records, first):
                    history.append(step, record)
                await asyncio.sleep(0)  # records that are here already do not suspend

    def stop_following(self, slot: Slot) -> None:
        task = self._tasks.pop(slot.local_rank, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def swapped(self, owners: tuple[NodeId, ...], restore_step: Step) -> None:
        """Enter a new world, back at `restore_step`: its nodes are the sources from now on."""
        self._committed = NO_STEP
        for number, rank in self._ordered.items():
            self._start(self._node.slots[number], rank, owners[rank])
        for number, rehearsal in list(self.rehearsals.items()):
            if number in self._ordered:
                continue
            self.stop_following(rehearsal.slot)
            if rehearsal.told > restore_step:
                # A process cannot go back, so another one begins. A plan goes behind what was committed only if more
                # was lost than `copies` cover.
                del self.rehearsals[number]
                self._start(rehearsal.slot, rehearsal.rank, owners[rehearsal.rank])
            else:
                rehearsal.source = owners[rehearsal.rank]
                rehearsal.history.truncate(restore_step)

    def done(self, slot: Slot) -> None:
        """Let go of the slot, whose process has been told to take over; it rehearses no other rank next."""
        self.stop_following(slot)
        self._ordered.pop(slot.local_rank, None)
        self.rehearsals.pop(slot.local_rank, None)
        self._drop_unused()

    def drop(self) -> None:
        """Forget every rehearsal."""
        self.rehearsals.clear()
        self._ordered.clear()
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
