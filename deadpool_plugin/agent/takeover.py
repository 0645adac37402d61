"""Path B in the agent: what a decided plan asks of this node's processes.

Rules of this file: survivors are told at once, they need nothing from others; a newcomer's process gets its history and
its arena with the restore step in it, then the order. A further plan cancels what is still under way and starts over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

from ..core import io
from ..core.types import Generation, NodeId, Rank, Source, Step, SwapPlan
from ..errors import DeadpoolError, TransportError, invariant
from ..mirror.arena import SlotPair, SnapshotHeader
from ..mirror.store import SnapshotStore
from ..transport import local
from .mirroring import Mirroring, Profile
from .peers import Peers
from .reports import Reports
from .spares import Rehearsal, Spares
from .workers import Slot, Workers


class TakeOvers:
    """Thread: the event loop's only."""

    def __init__(
        self,
        node: NodeId,
        workers: Workers,
        mirroring: Mirroring,
        spares: Spares,
        peers: Peers,
        store: SnapshotStore,
        reports: Reports,
        start_timeout_s: float,
        feed: Callable[[io.Input], None],
    ) -> None:
        self._node, self._workers, self._mirroring, self._spares = node, workers, mirroring, spares
        self._peers, self._store, self._reports, self._feed = peers, store, reports, feed
        self._start_timeout_s = start_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    def act(self, plan: SwapPlan) -> None:
        """Hand out `plan`: Join to who runs already, a take-over for every rank that is new here."""
        self.cancel()
        world, step = plan.world, plan.restore_step
        self._workers.world = world
        self._mirroring.enter(world)
        self._mirroring.roll_back(step)
        self._spares.swapped(world.node_of, step)
        sources = {source.rank: source for source in plan.sources}
        newcomers: list[Rank] = []
        for rank in world.ranks_of(self._node):
            slot = next((slot for slot in self._workers.slots if slot.rank == rank), None)
            if slot is None or slot.serving is None:
                newcomers.append(rank)
            elif rank in sources:
                self._start(self._refill(plan, slot, sources[rank]))
            else:
                self._join(plan, slot)
        for slot, rank in self._places(newcomers):
            self._spares.stop_following(slot)
            self._start(self._take_over(plan, slot, rank, sources.get(rank)))

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _places(self, ranks: list[Rank]) -> list[tuple[Slot, Rank]]:
        """Each rank's slot: the one that rehearses it, else one that is left."""
        free = {slot.local_rank: slot for slot in self._workers.slots if slot.serving is None}
        placed: list[tuple[Slot, Rank]] = []
        for rank in ranks:
            for number in list(free):
                rehearsal = self._spares.rehearsals.get(number)
                if rehearsal is not None and rehearsal.rank == rank and not rehearsal.refused:
                    placed.append((free.pop(number), rank))
                    break
        left = [rank for rank in ranks if rank not in {rank for _, rank in placed}]
        invariant(len(left) <= len(free), f"ranks {ranks} for {len(self._workers.slots)} local slots")
        return placed + list(zip(free.values(), left, strict=False))

    # ---- survivors

    def _join(self, plan: SwapPlan, slot: Slot) -> None:
        assert slot.serving is not None
        slot.serving.send(local.Join(plan.world.generation, plan.store, plan.restore_step))
        self._mirroring.mirror_again(slot.rank, plan.restore_step, plan.world.generation)

    async def _refill(self, plan: SwapPlan, slot: Slot, source: Source) -> None:
        """A survivor whose own arena lacks the restore step gets it back first."""
        pair = self._store.own(source.rank)
        try:
            if pair is None:
                raise TransportError(f"rank {source.rank} runs here without an arena")
            fetch = self._fetcher(source, plan.restore_step)
            await self._peers.ask(lambda: fetch(pair))
            self._settle(plan, source.rank, None)
        except DeadpoolError as error:
            self._feed(io.WorkerLost(source.rank, f"its restore step cannot be had: {error}"))
            return
        self._join(plan, slot)

    # ---- newcomers

    async def _take_over(self, plan: SwapPlan, slot: Slot, rank: Rank, source: Source | None) -> None:
        """What the rank needs is brought here and safe again before its process is ready (that may take long).

        Args:
            source: None if an earlier plan has brought it here already.
        """
        try:
            rehearsal = self._spares.rehearsals.get(slot.local_rank)
            if rehearsal is None or rehearsal.rank != rank or slot.rehearsing != rank:
                rehearsal = await self._spares.begin(slot, rank, source.header_node if source else self._node)
            if source is not None:
                await self._bring(plan, source, rehearsal)
            self._mirroring.mirror_again(rank, plan.restore_step, plan.world.generation)
            await asyncio.wait_for(rehearsal.finished.wait(), self._start_timeout_s)
            if rehearsal.refused or slot.rehearser is None:
                return  # said already, by whoever noticed
            self._spares.tell(rehearsal)
        except (DeadpoolError, asyncio.TimeoutError) as error:
            reason = str(error) or f"its rehearsal took more than {self._start_timeout_s:g} s"
            self._feed(io.WorkerLost(rank, f"could not be taken over: {reason}"))
            return
        self._hand_over(plan, slot, rank)

    async def _bring(self, plan: SwapPlan, source: Source, rehearsal: Rehearsal) -> None:
        """Snapshot and history come here, and are this node's to serve. Raises: TransportError and others."""
        step = plan.restore_step
        fetching = asyncio.get_running_loop().create_task(self._fetch(source, step, rehearsal))
        try:
            await self._spares.pull(rehearsal, source.header_node, step)
            await fetching
        finally:
            fetching.cancel()
        self._settle(plan, source.rank, rehearsal)

    def _hand_over(self, plan: SwapPlan, slot: Slot, rank: Rank) -> None:
        pair = self._store.own(rank)
        invariant(pair is not None, f"rank {rank} is handed over without an arena")
        assert pair is not None and slot.rehearser is not None
        self._workers.take(slot, rank)
        order = local.TakeOver(
            rank, plan.world.generation, plan.store, plan.restore_step, pair.header_bytes, pair.payload_bytes
        )
        slot.rehearser.send(order, [pair.fd])
        slot.rehearser.send(local.Committed(self._workers.committed))  # said to the others while this one rehearsed

    def _settle(self, plan: SwapPlan, rank: Rank, rehearsal: Rehearsal | None) -> None:
        """The rank's snapshot, profile and history are here: they are this node's to serve now."""
        step = plan.restore_step
        if rehearsal is not None:
            self._mirroring.profiles[rank] = rehearsal.profile
            self._store.put_recording(rank, rehearsal.profile.encoded())
            if self._store.history_range(rank)[1] != step:
                history = rehearsal.history
                for past, record in enumerate(history.get(history.first, step), history.first):
                    self._store.append(rank, past, record)
        self._store.staged(rank, step, plan.world.generation, self._mirroring.profiles[rank].replicas)

    async def _fetch(self, source: Source, step: Step, rehearsal: Rehearsal) -> SlotPair:
        began = time.monotonic()
        profile = rehearsal.profile
        fetch, generation = self._fetcher(source, step), self._store.generation
        pair = await self._peers.ask(lambda: self._fetched(source, step, generation, profile, fetch))
        took = time.monotonic() - began
        self._reports.emit("SnapshotFetched", rank=source.rank, step=step, nbytes=pair.payload_bytes, duration_s=took)
        return pair

    def _fetcher(self, source: Source, step: Step) -> Callable[[SlotPair], SnapshotHeader]:
        """What fills a pair of slots with the restore step, to be called in a thread."""
        header_peer, payload_peer = self._peers.to(source.header_node), self._peers.to(source.payload_node)
        return lambda pair: header_peer.fetch(source.rank, step, source.payload_rank, pair, payload_peer)

    def _fetched(
        self,
        source: Source,
        step: Step,
        generation: Generation,
        profile: Profile,
        fetch: Callable[[SlotPair], SnapshotHeader],
    ) -> SlotPair:
        """The rank's own slots on this node, holding `step`. Thread: one of the asking ones.

        Where this node itself holds the mirror, its content must be taken out before own slots replace it.
        """
        rank = source.rank
        draft = None
        if self._node in (source.header_node, source.payload_node):
            draft = SlotPair.create(rank, profile.header_bytes, profile.payload_bytes)
            fetch(draft)
        self._store.check_generation(generation)
        pair = self._store.create_own(rank, profile.header_bytes, profile.payload_bytes)
        if draft is None:
            fetch(pair)
            return pair
        encoded = draft.encoded_header(step)
        invariant(encoded is not None, f"rank {rank}'s snapshot of step {step} was fetched but is not there")
        assert encoded is not None
        pair.payload(step)[:] = draft.payload(step)
        pair.seal_encoded(step, encoded)
        draft.close()
        return pair
