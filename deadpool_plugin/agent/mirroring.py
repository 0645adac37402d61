"""Path A in the agent: arenas for this node's ranks, and each staged snapshot to the buddy.

Rules of this file: the event loop never blocks (arenas are made in threads, pushes are queued); a push that fails is
tried again while it is the newest of its rank; what stays impossible for the job's patience is evidence against the
buddy. Old generations' answers are dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from ..core import io
from ..core.placement import buddy_of, needs_payload
from ..core.types import NO_STEP, Generation, Holding, NodeId, Rank, Step, World
from ..errors import EXIT_CONFIG, ConfigError, StaleGeneration, TransportError, invariant
from ..mirror.arena import arena_bytes
from ..mirror.memory import check_memory
from ..mirror.store import SnapshotStore
from ..transport import local
from ..transport.local import LocalPeer
from .peers import Peers
from .workers import Slot

_RETRY_S = 0.1


class Profile(msgspec.Struct, frozen=True):
    """What one must know of a rank to stand in for it. Travels as the rank's "recording" between stores."""

    header_bytes: int
    payload_bytes: int
    layout_hash: str
    replicas: tuple[Rank, ...]
    recording: bytes

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode_profile(blob: bytes) -> Profile:
    """Raises: TransportError"""
    try:
        return msgspec.msgpack.decode(blob, type=Profile)
    except msgspec.MsgspecError as error:
        raise TransportError(f"a recording of {len(blob)} bytes cannot be read: {error}") from error


