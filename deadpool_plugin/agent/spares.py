"""Rehearsals: a process that goes through a rank's script alone, and is kept at the committed step.

Rules of this file: a rehearsal has one process, one recording and one growing history; records are pulled from the
node that runs the rank, in step order, only up to what is committed. On a spare it begins on order and follows; on the
rank's own node it begins when the rank has lost its process, and has all it needs in this node's memory.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine

from .. import events
from ..core import api, local
from ..core.placement import LocalSlot
from ..core.types import NO_STEP, NodeId, Rank, Step
from ..errors import DeadpoolError, MemoryShortage
from ..mirror.records import History, HistoryPruned
from ..mirror.wire import RefusedByPeer
from ..transport.tasks import loop_time
from ..transport.unix import LocalPeer
from .fetching import Fetches
from .host import Host
from .profile import Profile, decode_profile
from .rehearsal import Rehearsal
from .reports import Reports
from .slots import Slot
from .workers import Workers

_RETRY_S = 0.2
DIFFERS_CODE = 1
"""Exit code of a job whose data cannot be read again."""
SAY_MOVED_S = 10.0
"""Between two lines about a newcomer on its way."""


class Spares:
    """Thread: the event loop's only.

    `check_memory(profile, node)` raises MemoryShortage if this host does not hold what `node` runs and mirrors.
    """

    def __init__(
        self,
        node: NodeId,
        workers: Workers,
        host: Host,
        fetches: Fetches,
        reports: Reports,
        check_memory: Callable[[Profile, NodeId], None],
        history_limit_bytes: int,
        feed: Callable[[api.Input], None],
    ) -> None:
        self._node, self._workers, self._host, self._fetches = node, workers, host, fetches
        self._reports, self._feed, self._history_limit_bytes = reports, feed, history_limit_bytes
        self._check_memory_of = check_memory
        self._store = host.store
        self._committed: Step = NO_STEP
        self._said_at, self._said_of = 0.0, -1
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ordered: dict[int, Rank] = {}
        """The next rehearsal of each slot, until it has begun."""
        self.rehearsals: dict[int, Rehearsal] = {}

    # ---- starting one

    def order(self, action: api.StartRehearsal) -> None:
        slot = self._workers.slots[action.local_slot]
        self._ordered[slot.local_rank] = action.rank
        self._run(slot, self._start(slot, action.rank, action.source))

    def _run(self, slot: Slot, work: Coroutine[None, None, None]) -> None:
        self.stop_following(slot)
        self._tasks[slot.local_rank] = asyncio.get_running_loop().create_task(work)

    async def _start(self, slot: Slot, rank: Rank, source: NodeId) -> None:
        began = loop_time()
        while True:
            try:
                await self.begin(slot, rank, source)
                return
            except DeadpoolError as error:  # who has come to run the rank just now may not hold its recording yet
                if not isinstance(error, RefusedByPeer) or loop_time() - began >= self._fetches.patience_s:
                    self._ordered.pop(slot.local_rank, None)
                    self._fail(slot, rank, str(error))
                    return
            await asyncio.sleep(_RETRY_S)

    def replace(self, slot: Slot) -> None:
        """The slot's rank has lost its process: another one rehearses it while the others agree on what to do."""
        if self._store.records.has_recording(slot.rank):
            self._run(slot, self._start(slot, slot.rank, self._node))

    async def begin(self, slot: Slot, rank: Rank, source: NodeId) -> Rehearsal:
        """Get the rank's recording, from `source` if it is not here, and have a process rehearse it.

        Raises: DeadpoolError if it is not held there
        """
        profile = decode_profile(await self._fetches.recording(source, rank))
        process = self._workers.rehearse(slot, rank)
        rehearsal = Rehearsal(slot, process, profile, source, History(self._history_limit_bytes))
        self.rehearsals[slot.local_rank] = rehearsal
        self._ordered.pop(slot.local_rank, None)
        self._drop_unused()
        return rehearsal

    def _drop_unused(self) -> None:
        """Arenas made for ranks nobody rehearses here any more."""
        self._store.drop_prepared({other.rank for other in self.rehearsals.values() if other.alive})

    def of(self, slot: Slot, rank: Rank) -> Rehearsal | None:
        """The rehearsal of `rank` that is under way (or done) in `slot`, if its process lives."""
        rehearsal = self.rehearsals.get(slot.local_rank)
        return rehearsal if rehearsal is not None and rehearsal.alive and rehearsal.rank == rank else None

    def seen(self, slot: Slot) -> LocalSlot:
        """The slot as a plan sees it."""
        rehearsal = self.rehearsals.get(slot.local_rank)
        rehearsed = rehearsal.rank if rehearsal is not None and rehearsal.alive else -1
        return LocalSlot(slot.rank, slot.serving is not None, rehearsed)

    def done(self, slot: Slot) -> None:
        """The slot's process has been told to take over: what it still had to know is in the store, and another rank
        that it was to rehearse next is others'."""
        self.stop_following(slot)
        self._ordered.pop(slot.local_rank, None)
        self.rehearsals.pop(slot.local_rank, None)
        self._drop_unused()

    def introduced(self, slot: Slot, peer: LocalPeer, message: local.WorkerHello) -> None:
        rehearsal = self.of(slot, message.rank)
        if rehearsal is not None:
            peer.send(local.Rehearsal(message.rank, rehearsal.profile.recording))

    def rehearsed(self, slot: Slot, message: local.Rehearsed) -> None:
        rehearsal = self.of(slot, message.rank)
        if rehearsal is None:
            return
        rehearsal.finished.set()
        self._reports.emit(events.Rehearsed(rank=message.rank, duration_s=message.duration_s))
        if slot.rank < 0:
            if all(other.finished.is_set() for other in self.rehearsals.values()):
                self._check_memory(rehearsal)  # first: a spare that is short of memory is not to be called ready
            self._feed(api.SpareRehearsed(slot.local_rank, message.rank))
            self._run(slot, self._prepare(rehearsal))

    def moved(self, slot: Slot, message: local.Moved) -> None:
        """A newcomer on its way through past steps, for whom everybody waits; nobody waits for a spare.

        Of several newcomers here people are told of one, until that one says no more.
        """
        if slot.rank != message.rank or slot.process is None:
            return
        self._feed(api.WorkerMoved(message.rank))
        now, step, target = loop_time(), message.step, self._workers.committed
        slot.process.moved_from = began, first = slot.process.moved_from or (now, step)
        quiet_s = now - self._said_at
        if quiet_s >= SAY_MOVED_S and (message.rank == self._said_of or quiet_s >= 2 * SAY_MOVED_S):
            self._said_at, self._said_of = now, message.rank
            left_s = (target - step) * (now - began) / (step - first) if first < step <= target else -1.0
            self._reports.emit(events.CatchingUp(rank=message.rank, step=step, target=target, left_s=left_s))

    def _check_memory(self, rehearsal: Rehearsal) -> None:
        """Check that this node can hold the lost one's mirrors, too, after a take-over; tell people if it cannot.

        The spare stays: another attempt would cost a rehearsal and find no more memory, the last one would cost the
        spare (and everybody a swap), and the next loss then ends a job whose state it could have saved.
        """
        try:
            self._check_memory_of(rehearsal.profile, rehearsal.source)
        except MemoryShortage as error:
            reason = f"memory here does not hold what node {rehearsal.source} runs and mirrors: {error}"
            self._doubt(rehearsal, reason)

    def _doubt(self, rehearsal: Rehearsal, reason: str) -> None:
        """The rehearsal is of no use, and another attempt would be of none either."""
        self._reports.emit(events.RehearsalFailed(rank=rehearsal.rank, reason=reason))
        self._feed(api.SpareUnable(reason))

    async def _prepare(self, rehearsal: Rehearsal) -> None:
        """Make the arena a take-over will need, then follow."""
        rank, profile = rehearsal.rank, rehearsal.profile
        try:
            await self._host.in_thread(
                lambda: self._store.prepare_own(rank, profile.header_bytes, profile.payload_bytes)
            )
        except DeadpoolError as error:
            self._reports.emit(events.Note(text=f"no arena for rank {rank} beforehand: {error}"))
        await self._follow(rehearsal)

    def failing(self, slot: Slot, message: local.Failing) -> None:
        """A script ends with an error: worth a word, and before it trains also the end of the rehearsal.

        One that has read other data than the rank it takes over has failed as any script has: another process begins
        anew, and if that reads other data, too, the job ends.
        """
        if slot.process is not None:
            slot.process.failing = message.reason
        if slot.pipe is not None and slot.rank == message.rank:
            slot.pipe.note(f"rank {message.rank}'s script ended: {message.reason}")
        rehearsal = self.of(slot, message.rank)
        if message.differs and slot.rank == message.rank and slot.living is not None:
            self._reports.emit(events.RehearsalFailed(rank=message.rank, reason=message.reason))
            self._workers.lives.kill(slot, slot.living, message.reason, DIFFERS_CODE)
        elif rehearsal is not None:
            self._fail(slot, message.rank, message.reason)

    def _fail(self, slot: Slot, rank: Rank, reason: str) -> None:
        self._reports.emit(events.RehearsalFailed(rank=rank, reason=reason))
        self.give_up(slot, rank, reason)

    def give_up(self, slot: Slot, rank: Rank, reason: str) -> None:
        """This attempt at `rank` has come to nothing; its process, if there is one, goes."""
        rehearsal = self.of(slot, rank)
        if rehearsal is not None:
            self._workers.lives.kill(slot, rehearsal.process, reason)
        else:
            self._feed(
                api.WorkerLost(rank, reason) if slot.rank == rank else api.SpareFailed(slot.local_rank, rank, reason)
            )

    # ---- following

    def committed(self, step: Step) -> None:
        """Spares follow to `step`."""
        self._committed = max(self._committed, step)
        for rehearsal in self.rehearsals.values():
            task = self._tasks.get(rehearsal.slot.local_rank)
            if rehearsal.ready and rehearsal.slot.rank < 0 and (task is None or task.done()):
                self._run(rehearsal.slot, self._follow(rehearsal))

    async def _follow(self, rehearsal: Rehearsal) -> None:
        """Up to the committed step, which may grow meanwhile; what fails is tried again at the next commit."""
        try:
            while rehearsal.told < self._committed and rehearsal.listener is not None:
                await self.pull(rehearsal, rehearsal.source, self._committed)
                await rehearsal.tell()
        except DeadpoolError as error:
            self._reports.emit(events.Note(text=f"cannot follow rank {rehearsal.rank} now: {error}"))
            refused = isinstance(error, (RefusedByPeer, HistoryPruned))
            if refused and rehearsal.told == NO_STEP and not rehearsal.doubted:
                rehearsal.doubted = True  # what a process must begin with may have been dropped for good
                self._doubt(rehearsal, str(error))

    async def pull(self, rehearsal: Rehearsal, source: NodeId, last: Step) -> None:
        """Have the records up to `last`, from `source`. Raises: TransportError, HistoryPruned."""
        await rehearsal.pull(functools.partial(self._fetches.records, source, rehearsal.rank), last)

    def stop_following(self, slot: Slot) -> None:
        task = self._tasks.pop(slot.local_rank, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def swapped(self, owners: tuple[NodeId, ...], restore_step: Step) -> None:
        """A new world, back at `restore_step`: its nodes are the sources from now on.

        A process that has followed a rank further than that cannot go back: another one begins (a plan goes behind what
        was committed only if more was lost than `copies` cover).
        """
        self._committed = NO_STEP
        for number, rank in self._ordered.items():
            slot = self._workers.slots[number]
            self._run(slot, self._start(slot, rank, owners[rank]))
        for number, rehearsal in list(self.rehearsals.items()):
            if number in self._ordered:
                continue
            slot, rank = rehearsal.slot, rehearsal.rank
            self.stop_following(slot)
            if rehearsal.told > restore_step:
                del self.rehearsals[number]
                self._run(slot, self._start(slot, rank, owners[rank]))
            else:
                rehearsal.source = owners[rank]
                rehearsal.history.truncate(restore_step)

    def drop(self) -> None:
        """Forget every rehearsal."""
        self.rehearsals.clear()
        self._ordered.clear()
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
