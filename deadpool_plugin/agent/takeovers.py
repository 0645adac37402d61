"""Rehearsals and take-overs: processes that go through a rank's script alone, and plans that give them the rank.

Rules of this file: a rehearsal has one process, one recording and one growing history. Records are pulled from the
node that runs the rank, in step order, and only up to what is committed. On a spare a rehearsal begins on order and
follows; on the rank's own node it begins when the rank has lost its process. Survivors of a plan are told at once. A
further plan cancels what is still under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field

from .. import events
from ..core import api, local
from ..core.placement import LocalSlot, divide
from ..core.types import NO_STEP, NodeId, Rank, Source, Step, SwapPlan
from ..errors import DeadpoolError, MemoryShortage, invariant, present
from ..mirror.records import ROW_STEPS, CallHistory, HistoryPruned, row_end, steps_in
from ..mirror.wire import RefusedByPeer, how_many_fit
from ..transport.tasks import Tasks, begin, loop_time
from ..transport.unix import LocalPeer
from .mirroring import Mirroring
from .node import LocalNode, Process, Slot
from .workers import Workers

PULL_STEPS = 16 * ROW_STEPS  # the most steps of records in one request, which has a connection of its own
DIFFERS_CODE = 1  # exit code of a job whose data cannot be read again
SAY_MOVED_S = 10.0  # between two lines about a newcomer on its way
_RETRY_S = 0.2


@dataclass(eq=False)
class Rehearsal:
    """A process's rehearsal of its rank. `history` is what has been pulled; `told` the newest step it knows."""

    process: Process
    profile: local.RankReady
    source: NodeId
    history: CallHistory
    told: Step = NO_STEP
    doubted: bool = False  # people have been told that it could not be told of the first steps
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    pulling: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def rank(self) -> Rank:
        return self.process.rank

    @property
    def listener(self) -> LocalPeer | None:
        """The connection to its process, None if it can be told nothing."""
        return None if self.process.ended else self.process.peer

    async def tell(self) -> None:
        """Pass on to the process what it does not know yet, as fast as it reads. Raises: HistoryPruned."""
        last = self.history.last
        while self.told < last and (peer := self.listener) is not None:
            records = self.history.get(self.told + 1, min(last, row_end(self.told + 1)))
            records = records[: how_many_fit(records)]
            peer.send(local.History(records))
            self.told += sum(map(steps_in, records))
            await peer.drained()


