"""Rehearsals: processes that go through a rank's script alone, wait parked, and follow the rank.

Rules of this file: a rehearsal has one process, one recording and one growing history. Records are pulled from the
node that runs the rank, in step order, and only up to what is committed. On a spare a rehearsal begins on order; on the
rank's own node when the rank has lost its process, or before that (`park_at_home`). A process that has rehearsed and is
not needed yet is parked: it has given back what a restore overwrites, and follows every FOLLOW_S.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass, field

from .. import events
from ..core import api, local
from ..core.types import NEVER, NO_STEP, NodeId, Rank, Step
from ..errors import DeadpoolError, MemoryShortage
from ..mirror.records import ROW_STEPS, CallHistory, HistoryPruned, row_end, steps_in
from ..mirror.wire import RefusedByPeer, how_many_fit
from ..transport.tasks import loop_time
from ..transport.unix import LocalPeer
from .mirroring import Mirroring
from .node import LocalNode, Process, Slot
from .workers import Workers

PULL_STEPS = 16 * ROW_STEPS  # the most steps of records in one request, which has a connection of its own
DIFFERS_CODE = 1  # exit code of a job whose data cannot be read again
SAY_MOVED_S = 10.0  # between two lines about a newcomer on its way
FOLLOW_S = 0.5  # between two times that a parked process is told of further steps: some 30 at 50 steps/s
HOME_AFTER_S = 30.0  # of training without a loss, before processes are parked at home
HOME_TRIES = 2  # of a rank in a generation: what fails again may be in the way of the process that runs it
LOOK_S = 5.0  # between two looks at what else may be parked here, and what may not stay
MEMORY_FREED_S = 2.0  # until what a process had can be used again
_RETRY_S = 0.2


@dataclass(eq=False)
class Rehearsal:
    """A process's rehearsal of its rank. `history` is what has been pulled; `told` the newest step it knows."""

    slot: Slot
    process: Process
    profile: local.RankReady
    source: NodeId
    history: CallHistory
    told: Step = NO_STEP
    parks: bool = False  # it has been told to park after the records sent until then
    device_bytes: int | None = None  # of its device that it has while parked; None until it is
    doubted: bool = False  # people have been told that it could not be told of the first steps
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    pulling: asyncio.Lock = field(default_factory=asyncio.Lock)
    following: asyncio.Task[None] | None = None
    followed_at: float = 0.0

    @property
    def rank(self) -> Rank:
        return self.process.rank

    @property
    def stands_in(self) -> bool:
        return self.slot.stand_ins.get(self.rank) is self.process

    @property
    def parked(self) -> bool:
        return self.device_bytes is not None

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


