"""Snapshots, recordings and call records on their way between this node's memory and other nodes'.

Rules of this file: the event loop never blocks (arenas are made in threads). What an older generation still says is
dropped. Every buddy is served on its own; a push that fails is tried again while it is the newest of its rank. What
arrives is listed as held only once it is whole and its generation is still the newest. A node that answers nothing for
`slow_after_s` is evidence for the controllers, unless it answers that it is in another generation: then it lives,
and a swap is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from .. import events
from ..core import api, local
from ..core.placement import buddies_of, held_by, needs_payload
from ..core.types import NO_STEP, Generation, Holding, NodeId, Rank, Source, Step, World
from ..errors import EXIT_CONFIG, ConfigError, DeadpoolError, StaleGeneration, TransportError
from ..mirror.arena import SlotPair, arena_bytes
from ..mirror.records import NotHeld
from ..mirror.store import CorruptSnapshot
from ..mirror.transfers import SnapshotPush, TransferFailed
from ..mirror.wire import InAnotherGeneration, RefusedByPeer
from ..transport.tasks import Tasks, begin, loop_time
from ..transport.unix import LocalPeer
from .node import LocalNode, Slot

T = TypeVar("T")

PUSH_RETRY_S = 0.1
FETCH_RETRY_S = 0.2
HISTORY_WARN_AT = 0.8
HISTORY_LOOK_STEPS = 64  # between two looks at the memory that call records take


class Mirroring:
    """Arenas for this node's ranks, pushes of what is staged in them, and fetches of what this node lacks."""

    def __init__(self, node: LocalNode) -> None:
        self._node, self._store, self._copies = node, node.host.store, node.config.copies
        self._world = World(0, ())
        self._buddies: tuple[NodeId, ...] = ()
        self._failing_since: dict[NodeId, float] = {}
        self._newest: dict[Rank, Step] = {}
        self._tasks, self._holds_strangers = Tasks(), False
        self._history_said: set[bool] = set()
        self._history_looked = 0
        self.profiles: dict[Rank, local.RankReady] = {}

    def enter(self, world: World, restore_step: Step | None = None) -> None:
        """Mirror along the ring of a new world, back at `restore_step`; others may mirror here in its generation."""
        self._world, self._buddies = world, buddies_of(world, self._node.id, self._copies)
        self._failing_since.clear()
        self._holds_strangers = True
        if restore_step is not None:
            for rank in self._store.ranks():
                self._store.drop_newer(rank, restore_step)
        self._store.enter(world.generation)

    def start_over(self, world: World) -> None:
        """Drop all of an attempt that never came to training."""
        for rank in self._store.ranks():
            self._store.release(rank)
        self.profiles.clear()
        self.enter(world)

    async def prepare(self, slot: Slot, peer: LocalPeer, profile: local.RankReady) -> None:
        """Make the arena of a rank that has reached its first call, and hand it over."""
        rank, node, store, generation = profile.rank, self._node, self._store, self._store.generation
        shape, in_time = (rank, profile.header_bytes, profile.payload_bytes), lambda: store.check_generation(generation)
        try:
            self.check_memory(profile, node.id)
            pair = await node.host.in_thread(lambda: store.create_own(*shape, in_time))
        except StaleGeneration:  # its process has gone, or will; the next one's slots have that memory
            return
        except ConfigError as error:
            return node.feed(api.StopRequested(f"node {node.id}: {error}", EXIT_CONFIG))
        if slot.running is None or slot.running.peer is not peer:
            if store.own(rank) is pair:  # its process has gone meanwhile
                store.release(rank)
            return
        slot.running.in_training, slot.running.unwound_for = True, generation
        self.adopt(profile)
        self._push_recording(rank)
        config = self._node.config
        peer.send(local.ArenaHandOver(*shape, config.begins_every, config.every_is_fixed), [pair.fd])
        node.feed(api.WorkerReady(rank))

    def adopt(self, profile: local.RankReady) -> None:
        self.profiles[profile.rank] = profile
        self._store.recordings[profile.rank] = msgspec.msgpack.encode(profile)

    def check_memory(self, profile: local.RankReady, node: NodeId) -> None:
        """Raises: MemoryShortage unless this host has memory for what `node` runs and mirrors, ranks being alike."""
        store, world = self._store, self._world
        ranks, run = held_by(world, node, self._copies), world.ranks_of(node)
        mirrored = [rank for rank in ranks if rank not in run and not store.has_slots(rank)]
        own = [rank for rank in run if not store.has_slots(rank)]
        with_payload = any(needs_payload(world, rank, profile.replicas, self._copies) for rank in profile.replicas)
        each_own = arena_bytes(profile.header_bytes, profile.payload_bytes)
        each_mirror = arena_bytes(profile.header_bytes, profile.payload_bytes if with_payload else 0)
        store.maker.check(len(own) * each_own + len(mirrored) * each_mirror)

    def staged(self, message: local.Staged) -> None:
        """List a slot that a worker has sealed, remember its records, and send it to the buddies."""
        rank, step, generation = message.rank, message.step, message.generation
        try:
            holding = self._store.staged(rank, step, generation, self.profiles[rank].replicas)
        except StaleGeneration:
            return
        except TransportError as error:
            return self._node.feed(api.WorkerLost(rank, f"its arena is damaged: {error}"))
        self._store.history(rank).append(step, *message.records)
        before = self._store.before(rank, step)
        self._node.feed(api.SnapshotHeld(holding, generation, before, message.took_steps, message.most))
        self._push_snapshot(rank, step, generation, message.records[-1], before)

    def hold(self, rank: Rank, step: Step) -> None:
        """List the restore step that has come into own slots. Raises: StaleGeneration, TransportError."""
        self._store.staged(rank, step, self._world.generation, self.profiles[rank].replicas)

    def mirror_again(self, rank: Rank, step: Step) -> None:
        """Send the restore step and the recording to the buddies after a swap (they say so if they hold them)."""
        records = self._store.history(rank).get(step, step)[0]
        holding = Holding(rank, step, True, self.profiles[rank].replicas, self._store.paired(rank, step))
        before = self._store.before(rank, step)
        self._node.feed(api.SnapshotHeld(holding, self._world.generation, before))
        self._push_recording(rank)
        self._push_snapshot(rank, step, self._world.generation, records, before)

    def committed(self, step: Step) -> None:
        """Release what is not held along this world's ring, and watch the memory for call records."""
        if self._holds_strangers:
            self._holds_strangers = False
            kept = held_by(self._world, self._node.id, self._copies)
            for rank in self._store.ranks():
                if rank not in kept and self._store.holds(rank):
                    self._store.release(rank)
                    self.profiles.pop(rank, None)
                    self._node.feed(api.HoldingsDropped(rank, NO_STEP))
        self.watch_history(self._world.ranks_of(self._node.id), step)

    def watch_history(self, ranks: Sequence[Rank], step: Step) -> None:
        """Report once that the call records of `ranks` are nearly full, and once that they are."""
        # A process that begins the script anew needs the records of every step: from the first one dropped on, only
        # those that have followed so far can take a rank over.
        if True in self._history_said:
            return
        warn_bytes = HISTORY_WARN_AT * self._node.config.history_limit_bytes
        looks = step // HISTORY_LOOK_STEPS != self._history_looked
        self._history_looked = step // HISTORY_LOOK_STEPS
        for rank in ranks:
            history = self._store.history(rank)
            full = history.first > 0
            fills = looks and history.held_bytes >= warn_bytes
            if (full or fills) and full not in self._history_said:
                self._history_said.add(full)
                self._node.reports.emit(events.HistoryFilling(rank=rank, step=step, full=full))
                if full:
                    self._node.feed(api.RecordsDropped())

    def _push_recording(self, rank: Rank) -> None:
        generation, recording = self._world.generation, self._store.recording(rank)

        async def push(buddy: NodeId) -> None:
            while generation == self._world.generation:
                try:
                    return await self._node.host.bulk.push_recording(buddy, rank, generation, recording)
                except DeadpoolError:
                    await asyncio.sleep(PUSH_RETRY_S)

        for buddy in self._buddies:
            self._tasks.start(push(buddy))

    def _push_snapshot(self, rank: Rank, step: Step, generation: Generation, records: bytes, before: Step) -> None:
        self._newest[rank], profile = step, self.profiles[rank]
        with_payload = needs_payload(self._world, rank, profile.replicas, self._copies)
        shape = profile.replicas, profile.layout_hash
        push = SnapshotPush(rank, step, generation, with_payload, *shape, records, before)
        for buddy in self._buddies:
            self._tasks.start(self._push_snapshot_to(buddy, push))

    async def _push_snapshot_to(self, buddy: NodeId, push: SnapshotPush) -> None:
        node, rank, generation = self._node, push.rank, push.generation
        while generation == self._world.generation and self._newest[rank] == push.step:
            failure: DeadpoolError | None = None
            try:
                await node.host.bulk.push(buddy, push)
            except DeadpoolError as error:
                failure = error
            now = loop_time()
            if generation != self._world.generation or generation < self._store.generation:
                return
            if failure is None or isinstance(failure, InAnotherGeneration):
                self._failing_since.pop(buddy, None)
                if failure is None:
                    return
            elif isinstance(failure, NotHeld | CorruptSnapshot):  # no fault of the buddy's
                if self._newest[rank] == push.step:
                    node.feed(api.WorkerLost(rank, f"its newest snapshot cannot be read here: {failure}"))
                return
            elif now - self._failing_since.setdefault(buddy, now) > node.config.slow_after_s:
                del self._failing_since[buddy]
                if isinstance(failure, TransferFailed):  # this node itself cannot send
                    node.feed(api.NodeGivenUp(f"it cannot mirror any more: {failure}"))
                else:
                    node.feed(api.LinkLost(buddy, f"node {node.id} cannot mirror to it: {failure}", silent=True))
            await asyncio.sleep(PUSH_RETRY_S)  # others may hear it well, and it stays in the job

    async def _ask(self, work: Callable[[], Awaitable[T]], *nodes: NodeId) -> T:
        """Do `work`, which asks `nodes`, until the patience from the first failure on is used up, or a node refuses."""
        deadline: float | None = None
        while True:
            try:
                return await work()
            except RefusedByPeer:
                raise
            except TransportError as error:
                deadline = loop_time() + self._node.config.slow_after_s if deadline is None else deadline
                if loop_time() >= deadline:
                    reason = f"node {self._node.id} cannot ask it: {error}"
                    for node in sorted({*nodes} - {self._node.id}):
                        self._node.feed(api.LinkLost(node, reason, silent=True))
                    raise
            await asyncio.sleep(FETCH_RETRY_S)

    async def recording(self, source: NodeId, rank: Rank) -> local.RankReady:
        """Get what a stand-in needs of `rank`, from here if it is here, else from `source`. Raises: DeadpoolError."""
        if source == self._node.id or rank in self._store.recordings:
            blob = self._store.recording(rank)
        else:
            blob = await self._ask(lambda: self._node.host.bulk.get_recording(source, rank), source)
        try:
            return msgspec.msgpack.decode(blob, type=local.RankReady)
        except msgspec.MsgspecError as error:
            raise TransportError(f"a recording of {len(blob)} bytes cannot be read: {error}") from error

    async def records(self, source: NodeId, rank: Rank, first: Step, last: Step) -> list[bytes]:
        """Get the call records of first..last, from `source`. Raises: TransportError, HistoryPruned."""
        if source == self._node.id:
            return self._store.history(rank).get(first, last)
        return await self._ask(lambda: self._node.host.bulk.get_history(source, rank, first, last), source)

    async def refill(self, source: Source, step: Step) -> None:
        """Bring and list (rank, step) in the slots the rank's process uses already. Raises: DeadpoolError."""
        pair, generation = self._store.own(source.rank), self._store.generation
        if pair is None:
            raise TransportError(f"rank {source.rank} runs here without an arena")
        nodes = source.header_node, source.payload_node
        await self._ask(lambda: self._node.host.bulk.fetch(source, step, pair, generation), *nodes)
        self.hold(source.rank, step)

    async def bring(self, source: Source, step: Step, profile: local.RankReady) -> None:
        """Make own slots for a rank that is new here, and bring `step` into them. Raises: DeadpoolError."""
        host, store, generation, began = self._node.host, self._store, self._store.generation, loop_time()
        shape = source.rank, profile.header_bytes, profile.payload_bytes

        async def fetched() -> SlotPair:
            # Where this node itself holds the mirror, that stays until the new slots replace it, whatever is cut off.
            pair = await host.in_thread(lambda: store.make_own(*shape, lambda: store.check_generation(generation)))
            try:
                await host.bulk.fetch(source, step, pair, generation)
                await host.in_thread(lambda: store.adopt_own(pair, step, generation, profile.replicas))
            except BaseException:  # the next attempt finds them: the first touch of new ones takes long
                pair.invalidate(step)
                store.put_back(pair)
                raise
            return pair

        # Cancelled, the attempt under way goes on to its end: slots that somebody writes to are nobody else's.
        pair = await self._ask(lambda: asyncio.shield(begin(fetched())), source.header_node, source.payload_node)
        took_s, nbytes = loop_time() - began, pair.payload_bytes
        self._node.reports.emit(events.SnapshotFetched(rank=source.rank, step=step, nbytes=nbytes, duration_s=took_s))
