"""This node's snapshots and recordings on their way to its buddies.

Rules of this file: every buddy is served on its own; a push that fails is tried again while it is the newest of its
rank; what stays impossible for the job's patience is evidence against that buddy, unless it answers that it is in
another generation: then it lives, and a swap is under way. A snapshot that cannot be read here is evidence against its
own rank's process, a transfer that this node itself cannot carry out against this node. Answers of older worlds are
dropped.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from ..core import io
from ..core.placement import buddies_of, needs_payload
from ..core.types import NO_STEP, Generation, NodeId, Rank, Step, World
from ..errors import DeadpoolError
from ..mirror.integrity import CorruptSnapshot
from ..mirror.peer import TransferFailed
from ..mirror.records import NotHeld
from ..mirror.store import SnapshotStore
from ..mirror.wire import InAnotherGeneration
from ..transport import tasks
from .peers import Peers
from .profile import Profile

_RETRY_S = 0.1


class Pushes:
    """Thread: the event loop's only; `soon` any."""

    def __init__(
        self,
        node: NodeId,
        copies: int,
        store: SnapshotStore,
        peers: Peers,
        feed: Callable[[io.Input], None],
    ) -> None:
        self._node, self._copies, self._store, self._peers = node, copies, store, peers
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._world = World(0, ())
        self._buddies: tuple[NodeId, ...] = ()
        self._failing_since: dict[NodeId, float] = {}
        self._newest: dict[Rank, Step] = {}

    def enter(self, world: World) -> None:
        """A new world: push along its ring from now on."""
        self._world = world
        self._buddies = buddies_of(world, self._node, self._copies)
        self._failing_since.clear()

    def recording(self, rank: Rank, profile: Profile) -> None:
        """Every buddy shall hold what a stand-in for `rank` must know."""
        for buddy in self._buddies:
            self._push_recording(buddy, rank, self._world.generation, profile)

    def _push_recording(self, buddy: NodeId, rank: Rank, generation: Generation, profile: Profile) -> None:
        if generation != self._world.generation:
            return
        again = functools.partial(self._push_recording, buddy, rank, generation, profile)

        def done(error: DeadpoolError | None) -> None:
            if error is not None:
                self.soon(self._loop.call_later, _RETRY_S, again)

        self._peers.to(buddy).push_recording(rank, generation, profile.encoded(), done)

    def snapshot(self, rank: Rank, step: Step, generation: Generation, profile: Profile, records: bytes) -> None:
        """Every buddy shall hold (rank, step), its payload only if no rank elsewhere keeps the same."""
        self._newest[rank] = step
        for buddy in self._buddies:
            self._push(buddy, rank, step, generation, profile, records)

    def _push(
        self, buddy: NodeId, rank: Rank, step: Step, generation: Generation, profile: Profile, records: bytes
    ) -> None:
        if generation != self._world.generation or self._newest.get(rank, NO_STEP) != step:
            return
        again = functools.partial(self._push, buddy, rank, step, generation, profile, records)
        self._peers.to(buddy).push(
            rank,
            step,
            generation,
            needs_payload(self._world, rank, profile.replicas, self._copies),
            profile.replicas,
            profile.layout_hash,
            records,
            lambda error: self.soon(self._pushed, buddy, rank, step, generation, error, again),
        )

    def _pushed(
        self,
        buddy: NodeId,
        rank: Rank,
        step: Step,
        generation: Generation,
        error: DeadpoolError | None,
        again: Callable[[], None],
    ) -> None:
        if generation != self._world.generation or generation < self._store.generation:
            return
        if isinstance(error, NotHeld | CorruptSnapshot):
            if self._newest.get(rank, NO_STEP) == step:
                self._feed(io.WorkerLost(rank, f"its newest snapshot cannot be read here: {error}"))
            return
        now = self._loop.time()
        if error is None or isinstance(error, InAnotherGeneration):
            self._failing_since.pop(buddy, None)
        elif now - self._failing_since.setdefault(buddy, now) > self._peers.patience_s:
            del self._failing_since[buddy]
            if isinstance(error, TransferFailed):
                self._feed(io.NodeGivenUp(f"it cannot mirror any more: {error}"))
            else:
                self._feed(io.LinkLost(buddy, f"node {self._node} cannot mirror to it: {error}", silent=True))
        if error is not None:
            self._loop.call_later(_RETRY_S, again)  # others may hear it well, and it stays in the job

    def soon(self, function: Callable[..., object], *arguments: object) -> None:
        tasks.soon(self._loop, function, *arguments)