class Rehearsals:
    """The rehearsals of this node's slots, by their processes."""

    def __init__(self, node: LocalNode, workers: Workers, mirroring: Mirroring) -> None:
        self._node, self._workers, self._mirroring = node, workers, mirroring
        self._store = node.host.store
        self._committed: Step = NO_STEP
        self._restore_step: Step = NO_STEP  # of the newest plan
        self._said_at, self._said_of = 0.0, -1
        self._beginning: dict[tuple[Slot, Rank], asyncio.Task[None]] = {}  # rehearsals, until they have begun
        self._home_at = self._look_at = NEVER  # when a process may be parked at home, and when that is looked at next
        self._home_tries: Counter[Slot] = Counter()  # in this generation
        self._admitting = asyncio.Lock()
        self._device_total = Counter[Slot]()  # bytes of the slot's device,
        self._device_needs = Counter[Slot]()  # and the most that a rehearsal has taken of it
        self.by_process: dict[Process, Rehearsal] = {}

    # ---- their beginning and their end

    def order(self, slot: Slot, rank: Rank, source: NodeId) -> None:
        self.end(slot, rank)
        self._begin_soon(slot, rank, source)

    def end(self, slot: Slot, rank: Rank) -> None:
        """End what stands in for `rank`, or begins to."""
        if (task := self._beginning.pop((slot, rank), None)) is not None:
            task.cancel()
        self._workers.end_stand_in(slot, rank)
        self._settle()

    def replace(self, slot: Slot) -> None:
        """Have a slot that has lost its process another one, while the others agree on what to do."""
        if slot.rank in self._store.recordings and not self.promote(slot):
            self._begin_soon(slot, slot.rank, self._node.id)

    def resume(self, slot: Slot, source: NodeId) -> None:
        """Have a slot's rank of an earlier job rehearsed, as soon as `source` has read the files about it."""
        work = self._begin_in_time(slot, slot.rank, source, limit_s=self._node.config.start_timeout_s)
        self._beginning[slot, slot.rank] = asyncio.get_running_loop().create_task(work)

    def promote(self, slot: Slot) -> bool:
        if (process := self._workers.promote(slot)) is None:
            return False
        self.stop_beginning(slot)
        self._stop_following(self.by_process[process])
        return True

    def _begin_soon(self, slot: Slot, rank: Rank, source: NodeId, stands_in: bool = False) -> None:
        if (before := self._beginning.get((slot, rank))) is not None:
            before.cancel()
        begins = self._stand_in if stands_in or slot.rank < 0 else self._begin_in_time
        self._beginning[slot, rank] = asyncio.get_running_loop().create_task(begins(slot, rank, source))

    def stop_beginning(self, slot: Slot) -> None:
        for key in [key for key in self._beginning if key[0] is slot]:
            if (task := self._beginning.pop(key)) is not asyncio.current_task():
                task.cancel()

    def _stop_following(self, rehearsal: Rehearsal) -> None:
        task, rehearsal.following = rehearsal.following, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _stand_in(self, slot: Slot, rank: Rank, source: NodeId) -> None:
        """Have a process rehearse `rank` to stand in for it, if there is room."""
        began, before = loop_time(), list[Rehearsal]()
        while loop_time() - began < self._node.config.start_timeout_s:
            async with self._admitting:  # one after another: each takes memory that the next one has not
                if not (under_way := self._under_way_on_device(slot)):
                    return await self._admit(slot, rank, source)
            if any(one.doubted for one in under_way):  # it will not park
                break
            if under_way != before:  # the one in front is through
                began, before = loop_time(), under_way
            await asyncio.sleep(_RETRY_S)
        self._refuse(slot, rank)

    def _under_way_on_device(self, slot: Slot) -> list[Rehearsal]:
        """List the rehearsals that use the slot's device and have not said yet how much of it."""
        return [one for one in self.in_slot(slot) if one.stands_in and not one.parked and one.profile.on_device]

    async def _admit(self, slot: Slot, rank: Rank, source: NodeId) -> None:
        began = loop_time()
        while not await self._has_room(slot):
            if loop_time() - began >= MEMORY_FREED_S:
                return self._refuse(slot, rank)
            await asyncio.sleep(_RETRY_S)
        await self._begin_in_time(slot, rank, source, stands_in=True)

    def _refuse(self, slot: Slot, rank: Rank) -> None:
        self._beginning.pop((slot, rank), None)
        if slot.rank < 0:
            self._node.feed(api.SpareFull(slot.local_rank, rank))

    async def _begin_in_time(
        self, slot: Slot, rank: Rank, source: NodeId, stands_in: bool = False, limit_s: float = 0.0
    ) -> None:
        began, limit_s = loop_time(), limit_s or self._node.config.slow_after_s
        while True:
            try:
                await self.begin(slot, rank, source, stands_in)
                return
            except DeadpoolError as error:  # who has come to run the rank just now may not hold its recording yet
                if not isinstance(error, RefusedByPeer) or loop_time() - began >= limit_s:
                    self._beginning.pop((slot, rank), None)
                    return self._fail(slot, rank, str(error))
            await asyncio.sleep(_RETRY_S)

    async def begin(self, slot: Slot, rank: Rank, source: NodeId, stands_in: bool = False) -> Rehearsal:
        """Get the rank's recording, from `source` if it is not here, and have a process rehearse it."""
        profile = await self._mirroring.recording(source, rank)
        self._workers.tell_imports(slot, profile.modules)
        process = self._workers.order(slot, rank, rehearses=True, stands_in=stands_in)
        history = CallHistory(self._node.config.history_limit_bytes, self._node.config.history_kept)
        rehearsal = self.by_process[process] = Rehearsal(slot, process, profile, source, history)
        self._beginning.pop((slot, rank), None)
        self._settle()
        return rehearsal

    def _settle(self) -> None:
        """Forget rehearsals whose process has ended, and the memory that was reserved for them."""
        self.by_process = {process: one for process, one in self.by_process.items() if not process.ended}
        self._store.drop_prepared({other.rank for other in self.by_process.values()})

    def in_slot(self, slot: Slot) -> list[Rehearsal]:
        """List the rehearsals that are under way or done in `slot`, if their processes live."""
        return [one for one in self.by_process.values() if one.slot is slot and not one.process.ended]

    def of(self, slot: Slot) -> Rehearsal | None:
        """Return the rehearsal of the slot's rank by the process that is to run it."""
        return self.by_process.get(slot.living) if slot.living is not None and slot.living.rank == slot.rank else None

    async def _has_room(self, slot: Slot) -> bool:
        """Return whether another process may be parked in a slot: on a spare the first host's always."""
        slots, stand_ins = self._node.slots, [one for one in self.by_process.values() if one.stands_in]
        running = [slot.running.pid for slot in slots if slot.running is not None]
        if not running and self._held(slot) + self._device_needs[slot] > self._device_total[slot]:
            return False
        if not running and len(stand_ins) < len(slots):
            return True
        done = [one.process.pid for one in stand_ins if one.parked]
        limits = len(stand_ins) - len(done), self._node.config.park_memory_bytes
        host, count = self._node.host, len(stand_ins)
        return await host.in_thread(lambda: host.fits_beside(count, done or running, *limits))

    def introduced(self, peer: LocalPeer, process: Process) -> None:
        if (rehearsal := self.by_process.get(process)) is not None:
            peer.send(local.Recording(process.rank, rehearsal.profile.recording))

    def rehearsed(self, process: Process, message: local.Rehearsed) -> None:
        if (rehearsal := self.by_process.get(process)) is None or process.ended:
            return
        rehearsal.finished.set()
        self._node.reports.emit(events.Rehearsed(rank=message.rank, duration_s=message.duration_s))
        if rehearsal.stands_in:
            rehearsal.following = asyncio.get_running_loop().create_task(self._prepare(rehearsal))

    def parked(self, process: Process, message: local.Parked) -> None:
        """Stand by, and note what the process has of its device: all that is not free, nor another one's here."""
        if (rehearsal := self.by_process.get(process)) is None:
            return
        slot = rehearsal.slot
        rehearsal.device_bytes = max(0, message.total - message.free - self._held(slot))
        if slot.rank < 0 and message.total:  # beside a rank it is not known what that has
            needs = min(message.total, rehearsal.device_bytes + message.peak)  # what has just ended may have some
            self._device_needs[slot] = max(self._device_needs[slot], needs)
            self._device_total[slot] = message.total
        if slot.rank < 0:
            self._stand_by(rehearsal)

    def _held(self, slot: Slot) -> int:
        """Return how many bytes of the slot's device parked processes have."""
        return sum(one.device_bytes or 0 for one in self.in_slot(slot))

    def _is_first(self, rehearsal: Rehearsal) -> bool:
        """Return whether it is of the host that a spare has rehearsed first."""
        return self.in_slot(rehearsal.slot)[:1] == [rehearsal] and rehearsal.slot.rank < 0

    def _stand_by(self, rehearsal: Rehearsal) -> None:
        """Tell the controller of a spare what is rehearsed."""
        firsts = [one for slot in self._node.slots for one in self.in_slot(slot)[:1]]
        if rehearsal in firsts and all(other.parked for other in firsts):
            # First: a spare that is short of memory for the mirrors that come with its ranks is not called ready.
            # It stays: another attempt would cost a rehearsal and find no more memory, the last one would cost the
            # spare (and everybody a swap), and the next loss then ends a job whose state it could have saved.
            try:
                self._mirroring.check_memory(rehearsal.profile, rehearsal.source)
            except MemoryShortage as error:
                lost = f"memory here does not hold what node {rehearsal.source} runs and mirrors"
                self._doubt(rehearsal, f"{lost}: {error}")
        self._node.feed(api.SpareRehearsed(rehearsal.slot.local_rank, rehearsal.rank))

    def _doubt(self, rehearsal: Rehearsal, reason: str) -> None:
        self._node.reports.emit(events.RehearsalFailed(rank=rehearsal.rank, reason=reason))
        self._node.feed(api.SpareUnable(reason))

    async def _prepare(self, rehearsal: Rehearsal) -> None:
        rank, profile = rehearsal.rank, rehearsal.profile
        shape = rank, profile.header_bytes, profile.payload_bytes
        if self._is_first(rehearsal):  # once: memory for more is not there
            try:
                await self._node.host.in_thread(lambda: self._store.prepare_own(*shape))
            except DeadpoolError as error:
                self._node.reports.emit(events.Note(text=f"no arena for rank {rank} beforehand: {error}"))
        await self._follow(rehearsal)

    def committed(self, step: Step) -> None:
        if self._committed == NO_STEP:
            self._home_at = loop_time() + HOME_AFTER_S
            self._home_tries.clear()
        self._committed = max(self._committed, step)
        for rehearsal in self.by_process.values():
            follows = rehearsal.stands_in and rehearsal.finished.is_set() and not rehearsal.process.ended
            if follows and (rehearsal.following is None or rehearsal.following.done()):
                rehearsal.following = asyncio.get_running_loop().create_task(self._follow(rehearsal))
        if loop_time() >= self._look_at:
            self._look_at = loop_time() + LOOK_S
            stand_ins = [one for one in self.by_process.values() if one.stands_in]
            if stand_ins and self._node.host.is_short():
                self._home_at = math.inf  # in this generation
                if stand_ins[-1].slot.rank < 0:
                    self._node.feed(api.SpareShort())
                else:
                    self.end(stand_ins[-1].slot, stand_ins[-1].rank)
            elif loop_time() >= self._home_at:
                self._park_at_home()

    def _park_at_home(self) -> None:
        """Have the next rank of this node a process that stands in for it, one after another."""
        config, slots = self._node.config.park_at_home, self._node.slots
        if any(not one.parked for slot in slots for one in self.in_slot(slot)):
            return
        for slot in slots:
            profile, running = self._mirroring.profiles.get(slot.rank), slot.running
            wanted = profile is not None and (config or (config is None and not profile.on_device))
            wanted = wanted and slot.rank not in slot.stand_ins and self._home_tries[slot] < HOME_TRIES
            if wanted and running is not None and running.in_training:
                self._home_tries[slot] += 1
                return self._begin_soon(slot, slot.rank, self._node.id, stands_in=True)

    async def _follow(self, rehearsal: Rehearsal) -> None:
        # In batches: beside each of many processes that are parked, every step would cost this host too much.
        await asyncio.sleep(max(0.0, rehearsal.followed_at + FOLLOW_S - loop_time()))
        rehearsal.followed_at = loop_time()
        try:
            while rehearsal.told < self._committed and rehearsal.listener is not None:
                last = min(self._committed, row_end(rehearsal.told + PULL_STEPS))  # it reads them during the next pull
                await self.pull(rehearsal, rehearsal.source, last)
                await rehearsal.tell()
            through = self._committed != NO_STEP  # else, after a swap, it is not known yet what there is to go through
            if through and not rehearsal.parks and (peer := rehearsal.listener) is not None:
                rehearsal.parks = True
                peer.send(local.Park())
        except DeadpoolError as error:
            self._node.reports.emit(events.Note(text=f"cannot follow rank {rehearsal.rank} now: {error}"))
            refused = isinstance(error, (RefusedByPeer, HistoryPruned))
            if not refused or rehearsal.told != NO_STEP or rehearsal.doubted:
                return
            rehearsal.doubted = True  # what a process must begin with may have been dropped for good
            if self._is_first(rehearsal):
                self._doubt(rehearsal, str(error))
            else:
                self._workers.kill(rehearsal.slot, rehearsal.process, str(error))

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

    def failing(self, slot: Slot, process: Process, message: local.Failing) -> None:
        """Report the error a script ends with; before it trains that also ends the rehearsal."""
        rank, reason, runs = message.rank, message.reason, process is slot.process and slot.rank == message.rank
        process.failing, process.of_host = reason, message.of_host
        if slot.pipe is not None and runs:
            slot.pipe.note(f"rank {rank}'s script ended: {reason}")
        if message.differs and runs:
            self._node.reports.emit(events.RehearsalFailed(rank=rank, reason=reason))
            # As any script's failure: another process begins anew; if that reads other data, too, the job ends.
            self._workers.kill(slot, process, reason, DIFFERS_CODE)
        elif process in self.by_process:
            self._node.reports.emit(events.RehearsalFailed(rank=rank, reason=reason))
            self._workers.kill(slot, process, reason)

    def _fail(self, slot: Slot, rank: Rank, reason: str) -> None:
        """Report that a rehearsal could not begin."""
        self._node.reports.emit(events.RehearsalFailed(rank=rank, reason=reason))
        if slot.rank < 0:
            self._node.feed(api.SpareFailed(slot.local_rank, rank, reason))
        elif slot.living is None:
            self._node.feed(api.WorkerLost(rank, reason))

    def swapped(self, owners: tuple[NodeId, ...], restore_step: Step) -> None:
        """Enter a new world, back at `restore_step`: its nodes are the sources from now on."""
        self._committed, self._restore_step = NO_STEP, restore_step
        for slot, rank in [key for key in self._beginning if key[0].rank < 0]:
            self._begin_soon(slot, rank, owners[rank])
        self._settle()
        for process, rehearsal in list(self.by_process.items()):
            slot, rank, source = rehearsal.slot, rehearsal.rank, owners[rehearsal.rank]
            self._stop_following(rehearsal)
            if rehearsal.told <= restore_step:
                rehearsal.source = source
                rehearsal.history.truncate(restore_step)
                continue
            # A process cannot go back, so another one begins. A plan goes behind what was committed only if more was
            # lost than `copies` cover.
            del self.by_process[process]
            if process is slot.process:
                self._begin_soon(slot, rank, source)
            else:
                self._workers.end_stand_in(slot, rank)
                if slot.rank < 0:
                    self._node.feed(api.SpareDropped(slot.local_rank, rank))

    def drop(self) -> None:
        """End all that stands in, and forget every rehearsal."""
        self._restore_step = NO_STEP
        for rehearsal in self.by_process.values():
            self._stop_following(rehearsal)
        self.by_process.clear()
        for slot in self._node.slots:
            self.stop_beginning(slot)
            for rank in list(slot.stand_ins):
                self._workers.end_stand_in(slot, rank)

    def done(self, slot: Slot) -> None:
        """Let go of the slot's process, which takes over, and of what has been ordered here before."""
        self.stop_beginning(slot)
        if slot.process is not None:
            self.by_process.pop(slot.process, None)
        self._settle()