class Mirroring:
    """Thread: the event loop's only."""

    def __init__(
        self,
        node: NodeId,
        local_size: int,
        store: SnapshotStore,
        peers: Peers,
        headroom_bytes: int,
        patience_s: float,
        feed: Callable[[io.Input], None],
    ) -> None:
        self._node, self._local_size, self._store, self._peers = node, local_size, store, peers
        self._headroom_bytes, self._patience_s, self._feed = headroom_bytes, patience_s, feed
        self._loop = asyncio.get_running_loop()
        self._world: World | None = None
        self._failing_since: float | None = None
        self._newest: dict[Rank, Step] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.profiles: dict[Rank, Profile] = {}

    @property
    def world(self) -> World:
        invariant(self._world is not None, "a worker was served before the world had formed")
        assert self._world is not None
        return self._world

    def enter(self, world: World) -> None:
        """A new world: mirror along its ring from now on."""
        self._world = world
        self._failing_since = None

    # ---- a rank reaches its first call

    def rank_ready(self, slot: Slot, peer: LocalPeer, message: local.RankReady) -> None:
        task = self._loop.create_task(self._prepare(peer, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self, peer: LocalPeer, message: local.RankReady) -> None:
        rank = message.rank
        profile = Profile(
            message.header_bytes, message.payload_bytes, message.layout_hash, message.replicas, message.recording
        )
        try:
            self._check_memory(rank, profile)
            pair = await self._peers.in_thread(
                lambda: self._store.create_own(rank, message.header_bytes, message.payload_bytes)
            )
        except ConfigError as error:
            self._feed(io.StopRequested(f"node {self._node}: {error}", EXIT_CONFIG))
            return
        self.adopt(rank, profile)
        peer.send(local.ArenaHandOver(rank, pair.header_bytes, pair.payload_bytes), [pair.fd])
        self._feed(io.WorkerReady(rank))

    def adopt(self, rank: Rank, profile: Profile) -> None:
        """`rank` runs here: keep what a stand-in for it must know, on the buddy too."""
        self.profiles[rank] = profile
        self._store.put_recording(rank, profile.encoded())
        self._push_recording(rank)

    def _push_recording(self, rank: Rank) -> None:
        buddy = buddy_of(self.world, self._node)
        if buddy is not None:
            done = lambda ok, reason: self._soon(self._recording_pushed, rank, buddy, ok)  # noqa: E731
            self._peers.to(buddy).push_recording(rank, self.profiles[rank].encoded(), done)

    def _recording_pushed(self, rank: Rank, buddy: NodeId, ok: bool) -> None:
        if not ok and buddy == buddy_of(self.world, self._node):
            self._loop.call_later(_RETRY_S, self._push_recording, rank)

    def _check_memory(self, rank: Rank, profile: Profile) -> None:
        """Before training: own slots still to be made and mirrors still to come, as if all ranks were like this one."""
        mirrored = profile.payload_bytes if needs_payload(self.world, rank, profile.replicas) else 0
        own = arena_bytes(profile.header_bytes, profile.payload_bytes)
        mirror = arena_bytes(profile.header_bytes, mirrored)
        ranks = range(len(self.world.node_of))
        own_left = self._local_size - sum(self._store.own(r) is not None for r in ranks)
        mirrors_left = self._local_size - sum(self._store.mirrored(r) is not None for r in ranks)
        if len(self.world.active) == 1:
            mirrors_left = 0  # a spare keeps them
        check_memory(max(own_left, 0) * own + max(mirrors_left, 0) * mirror, self._headroom_bytes)

    # ---- every step

    def staged(self, slot: Slot, peer: LocalPeer, message: local.Staged) -> None:
        """A worker has sealed a slot: count it, remember its records, send it to the buddy."""
        try:
            self.hold(message.rank, message.step, message.generation, message.records)
        except StaleGeneration:
            return
        except TransportError as error:
            self._feed(io.WorkerLost(message.rank, f"its arena is damaged: {error}"))

    def hold(self, rank: Rank, step: Step, generation: Generation, records: bytes) -> None:
        """An own slot holds (rank, step). Raises: StaleGeneration; TransportError if it does not."""
        replicas = self.profiles[rank].replicas
        holding = self._store.staged(rank, step, generation, replicas)
        self._store.append(rank, step, records)
        self._newest[rank] = step
        self._feed(io.SnapshotHeld(holding, generation))
        self._push(rank, step, generation, records)

    def mirror_again(self, rank: Rank, step: Step, generation: Generation) -> None:
        """After a swap: the buddy shall hold the restore step and the recording (it says so at once if it does)."""
        self._newest[rank] = step
        records = self._store.get(rank, step, step)[0]
        self._feed(io.SnapshotHeld(Holding(rank, step, True, self.profiles[rank].replicas), generation))
        self._push_recording(rank)
        self._push(rank, step, generation, records)

    def _push(self, rank: Rank, step: Step, generation: Generation, records: bytes) -> None:
        buddy = buddy_of(self.world, self._node)
        if buddy is None or generation != self.world.generation:
            return
        profile = self.profiles[rank]
        self._peers.to(buddy).push(
            rank,
            step,
            generation,
            needs_payload(self.world, rank, profile.replicas),
            profile.replicas,
            profile.layout_hash,
            records,
            lambda ok, reason: self._soon(self._pushed, rank, step, generation, records, ok, reason),
        )

    def _pushed(self, rank: Rank, step: Step, generation: Generation, records: bytes, ok: bool, reason: str) -> None:
        if generation != self.world.generation or generation < self._store.generation:
            return
        if ok:
            self._failing_since = None
            return
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        buddy = buddy_of(self.world, self._node)
        if now - self._failing_since > self._patience_s and buddy is not None:
            self._feed(io.LinkLost(buddy, f"node {self._node} cannot mirror to it: {reason}"))
        elif self._newest.get(rank, NO_STEP) == step:
            self._loop.call_later(_RETRY_S, self._push, rank, step, generation, records)

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        """Any thread: call `function` on the loop, unless that has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # ---- other nodes' snapshots (bulk threads)

    def on_mirrored(self, rank: Rank, step: Step, generation: Generation, holding: Holding) -> None:
        """Thread: a bulk thread's."""
        self._soon(self._feed, io.SnapshotHeld(holding, generation))

    # ---- a swap

    def roll_back(self, step: Step) -> None:
        """Everything newer than the restore step is of a history that did not happen."""
        for rank in range(len(self.world.node_of)):
            self._store.drop_newer(rank, step)
