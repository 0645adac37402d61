"""Path A in a simulated node: what is staged is held and pushed to the buddies.

Rules of this file: the contract of agent/mirroring.py and agent/pushing.py; what an older generation still says is
dropped; a push that fails is tried again while it is the newest of its rank, and what stays impossible for the job's
patience is evidence against that buddy, unless it answers that it is in another generation. What cannot be read here is
evidence against its own rank's process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.io import HoldingsDropped, LinkLost, SnapshotHeld, WorkerLost, WorkerReady
from ..core.placement import buddies_of, needs_payload
from ..core.types import NO_STEP, Generation, Holding, NodeId, Rank, Step, World
from .bulk import Bulk, Unreadable
from .store import Refused, Stale
from .worker import Process

if TYPE_CHECKING:
    from .node import Node

RETRY_S = 0.1


class Mirroring:
    """One node's side of every mirror."""

    def __init__(self, node: Node) -> None:
        self._node, self._copies = node, node.policy.copies
        self.bulk = Bulk(node)
        self._world = World(0, ())
        self._buddies: tuple[NodeId, ...] = ()
        self._newest: dict[Rank, Step] = {}
        self._failing_since: dict[NodeId, float] = {}
        self._strangers = False

    def enter(self, world: World, restore_step: Step | None = None) -> None:
        """Mirror along this world's ring from now on, and let others mirror here in its generation."""
        self._world, self._strangers = world, True
        self._buddies = buddies_of(world, self._node.number, self._copies)
        self._failing_since.clear()
        if restore_step is not None:
            for rank in range(len(world.node_of)):
                self._node.store.drop_newer(rank, restore_step)
        self._node.store.entered = max(self._node.store.entered, world.generation)

    def _replicas(self, rank: Rank) -> tuple[Rank, ...]:
        return self._node.cluster.replicas[rank]

    # -- path A ------------------------------------------------------------------------------------------------

    def rank_ready(self, process: Process) -> None:
        """A rank has reached its first call: its arena."""
        pair = self._node.store.create_own(process.rank)
        if self._node.processes.slots[process.slot].serving is not process:
            return
        process.in_training = True
        self.adopt(process.rank)
        process.hand_over(pair)
        self._node.feed(WorkerReady(process.rank))

    def adopt(self, rank: Rank) -> None:
        self._node.store.recordings.add(rank)
        self._push_recordings(rank)

    def _push_recordings(self, rank: Rank) -> None:
        for buddy in self._buddies:
            self._push_recording(buddy, rank, self._world.generation)

    def _push_recording(self, buddy: NodeId, rank: Rank, generation: Generation) -> None:
        def done(error: Exception | None) -> None:
            if error is not None:
                self._node.timeline.after(RETRY_S, self._node.do, self._push_recording, buddy, rank, generation)

        if generation == self._world.generation:
            self.bulk.push_recording(buddy, rank, generation, done)

    def staged(self, process: Process, step: Step, generation: Generation) -> None:
        """A worker has sealed a slot."""
        rank, node = process.rank, self._node
        try:
            holding = node.store.staged(rank, step, generation, self._replicas(rank))
        except Stale:
            return
        except Refused as error:
            node.feed(WorkerLost(rank, f"its arena is damaged: {error}"))
            return
        node.feed(SnapshotHeld(holding, generation))
        self._snapshot(rank, step, generation)

    def _snapshot(self, rank: Rank, step: Step, generation: Generation) -> None:
        self._newest[rank] = step
        for buddy in self._buddies:
            self._push(buddy, rank, step, generation)

    def _push(self, buddy: NodeId, rank: Rank, step: Step, generation: Generation) -> None:
        if generation != self._world.generation or self._newest.get(rank, NO_STEP) != step:
            return
        replicas = self._replicas(rank)
        payload = needs_payload(self._world, rank, replicas, self._copies)
        self.bulk.push(
            buddy, rank, step, generation, payload, replicas,
            lambda error: self._pushed(buddy, rank, step, generation, error),
        )  # fmt: skip

    def _pushed(self, buddy: NodeId, rank: Rank, step: Step, generation: Generation, error: Exception | None) -> None:
        node = self._node
        if generation != self._world.generation or generation < node.store.fence:
            return
        if isinstance(error, Unreadable):
            if self._newest.get(rank, NO_STEP) == step:
                node.feed(WorkerLost(rank, f"its newest snapshot cannot be read here: {error}"))
            return
        if error is None or isinstance(error, Stale):
            self._failing_since.pop(buddy, None)
        elif node.timeline.now - self._failing_since.setdefault(buddy, node.timeline.now) > node.timing.silent_after_s:
            del self._failing_since[buddy]
            node.feed(LinkLost(buddy, f"node {node.number} cannot mirror to it: {error}", silent=True))
        if error is not None:
            node.timeline.after(RETRY_S, node.do, self._push, buddy, rank, step, generation)

    def committed(self) -> None:
        """All of a step is held along this world's ring: what else is here may go."""
        if not self._strangers:
            return
        self._strangers = False
        node, world = self._node, self._world
        for rank, home in enumerate(world.node_of):
            mirrors = node.number in buddies_of(world, home, self._copies)
            if home != node.number and not mirrors and node.store.holds(rank):
                node.store.release(rank)
                node.feed(HoldingsDropped(rank, NO_STEP))

    # -- a swap ------------------------------------------------------------------------------------------------

    def mirror_again(self, rank: Rank, step: Step, generation: Generation) -> None:
        held = self._node.store.own[rank].get(step)
        paired = held.paired if held is not None else 0
        self._node.feed(SnapshotHeld(Holding(rank, step, True, self._replicas(rank), paired), generation))
        self._push_recordings(rank)
        self._snapshot(rank, step, generation)

    def start_over(self, world: World) -> None:
        for rank in range(len(world.node_of)):
            self._node.store.release(rank)
        self.enter(world)
