"""This node's snapshots and recordings on their way to its buddies.

Rules of this file: every buddy is served on its own; a push that fails is tried again while it is the newest of its
rank; what stays impossible for the job's patience is evidence against that buddy, unless it answers that it is in
another generation: then it lives, and a swap is under way. A snapshot that cannot be read here is evidence against its
own rank's process, a transfer that this node itself cannot carry out against this node. Answers of older worlds are
dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..core import api
from ..core.placement import buddies_of, needs_payload
from ..core.types import Generation, NodeId, Rank, Step, World
from ..errors import DeadpoolError
from ..mirror.peer import SnapshotPush, TransferFailed
from ..mirror.records import NotHeld
from ..mirror.store import CorruptSnapshot
from ..mirror.wire import InAnotherGeneration
from ..transport.tasks import Tasks, loop_time
from .host import Host
from .profile import Profile

_RETRY_S = 0.1


class Pushes:
    """Thread: the event loop's only."""

    def __init__(
        self, node: NodeId, copies: int, host: Host, patience_s: float, feed: Callable[[api.Input], None]
    ) -> None:
        self._node, self._copies, self._host = node, copies, host
        self._patience_s, self._feed = patience_s, feed
        self._world = World(0, ())
        self._buddies: tuple[NodeId, ...] = ()
        self._failing_since: dict[NodeId, float] = {}
        self._newest: dict[Rank, Step] = {}
        self._tasks = Tasks()

    def enter(self, world: World) -> None:
        """A new world: push along its ring from now on."""
        self._world = world
        self._buddies = buddies_of(world, self._node, self._copies)
        self._failing_since.clear()

    def recording(self, rank: Rank, profile: Profile) -> None:
        """Every buddy shall hold what a stand-in for `rank` must know."""
        for buddy in self._buddies:
            self._tasks.start(self._push_recording(buddy, rank, self._world.generation, profile))

    async def _push_recording(self, buddy: NodeId, rank: Rank, generation: Generation, profile: Profile) -> None:
        while generation == self._world.generation:
            try:
                await self._host.bulk.push_recording(buddy, rank, generation, profile.encoded())
                return
            except DeadpoolError:
                await asyncio.sleep(_RETRY_S)

    def snapshot(self, rank: Rank, step: Step, generation: Generation, profile: Profile, records: bytes) -> None:
        """Every buddy shall hold (rank, step), its payload only if no rank elsewhere keeps the same."""
        self._newest[rank] = step
        for buddy in self._buddies:
            self._tasks.start(self._push(buddy, rank, step, generation, profile, records))

    async def _push(
        self, buddy: NodeId, rank: Rank, step: Step, generation: Generation, profile: Profile, records: bytes
    ) -> None:
        while generation == self._world.generation and self._newest[rank] == step:
            with_payload = needs_payload(self._world, rank, profile.replicas, self._copies)
            error: DeadpoolError | None = None
            try:
                await self._host.bulk.push(
                    buddy,
                    SnapshotPush(rank, step, generation, with_payload, profile.replicas, profile.layout_hash, records),
                )
            except DeadpoolError as failure:
                error = failure
            if not self._goes_on(buddy, rank, step, generation, error):
                return
            await asyncio.sleep(_RETRY_S)  # others may hear it well, and it stays in the job

    def _goes_on(
        self, buddy: NodeId, rank: Rank, step: Step, generation: Generation, error: DeadpoolError | None
    ) -> bool:
        """Judge how a push has ended; True if it is to be tried again."""
        if generation != self._world.generation or generation < self._host.store.generation:
            return False
        if isinstance(error, NotHeld | CorruptSnapshot):
            if self._newest[rank] == step:
                self._feed(api.WorkerLost(rank, f"its newest snapshot cannot be read here: {error}"))
            return False
        now = loop_time()
        if error is None or isinstance(error, InAnotherGeneration):
            self._failing_since.pop(buddy, None)
        elif now - self._failing_since.setdefault(buddy, now) > self._patience_s:
            del self._failing_since[buddy]
            if isinstance(error, TransferFailed):
                self._feed(api.NodeGivenUp(f"it cannot mirror any more: {error}"))
            else:
                self._feed(api.LinkLost(buddy, f"node {self._node} cannot mirror to it: {error}", silent=True))
        return error is not None
