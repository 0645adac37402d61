"""Take-overs: what a plan gives this node's slots, and how a rehearsed process gets a rank.

Rules of this file: survivors of a plan are told at once. A further plan cancels what is still under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .. import events
from ..core import api, local
from ..core.placement import LocalSlot, divide
from ..core.types import NO_STEP, Source, Step, SwapPlan
from ..errors import DeadpoolError, invariant, present
from ..transport.tasks import Tasks, begin, loop_time
from .mirroring import Mirroring
from .node import LocalNode, Slot
from .rehearsals import MEMORY_FREED_S, Rehearsal, Rehearsals
from .workers import Workers

_LOOK_AGAIN_S = 0.01


class TakeOvers:
    """The take-overs of the newest plan, by processes of `rehearsals`."""

    def __init__(self, node: LocalNode, workers: Workers, mirroring: Mirroring, rehearsals: Rehearsals) -> None:
        self._node, self._workers, self._mirroring, self._rehearsals = node, workers, mirroring, rehearsals
        self._store, self._taking = node.host.store, Tasks()

    def act(self, plan: SwapPlan) -> None:
        """Hand out `plan`: Join to processes that run already, a take-over for every rank that is new here."""
        self.cancel()
        world, step, slots = plan.world, plan.restore_step, self._node.slots
        if step == NO_STEP:  # training had not begun, so nothing is lost: every rank's script begins anew
            self._rehearsals.drop()
            self._mirroring.start_over(world)
            return self._workers.form(world)
        self._workers.enter(world, step)
        self._mirroring.enter(world, step)
        self._rehearsals.swapped(world.node_of, step)
        sources = {source.rank: source for source in plan.sources}
        ranks, seen = world.ranks_of(self._node.id), list[LocalSlot]()
        for slot in slots:
            if slot.rank >= 0 and slot.rank not in ranks:  # this host stands by from now on
                self._store.disown(slot.rank)
                self._rehearsals.done(slot)
                self._workers.vacate(slot)
            rehearses = tuple(one.rank for one in self._rehearsals.in_slot(slot))
            seen.append(LocalSlot(slot.rank, slot.serving is not None, rehearses))
        staying, placed = divide(ranks, seen)
        left = sorted(set(ranks) - staying.keys() - placed.keys())
        invariant(not left, f"no slot for rank(s) {left}, which are new here")
        for rank, number in staying.items():
            if rank in sources:
                self._taking.start(self._refill(plan, slots[number], sources[rank]))
            else:
                self._join(plan, slots[number])
        for rank, number in placed.items():
            slot = slots[number]
            slot.rank = rank
            self._rehearsals.stop_beginning(slot)
            self._rehearsals.promote(slot)
            others = [process.pid for process in slot.stand_ins.values()]
            self._taking.start(self._take_over(plan, slot, sources.get(rank), others))
        for slot in slots if ranks else ():
            for rank in slot.stand_ins.keys() - {slot.rank}:  # their memory is needed now
                self._rehearsals.end(slot, rank)
        self._workers.replace_store(plan.store)

    async def _left(self, pids: Sequence[int]) -> None:
        """Wait for processes that were ended: training takes the memory of the device that they have."""
        began, processes = loop_time(), self._node.host.processes
        while loop_time() - began < MEMORY_FREED_S and not all(map(processes.has_left, pids)):
            await asyncio.sleep(_LOOK_AGAIN_S)

    def cancel(self) -> None:
        """Give up the take-overs that are under way."""
        self._taking.cancel()

    def _join(self, plan: SwapPlan, slot: Slot) -> None:
        if slot.serving is not None:  # else its loss is said already
            apart = plan.every, self._node.config.every_is_fixed
            slot.serving.send(local.Join(plan.world.generation, plan.store, plan.restore_step, *apart))
            self._workers.tell_snapshots(slot.serving)  # if it has had to wait for its restore step
        self._mirroring.mirror_again(slot.rank, plan.restore_step)

    async def _refill(self, plan: SwapPlan, slot: Slot, source: Source) -> None:
        try:
            await self._mirroring.refill(source, plan.restore_step)
        except DeadpoolError as error:
            self._node.feed(api.WorkerLost(source.rank, f"its restore step cannot be had: {error}"))
        else:
            self._join(plan, slot)

    async def _take_over(self, plan: SwapPlan, slot: Slot, source: Source | None, others: Sequence[int]) -> None:
        """Fetch the rank's state (from this node, without `source`), mirror it, and hand it to a ready process.

        Args: others: the processes that stood in for other ranks in this slot, which are ended.
        """
        rank, step, timeout_s = slot.rank, plan.restore_step, self._node.config.start_timeout_s
        rehearsal = self._rehearsals.of(slot)
        covered = rehearsal is not None and rehearsal.parked
        try:
            if rehearsal is None:
                rehearsal = await self._rehearsals.begin(slot, rank, source.header_node if source else self._node.id)
            await self._bring(step, source, rehearsal)
            self._mirroring.mirror_again(rank, step)
            async with asyncio.timeout(timeout_s):
                await rehearsal.finished.wait()
            await rehearsal.tell()
            if rehearsal.profile.on_device:
                await self._left(others)
        except (TimeoutError, DeadpoolError) as error:
            reason = str(error) or f"its rehearsal took more than {timeout_s:g} s"
            reason = f"could not be taken over: {reason}"
            if (process := slot.living) is not None and process.rank == rank:
                return self._workers.kill(slot, process, reason)
            return self._node.feed(api.WorkerLost(rank, reason))
        if not await self._workers.take(slot, rehearsal.process, step):  # its loss is said already
            return
        pair = present(self._store.own(rank), f"rank {rank} is handed over without an arena")
        self._rehearsals.done(slot)
        if self._workers.paused:  # a process that has come to run a rank meanwhile stands still, too
            self._workers.pause()
        if (peer := slot.serving) is not None:  # else its connection has ended, and so will it
            sizes, is_fixed = (pair.header_bytes, pair.payload_bytes), self._node.config.every_is_fixed
            order = local.TakeOver(plan.world.generation, plan.store, step, *sizes, plan.every, is_fixed)
            peer.send(order, [pair.fd])
            self._workers.tell_committed(peer)  # said to the others while this one rehearsed
            self._node.reports.emit(events.RankTakenOver(rank=rank, covered=covered))

    async def _bring(self, step: Step, source: Source | None, rehearsal: Rehearsal) -> None:
        """Have snapshot, profile and history here: they are this node's to serve then. Raises: DeadpoolError."""
        rank, store = rehearsal.rank, self._store
        # Without a source it is here: the rank has lost its process only, or was being taken over.
        if source is None and not store.owns(rank, step):
            source = Source(rank, self._node.id, self._node.id, rank)  # cut off before: it is here as a mirror still
        if source is None:
            await self._rehearsals.pull(rehearsal, self._node.id, step)
        else:
            fetching = begin(self._mirroring.bring(source, step, rehearsal.profile))
            try:
                await self._rehearsals.pull(rehearsal, source.header_node, step)
                await fetching
            finally:
                fetching.cancel()
        self._mirroring.adopt(rehearsal.profile)
        if store.history(rank).last != step:
            store.histories[rank] = rehearsal.history.upto(step)
        self._mirroring.hold(rank, step)
