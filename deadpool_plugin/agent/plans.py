"""Plans: claimed at the witness of ties, and carried out by this node's processes once they are decided.

Rules of this file: the event loop does not wait for storage. Survivors are told at once, they need nothing from others.
A newcomer is the process of a rank that is new here, or has lost its process. It gets its history, its arena with the
restore step in it, then the order. A further plan cancels what is still under way and starts over.
"""

from __future__ import annotations

import asyncio
import contextlib
from io import FileIO

import msgspec

from .. import events
from ..core import api, local
from ..core.placement import divide
from ..core.types import NO_STEP, Generation, Rank, Source, SwapPlan
from ..errors import ConfigError, DeadpoolError, invariant, present
from ..host.output_dedup import Printed
from ..transport.tasks import Tasks, begin
from .mirroring import Mirroring
from .node import LocalNode, Slot
from .process_monitor import ProcessMonitor
from .spares import Rehearsal, Spares
from .workers import Workers

_RETRY_S = 1.0
SHARED_S = 120
"""Attribute caches of NFS last a minute by default."""


async def claim(node: LocalNode, plan: SwapPlan) -> None:
    """Feed the plan that the witness keeps, `plan` unless it had one before; try until the storage answers."""
    witness = present(node.host.witness, "a plan was claimed, and the job has no witness")
    while True:
        try:
            kept = await node.host.at_files(lambda: witness.keep(node.credentials.job, plan))
            break
        except (OSError, msgspec.MsgspecError) as error:
            node.reports.emit(events.Note(f"the witness in {witness} does not answer: {error}"))
        await asyncio.sleep(_RETRY_S)
    node.feed(api.Claimed(kept))


async def look(node: LocalNode, generation: Generation) -> None:
    """Feed the plan that the witness has for `generation`. Once: whoever waits looks again."""
    witness = present(node.host.witness, "a plan was looked for, and the job has no witness")
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        kept = await node.host.at_files(lambda: witness.look(node.credentials.job, generation))
        if kept is not None:
            node.feed(api.Claimed(kept))


async def check_witness(node: LocalNode, shares: bool) -> None:
    """Check that this node and the first one (which `shares`) see the same directory, if there is a witness.

    Raises: ConfigError if not within SHARED_S, or if that one can have no hard links.
    """
    host, job, witness = node.host, node.credentials.job, node.host.witness
    if witness is None:
        return
    expected = "a directory on storage that all hosts share"
    if shares:
        try:
            return await host.at_files(lambda: witness.share(job))
        except OSError as error:
            found = f"the witness {witness} cannot keep a hard link ({error.strerror})"
            raise ConfigError(found, f"{expected}, and that has them", "name another") from error
    for _ in range(SHARED_S):
        await asyncio.sleep(1.0)  # an NFS client that looks too early remembers for long that there is nothing
        with contextlib.suppress(OSError):
            if await host.at_files(lambda: witness.is_shared(job)):
                return
    found = f"the witness {witness} on {host.name} is not the directory that the first host has there"
    raise ConfigError(found, expected, "name one, or mount it on this host")