class TakeOvers:
    """The rehearsals of this node's slots, and the take-overs of the newest plan."""

    def __init__(self, node: LocalNode, workers: Workers, mirroring: Mirroring) -> None:
        self._node, self._workers, self._mirroring = node, workers, mirroring
        self._store, self._taking = node.host.store, Tasks()
        self._committed: Step = NO_STEP
        self._restore_step: Step = NO_STEP  # of the newest plan
        self._said_at, self._said_of = 0.0, -1
        self._tasks: dict[Slot, asyncio.Task[None]] = {}
        self._ordered: dict[Slot, Rank] = {}  # the next rehearsal of each slot, until it has begun
        self.rehearsals: dict[Slot, Rehearsal] = {}

    # ---- rehearsals

    def order(self, slot: Slot, rank: Rank, source: NodeId) -> None:
        self._ordered[slot] = rank
        self._run(slot, self._begin_in_time(slot, rank, source))

    def replace(self, slot: Slot) -> None:
        """Rehearse the rank of a slot that has lost its process, while the others agree on what to do."""
        if slot.rank in self._store.recordings:
            self._run(slot, self._begin_in_time(slot, slot.rank, self._node.id))

    def _run(self, slot: Slot, work: Coroutine[None, None, None]) -> None:
        self._stop_following(slot)
        self._tasks[slot] = asyncio.get_running_loop().create_task(work)

    def _stop_following(self, slot: Slot) -> None:
        task = self._tasks.pop(slot, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _begin_in_time(self, slot: Slot, rank: Rank, source: NodeId) -> None:
        began = loop_time()
        while True:
            try:
                await self.begin(slot, rank, source)
                return
            except DeadpoolError as error:  # who has come to run the rank just now may not hold its recording yet
                if not isinstance(error, RefusedByPeer) or loop_time() - began >= self._node.config.patience_s:
                    self._ordered.pop(slot, None)
                    return self._fail(slot, rank, str(error))
            await asyncio.sleep(_RETRY_S)

    async def begin(self, slot: Slot, rank: Rank, source: NodeId) -> Rehearsal:
        """Get the rank's recording, from `source` if it is not here, and have a process rehearse it."""
        profile = await self._mirroring.recording(source, rank)
        process = self._workers.order(slot, rank, rehearses=True)
        history = CallHistory(self._node.config.history_limit_bytes)
        rehearsal = self.rehearsals[slot] = Rehearsal(process, profile, source, history)
        self._settle(slot)
        return rehearsal

    def _settle(self, slot: Slot) -> None:
        self._ordered.pop(slot, None)
        self._store.drop_prepared({other.rank for other in self.rehearsals.values() if not other.process.ended})

    def _of(self, slot: Slot, rank: Rank | None = None) -> Rehearsal | None:
        """Return the rehearsal (of `rank`) that is under way or done in `slot`, if its process lives."""
        rehearsal = self.rehearsals.get(slot)
        return rehearsal if rehearsal and not rehearsal.process.ended and rank in (None, rehearsal.rank) else None

    def introduced(self, slot: Slot, peer: LocalPeer, message: local.WorkerHello) -> None:
        if (rehearsal := self._of(slot, message.rank)) is not None:
            peer.send(local.Recording(message.rank, rehearsal.profile.recording))

    def rehearsed(self, slot: Slot, message: local.Rehearsed) -> None:
        if (rehearsal := self._of(slot, message.rank)) is None:
            return
        rehearsal.finished.set()
        self._node.reports.emit(events.Rehearsed(rank=message.rank, duration_s=message.duration_s))
        if slot.rank >= 0:
            return
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
        rank, profile = rehearsal.rank, rehearsal.profile
        shape = rank, profile.header_bytes, profile.payload_bytes
        try:
            await self._node.host.in_thread(lambda: self._store.prepare_own(*shape))
        except DeadpoolError as error:
            self._node.reports.emit(events.Note(text=f"no arena for rank {rank} beforehand: {error}"))
        await self._follow(rehearsal)

    def committed(self, step: Step) -> None:
        self._committed = max(self._committed, step)
        for slot, rehearsal in self.rehearsals.items():
            task, follows = self._tasks.get(slot), rehearsal.finished.is_set() and slot.rank < 0
            if follows and not rehearsal.process.ended and (task is None or task.done()):
                self._run(slot, self._follow(rehearsal))

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
                first, until = history.last + 1, min(last, row_end(history.last + PULL_STEPS))
                history.append(until, *await self._mirroring.records(source, rehearsal.rank, first, until))
                await asyncio.sleep(0)  # records that are here already do not suspend

    def moved(self, slot: Slot, message: local.Moved) -> None:
        """Report on a newcomer on its way through past steps, for whom everybody waits; of several, on one."""
        if slot.rank != message.rank or slot.process is None:
            return
        self._node.feed(local.WorkerMoved(message.rank))
        now, step, target = loop_time(), message.step, max(self._workers.committed, self._restore_step)
        slot.process.moved_from = began, first = slot.process.moved_from or (now, step)
        quiet_s = now - self._said_at
        if quiet_s >= SAY_MOVED_S and (message.rank == self._said_of or quiet_s >= 2 * SAY_MOVED_S):
            self._said_at, self._said_of = now, message.rank
            left_s = (target - step) * (now - began) / (step - first) if first < step <= target else -1.0
            self._node.reports.emit(events.CatchingUp(rank=message.rank, step=step, target=target, left_s=left_s))

    def failing(self, slot: Slot, message: local.Failing) -> None:
        """Report the error a script ends with; before it trains that also ends the rehearsal."""
        rank, reason = message.rank, message.reason
        if slot.process is not None:
            slot.process.failing, slot.process.of_host = reason, message.of_host
        if slot.pipe is not None and slot.rank == rank:
            slot.pipe.note(f"rank {rank}'s script ended: {reason}")
        if message.differs and slot.rank == rank and slot.living is not None:
            self._node.reports.emit(events.RehearsalFailed(rank=rank, reason=reason))
            # As any script's failure: another process begins anew; if that reads other data, too, the job ends.
            self._workers.kill(slot, slot.living, reason, DIFFERS_CODE)
        elif self._of(slot, rank) is not None:
            self._fail(slot, rank, reason)

    def _fail(self, slot: Slot, rank: Rank, reason: str) -> None:
        self._node.reports.emit(events.RehearsalFailed(rank=rank, reason=reason))
        self._give_up(slot, rank, reason)

    def _give_up(self, slot: Slot, rank: Rank, reason: str) -> None:
        """Abandon this attempt at `rank`; its process, if there is one, goes."""
        if (rehearsal := self._of(slot, rank)) is not None:
            self._workers.kill(slot, rehearsal.process, reason)
        elif slot.rank == rank:
            self._node.feed(api.WorkerLost(rank, reason))
        else:
            self._node.feed(api.SpareFailed(slot.local_rank, rank, reason))

    def swapped(self, owners: tuple[NodeId, ...], restore_step: Step) -> None:
        """Enter a new world, back at `restore_step`: its nodes are the sources from now on."""
        self._committed = NO_STEP
        for slot, rank in self._ordered.items():
            self._run(slot, self._begin_in_time(slot, rank, owners[rank]))
        for slot, rehearsal in [item for item in self.rehearsals.items() if item[0] not in self._ordered]:
            source = owners[rehearsal.rank]
            self._stop_following(slot)
            if rehearsal.told > restore_step:
                # A process cannot go back, so another one begins. A plan goes behind what was committed only if more
                # was lost than `copies` cover.
                del self.rehearsals[slot]
                self._run(slot, self._begin_in_time(slot, rehearsal.rank, source))
            else:
                rehearsal.source = source
                rehearsal.history.truncate(restore_step)

    def drop(self) -> None:
        """Forget every rehearsal and take-over."""
        self.cancel()
        self.rehearsals.clear()
        self._ordered.clear()
        for slot in self._node.slots:
            self._stop_following(slot)

    # ---- plans

    def act(self, plan: SwapPlan) -> None:
        """Hand out `plan`: Join to processes that run already, a take-over for every rank that is new here."""
        self.cancel()
        world, step, slots = plan.world, plan.restore_step, self._node.slots
        self._restore_step = step
        if step == NO_STEP:  # training had not begun, so nothing is lost: every rank's script begins anew
            self.drop()
            self._mirroring.start_over(world)
            return self._workers.form(world)
        self._workers.enter(world, step)
        self._mirroring.enter(world, step)
        self.swapped(world.node_of, step)
        sources = {source.rank: source for source in plan.sources}
        ranks, seen = world.ranks_of(self._node.id), list[LocalSlot]()
        for slot in slots:
            if slot.rank >= 0 and slot.rank not in ranks:  # this host stands by from now on
                self._store.disown(slot.rank)
                self.done(slot)
                self._workers.vacate(slot)
            rehearsal = self._of(slot)
            seen.append(LocalSlot(slot.rank, slot.serving is not None, rehearsal.rank if rehearsal else -1))
        staying, placed = divide(ranks, seen)
        left = sorted(set(ranks) - staying.keys() - placed.keys())
        invariant(not left, f"no slot for rank(s) {left}, which are new here")
        for rank, number in staying.items():
            if rank in sources:
                self._taking.start(self._refill(plan, slots[number], sources[rank]))
            else:
                self._join(plan, slots[number])
        for rank, number in placed.items():
            slots[number].rank = rank
            self._stop_following(slots[number])
            self._taking.start(self._take_over(plan, slots[number], sources.get(rank)))
        self._workers.replace_store(plan.store)

    def cancel(self) -> None:
        """Give up the take-overs that are under way."""
        self._taking.cancel()

    def _join(self, plan: SwapPlan, slot: Slot) -> None:
        if slot.serving is not None:  # else its loss is said already
            slot.serving.send(local.Join(plan.world.generation, plan.store, plan.restore_step))
        self._mirroring.mirror_again(slot.rank, plan.restore_step)

    async def _refill(self, plan: SwapPlan, slot: Slot, source: Source) -> None:
        try:
            await self._mirroring.refill(source, plan.restore_step)
        except DeadpoolError as error:
            self._node.feed(api.WorkerLost(source.rank, f"its restore step cannot be had: {error}"))
        else:
            self._join(plan, slot)

    async def _take_over(self, plan: SwapPlan, slot: Slot, source: Source | None) -> None:
        """Fetch the rank's state (from this node, without `source`), mirror it, and hand it to a ready process."""
        rank, step, timeout_s = slot.rank, plan.restore_step, self._node.config.start_timeout_s
        rehearsal = self._of(slot, rank)
        covered = rehearsal is not None and rehearsal.finished.is_set()
        try:
            if rehearsal is None:
                rehearsal = await self.begin(slot, rank, source.header_node if source else self._node.id)
            await self._bring(step, source, rehearsal)
            self._mirroring.mirror_again(rank, step)
            async with asyncio.timeout(timeout_s):
                await rehearsal.finished.wait()
            await rehearsal.tell()
        except (TimeoutError, DeadpoolError) as error:
            reason = str(error) or f"its rehearsal took more than {timeout_s:g} s"
            return self._give_up(slot, rank, f"could not be taken over: {reason}")
        if not await self._workers.take(slot, rehearsal.process, step):  # its loss is said already
            return
        pair = present(self._store.own(rank), f"rank {rank} is handed over without an arena")
        self.done(slot)
        if self._workers.paused:  # a process that has come to run a rank meanwhile stands still, too
            self._workers.pause()
        if (peer := slot.serving) is not None:  # else its connection has ended, and so will it
            order = local.TakeOver(plan.world.generation, plan.store, step, pair.header_bytes, pair.payload_bytes)
            peer.send(order, [pair.fd])
            peer.send(local.Committed(self._workers.committed))  # said to the others while this one rehearsed
            self._node.reports.emit(events.RankTakenOver(rank=rank, covered=covered))

    async def _bring(self, step: Step, source: Source | None, rehearsal: Rehearsal) -> None:
        """Have snapshot, profile and history here: they are this node's to serve then. Raises: DeadpoolError."""
        rank, store = rehearsal.rank, self._store
        # Without a source it is here: the rank has lost its process only, or was being taken over.
        if source is None and not store.owns(rank, step):
            source = Source(rank, self._node.id, self._node.id, rank)  # cut off before: it is here as a mirror still
        if source is None:
            await self.pull(rehearsal, self._node.id, step)
        else:
            fetching = begin(self._mirroring.bring(source, step, rehearsal.profile))
            try:
                await self.pull(rehearsal, source.header_node, step)
                await fetching
            finally:
                fetching.cancel()
        self._mirroring.adopt(rehearsal.profile)
        if store.history(rank).last != step:
            store.histories[rank] = rehearsal.history.upto(step)
        self._mirroring.hold(rank, step)

    def done(self, slot: Slot) -> None:
        """Let go of the slot, whose process takes over and rehearses no other rank."""
        self._stop_following(slot)
        self.rehearsals.pop(slot, None)
        self._settle(slot)
