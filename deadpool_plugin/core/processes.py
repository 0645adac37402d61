"""Inputs from this node's own processes: ranks that are ready, snapshots, stores, deaths.

Rules of this file: what the coordinator must hear of is noted in the context; what a plan depends on goes into the
promise if it is too late for a report. May import everything of core but the controller and coordination.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .api import (
    CheckpointSaved,
    ConnectionBroke,
    HoldingsDropped,
    Input,
    SnapshotHeld,
    StoreLost,
    StoreOffered,
    WorkerFailed,
    WorkerFinished,
    WorkerLost,
    WorkerMoved,
    WorkerReady,
    WorkerRestored,
)
from .context import Context
from .failures import Failures
from .inventory import Inventory
from .placement import held_by
from .swaps import Swaps
from .types import Checkpoint

STORE_GONE = "the process whose store the groups were to be built over is gone"


class Processes:
    """One method an input; a new object for each generation."""

    def __init__(self, context: Context, inventory: Inventory, failures: Failures, swaps: Swaps) -> None:
        self._ctx, self._inventory, self._failures, self._swaps = context, inventory, failures, swaps
        self._to_hold = held_by(context.world, context.node, context.policy.copies)

    # -- ranks -------------------------------------------------------------------------------------------------

    def ready(self, event: WorkerReady) -> None:
        ctx = self._ctx
        if ctx.begins_at_top:
            ctx.note(self._inventory.ready(event.rank))

    def restored(self, event: WorkerRestored) -> None:
        ctx = self._ctx
        if event.generation == ctx.world.generation and not ctx.swapping:
            ctx.note(self._inventory.ready(event.rank))

    def moved(self, event: WorkerMoved) -> None:
        self._inventory.moved()

    def connection_broke(self, event: ConnectionBroke) -> None:
        """Never the script's error: the generation is stuck, and its processes are well."""
        ctx = self._ctx
        if event.generation != ctx.world.generation or ctx.swapping or ctx.broken:
            return
        ends = {ctx.world.node_of[rank] for rank in event.peers}
        ctx.broken = tuple(ends) if len(ends) == 1 else (ctx.node,)
        ctx.get_stuck(f"a training connection of rank {event.rank} broke, and no host is lost: {event.reason}")

    def finished(self, event: WorkerFinished) -> None:
        self._ctx.note(self._inventory.finished(event.rank))

    def lost(self, event: WorkerLost) -> None:
        self._must_say(self._failures.lost(event.rank, event.reason))

    def failed(self, event: WorkerFailed) -> None:
        self._must_say(self._failures.raised(event.rank, event.exit_code, event.reason))

    # -- what is kept ------------------------------------------------------------------------------------------

    def held(self, event: SnapshotHeld) -> None:
        """A step is committed once every node has all of it, so one's own part is told when it is complete."""
        if self._inventory.held(event.holding, event.generation, self._ctx.world.generation):
            self._ctx.note(self._inventory.has_all(self._to_hold, event.holding.step))

    def dropped(self, event: HoldingsDropped) -> None:
        self._ctx.note(self._inventory.dropped(event.rank, event.newer_than))

    def saved(self, event: CheckpointSaved) -> None:
        ctx = self._ctx
        newest = max(ctx.checkpoint, Checkpoint(event.whole, event.step, event.path))
        ctx.note(newest != ctx.checkpoint)
        ctx.checkpoint = newest

    # -- stores ------------------------------------------------------------------------------------------------

    def store_offered(self, event: StoreOffered) -> None:
        self._must_say(self._inventory.offer(event.address, event.local_slot, event.stand_in))

    def store_lost(self, event: StoreLost) -> None:
        """A store nobody has built upon yet is one offer less; without the one we build upon nobody gets anywhere."""
        ctx = self._ctx
        self._must_say(self._inventory.lose_store(event.address))
        if ctx.plan is not None and event.address == ctx.plan.store and not (ctx.training or ctx.swapping):
            ctx.get_stuck(STORE_GONE)

    def _must_say(self, new: bool) -> None:
        """Something a plan depends on: say so, in the promise if it is too late for a report."""
        self._ctx.note(new)
        if new and self._ctx.swapping:
            self._swaps.voter.answer()


SAYS: Mapping[type[Input], Callable[[Processes, Any], None]] = {
    WorkerReady: Processes.ready,
    WorkerRestored: Processes.restored,
    WorkerMoved: Processes.moved,
    ConnectionBroke: Processes.connection_broke,
    WorkerFinished: Processes.finished,
    WorkerLost: Processes.lost,
    WorkerFailed: Processes.failed,
    SnapshotHeld: Processes.held,
    HoldingsDropped: Processes.dropped,
    CheckpointSaved: Processes.saved,
    StoreOffered: Processes.store_offered,
    StoreLost: Processes.store_lost,
}