class TakeOvers:
    """Take-overs of this node's processes, of the newest plan only."""

    def __init__(
        self, node: LocalNode, monitor: ProcessMonitor, workers: Workers, mirroring: Mirroring, spares: Spares
    ) -> None:
        self._node, self._monitor, self._workers = node, monitor, workers
        self._mirroring, self._spares = mirroring, spares
        self._tasks = Tasks()

    def act(self, plan: SwapPlan) -> None:
        """Hand out `plan`: Join to processes that run already, a take-over for every rank that is new here."""
        self.cancel()
        world, step = plan.world, plan.restore_step
        if step == NO_STEP:  # training had not begun, so nothing is lost: every rank's script begins anew
            self._spares.drop()
            self._mirroring.start_over(world)
            self._workers.form(world)
            return
        self._workers.enter(world, step)
        self._mirroring.enter(world, step)
        self._spares.swapped(world.node_of, step)
        sources = {source.rank: source for source in plan.sources}
        slots, ranks = self._node.slots, world.ranks_of(self._node.id)
        staying, placed = divide(ranks, [self._spares.seen(slot) for slot in slots])
        left = sorted(set(ranks) - staying.keys() - placed.keys())
        invariant(not left, f"no slot for rank(s) {left}, which are new here")
        for rank, number in staying.items():
            if rank in sources:
                self._tasks.start(self._refill(plan, slots[number], sources[rank]))
            else:
                self._join(plan, slots[number])
        for rank, number in placed.items():
            slots[number].rank = rank
            self._spares.stop_following(slots[number])
            self._tasks.start(self._take_over(plan, slots[number], sources.get(rank)))
        self._workers.replace_store(plan.store)

    def cancel(self) -> None:
        self._tasks.cancel()

    def _join(self, plan: SwapPlan, slot: Slot) -> None:
        if slot.serving is not None:  # else whoever noticed has said so
            slot.serving.send(local.Join(plan.world.generation, plan.store, plan.restore_step))
        self._mirroring.mirror_again(slot.rank, plan.restore_step, plan.world.generation)

    async def _refill(self, plan: SwapPlan, slot: Slot, source: Source) -> None:
        try:
            await self._mirroring.refill(source, plan.restore_step)
            self._hold(plan, source.rank)
        except DeadpoolError as error:
            self._node.feed(api.WorkerLost(source.rank, f"its restore step cannot be had: {error}"))
            return
        self._join(plan, slot)

    async def _take_over(self, plan: SwapPlan, slot: Slot, source: Source | None) -> None:
        """Fetch the state of the rank, make it safe again, and hand it over once its process is ready.

        `source`: None if it is here already: the rank has lost its process only, or a take-over was cut off.
        """
        rank, timeout_s = slot.rank, self._node.config.start_timeout_s
        rehearsal = self._spares.of(slot, rank)
        try:
            if rehearsal is None:
                rehearsal = await self._spares.begin(slot, rank, source.header_node if source else self._node.id)
            await self._bring(plan, source, rehearsal)
            self._mirroring.mirror_again(rank, plan.restore_step, plan.world.generation)
            async with asyncio.timeout(timeout_s):
                await rehearsal.finished.wait()
            await rehearsal.tell()
        except (TimeoutError, DeadpoolError) as error:
            reason = str(error) or f"its rehearsal took more than {timeout_s:g} s"
            self._spares.give_up(slot, rank, f"could not be taken over: {reason}")
            return
        file, printed = await self._workers.output_of(rank, plan.restore_step)
        if rehearsal.alive:  # else it is said already, by whoever noticed
            self._hand_over(plan, slot, file, printed)

    async def _bring(self, plan: SwapPlan, source: Source | None, rehearsal: Rehearsal) -> None:
        """Have snapshot, profile and history here: they are this node's to serve then. Raises: DeadpoolError."""
        step, rank, store = plan.restore_step, rehearsal.rank, self._node.host.store
        if source is None and not store.owns(rank, step):
            source = Source(rank, self._node.id, self._node.id, rank)  # cut off before: it is here as a mirror still
        if source is None:
            await self._spares.pull(rehearsal, self._node.id, step)
        else:
            fetching = begin(self._mirroring.bring(source, step, rehearsal.profile))
            try:
                await self._spares.pull(rehearsal, source.header_node, step)
                await fetching
            finally:
                fetching.cancel()
        self._mirroring.adopt(rehearsal.profile)
        if store.history(rank).last != step:
            store.histories[rank] = rehearsal.history.upto(step)
        self._hold(plan, rank)

    def _hold(self, plan: SwapPlan, rank: Rank) -> None:
        replicas = self._mirroring.profiles[rank].replicas
        self._node.host.store.staged(rank, plan.restore_step, plan.world.generation, replicas)

    def _hand_over(self, plan: SwapPlan, slot: Slot, file: FileIO | None, printed: Printed) -> None:
        pair = present(self._node.host.store.own(slot.rank), f"rank {slot.rank} is handed over without an arena")
        self._workers.take(slot, file, printed, plan.restore_step)
        self._spares.done(slot)
        if self._monitor.paused:  # whoever has come to run a rank meanwhile stands still, too
            self._monitor.pause()
        peer = slot.serving
        if peer is None:  # its connection has ended, and so will it
            return
        order = local.TakeOver(
            plan.world.generation, plan.store, plan.restore_step, pair.header_bytes, pair.payload_bytes
        )
        peer.send(order, [pair.fd])
        peer.send(local.Committed(self._workers.committed))  # said to the others while this one rehearsed
