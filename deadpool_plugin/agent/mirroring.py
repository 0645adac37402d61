"""Path A in the agent: arenas for this node's ranks, and what is staged in them, to be held and mirrored.

Rules of this file: the event loop never blocks (arenas are made in threads, pushes are queued, see pushing.py); what
an older generation still says is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..core import api, local
from ..core.placement import held_by, needs_payload
from ..core.types import NO_STEP, Generation, Holding, NodeId, Rank, Step, World
from ..errors import EXIT_CONFIG, ConfigError, StaleGeneration, TransportError, present
from ..mirror.arena import arena_bytes
from ..transport.tasks import Tasks, soon
from ..transport.unix import LocalPeer
from .host import Host
from .profile import Profile
from .pushing import Pushes
from .slots import Slot


class Mirroring:
    """Thread: the event loop's only, but for what the store tells of corrupt snapshots."""

    def __init__(
        self, node: NodeId, copies: int, host: Host, patience_s: float, feed: Callable[[api.Input], None]
    ) -> None:
        self._node, self._copies, self._host, self._store = node, copies, host, host.store
        self._feed = feed
        self._world: World | None = None
        self._pushes = Pushes(node, copies, host, patience_s, feed)
        self._tasks = Tasks()
        self._strangers = False
        self.profiles: dict[Rank, Profile] = {}
        loop = asyncio.get_running_loop()
        host.store.on_corrupt(lambda rank, step: soon(loop, feed, api.HoldingsDropped(rank, step - 1)))

    @property
    def world(self) -> World:
        return present(self._world, "a worker was served before the world had formed")

    def enter(self, world: World, restore_step: Step | None = None) -> None:
        """A new world: mirror along its ring from now on, and let others mirror here in its generation. What is newer
        than `restore_step` is of a history that did not happen."""
        self._world = world
        self._pushes.enter(world)
        self._strangers = True
        if restore_step is not None:
            for rank in self._store.ranks():
                self._store.drop_newer(rank, restore_step)
        self._store.enter(world.generation)

    # ---- a rank reaches its first call

    def rank_ready(self, slot: Slot, peer: LocalPeer, message: local.RankReady) -> None:
        self._tasks.start(self._prepare(slot, peer, message))

    async def _prepare(self, slot: Slot, peer: LocalPeer, message: local.RankReady) -> None:
        rank = message.rank
        profile = Profile(
            message.header_bytes, message.payload_bytes, message.layout_hash, message.replicas, message.recording
        )
        store, generation = self._store, self._store.generation
        try:
            self.check_memory(profile, self._node)
            pair = await self._host.in_thread(
                lambda: store.create_own(
                    rank, message.header_bytes, message.payload_bytes, lambda: store.check_generation(generation)
                )
            )
        except StaleGeneration:  # its process has gone, or will; the next one's slots have that memory
            return
        except ConfigError as error:
            self._feed(api.StopRequested(f"node {self._node}: {error}", EXIT_CONFIG))
            return
        if slot.serving is not peer or slot.process is None:
            if self._store.own(rank) is pair:  # its process has gone meanwhile
                self._store.release(rank)
            return
        slot.process.in_training = True
        self.adopt(rank, profile)
        self._pushes.recording(rank, profile)
        peer.send(local.ArenaHandOver(rank, pair.header_bytes, pair.payload_bytes), [pair.fd])
        self._feed(api.WorkerReady(rank))

    def adopt(self, rank: Rank, profile: Profile) -> None:
        """`rank` runs here: keep what a stand-in for it must know."""
        self.profiles[rank] = profile
        self._store.records.put_recording(rank, profile.encoded())

    def check_memory(self, profile: Profile, node: NodeId) -> None:
        """Slots still to be made here for what `node` runs and mirrors, as if all ranks were like this one.

        Args: node: this one, before training; on a spare the one it would replace.
        Raises: MemoryShortage.
        """
        store, world = self._store, self.world
        ranks, run = held_by(world, node, self._copies), world.ranks_of(node)
        mirrored = [rank for rank in ranks if rank not in run and not store.has_slots(rank)]
        own = [rank for rank in run if not store.has_slots(rank)]
        with_payload = any(needs_payload(world, rank, profile.replicas, self._copies) for rank in profile.replicas)
        each_own = arena_bytes(profile.header_bytes, profile.payload_bytes)
        each_mirror = arena_bytes(profile.header_bytes, profile.payload_bytes if with_payload else 0)
        store.maker.check(len(own) * each_own + len(mirrored) * each_mirror)

    # ---- every step

    def staged(self, slot: Slot, message: local.Staged) -> None:
        """A worker has sealed a slot: count it, remember its records, send it to the buddies."""
        rank, step, generation = message.rank, message.step, message.generation
        profile = self.profiles[rank]
        try:
            holding = self._store.staged(rank, step, generation, profile.replicas)
        except StaleGeneration:
            return
        except TransportError as error:
            self._feed(api.WorkerLost(rank, f"its arena is damaged: {error}"))
            return
        self._store.records.append(rank, step, message.records)
        self._feed(api.SnapshotHeld(holding, generation))
        self._pushes.snapshot(rank, step, generation, profile, message.records)

    def on_mirrored(self, rank: Rank, step: Step, generation: Generation, holding: Holding) -> None:
        """Take note of another node's snapshot, which has arrived whole."""
        self._feed(api.SnapshotHeld(holding, generation))

    def committed(self) -> None:
        """A step is committed in this world, so all of it is held along its ring: what else is here may go."""
        if not self._strangers:
            return
        self._strangers = False
        kept = held_by(self.world, self._node, self._copies)
        for rank in self._store.ranks():
            if rank not in kept and self._store.holds(rank):
                self._store.release(rank)
                self.profiles.pop(rank, None)
                self._feed(api.HoldingsDropped(rank, NO_STEP))

    # ---- a swap

    def mirror_again(self, rank: Rank, step: Step, generation: Generation) -> None:
        """Send the restore step and the recording to the buddies after a swap (they say so if they hold them)."""
        profile = self.profiles[rank]
        records = self._store.records.get(rank, step, step)[0]
        holding = Holding(rank, step, True, profile.replicas, self._store.paired(rank, step))
        self._feed(api.SnapshotHeld(holding, generation))
        self._pushes.recording(rank, profile)
        self._pushes.snapshot(rank, step, generation, profile, records)

    def start_over(self, world: World) -> None:
        """Nothing of an attempt that never came to training is worth anything to the next, in `world`."""
        for rank in self._store.ranks():
            self._store.release(rank)
        self.profiles.clear()
        self.enter(world)
