"""This node's own processes: what they hold, how far they are, which stores they offer.

Rules of this file: what the coordinator must hear of is noted in the context; what a plan depends on goes into the
promise if it is too late for a report. May import everything of core but the controller and coordination.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from .api import (
    CheckpointSaved,
    ConnectionBroke,
    HoldingsDropped,
    Input,
    RecordsDropped,
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
from .messages import Report
from .placement import held_by
from .types import NO_STEP, Checkpoint, Generation, Holding, Rank, Step

STORE_GONE = "the process whose store the groups were to be built over is gone"


class Inventory:
    """This node's side of the ledger: the contents of its Reports and Promises.

    Every method answers whether anything changed, so that a Report is sent on change and not otherwise.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Rank, Step], Holding] = {}
        self._floor: Step = NO_STEP
        self.ready: set[Rank] = set()
        self.finished: set[Rank] = set()
        self.moves = 0
        """How often a process has got on."""
        self.rehearsed: dict[int, Rank] = {}
        self.able = False
        """All that this node was told to rehearse is rehearsed, and nothing has failed since."""
        self.unable = ""
        """Why it could not take over, "" if nothing speaks against it."""
        self.pruned = False
        """Records of the first steps of a rank of this node are dropped."""
        self._offers: dict[int, tuple[bool, str]] = {}
        """Each local slot's store, and whether its process runs a rank; the newest last."""
        self._lost_stores: set[str] = set()

    @property
    def holdings(self) -> tuple[Holding, ...]:
        return tuple(self._held[key] for key in sorted(self._held))

    def held(self, holding: Holding, generation: Generation, current: Generation) -> bool:
        """A verified snapshot. One of an older generation counts only up to the step the world went back to."""
        if generation != current and not (generation < current and holding.step <= self._floor):
            return False
        key = (holding.rank, holding.step)
        if self._held.get(key) == holding:
            return False
        self._held[key] = holding
        for rank, step in list(self._held):
            if rank == holding.rank and step < holding.step - 1:
                del self._held[rank, step]
        return True

    def has_all(self, ranks: Iterable[Rank], step: Step) -> bool:
        return all((rank, step) in self._held for rank in ranks)

    def dropped(self, rank: Rank, newer_than: Step) -> bool:
        stale = [key for key in self._held if key[0] == rank and key[1] > newer_than]
        for key in stale:
            del self._held[key]
        return bool(stale)

    @property
    def store(self) -> str:
        """The one to build upon next, "" if there is none: the newest, and of a process that runs a rank if any is."""
        offers = [address for runs, address in self._offers.values() if runs] or [a for _, a in self._offers.values()]
        return offers[-1] if offers else ""

    def offer(self, address: str, local_slot: int, stand_in: bool) -> bool:
        before = self.store
        self._offers.pop(local_slot, None)
        self._offers[local_slot] = (not stand_in, address)
        return self.store != before

    def lose_store(self, address: str) -> bool:
        self._lost_stores.add(address)
        return self.consume(address)

    def consume(self, address: str) -> bool:
        """The store at `address` is built upon (or gone): nobody else may."""
        before = self.store
        self._offers = {slot: offer for slot, offer in self._offers.items() if offer[1] != address}
        return self.store != before

    def has_lost(self, store: str) -> bool:
        """Return whether `store` was to be built upon next and is gone."""
        return store in self._lost_stores

    def begin_generation(self, restore_step: Step, used_store: str) -> None:
        """The world went back to `restore_step`: newer snapshots are of a history that did not happen.

        Ranks are ready and finished again only when they say so again in the new generation. Where the script begins
        again every process is a new one, and so is its store.
        """
        self._floor = restore_step
        self._held = {key: holding for key, holding in self._held.items() if key[1] <= restore_step}
        self.ready.clear()
        self.finished.clear()
        self.moves = 0
        if restore_step == NO_STEP:
            self._offers.clear()
        self.consume(used_store)
        self._lost_stores.clear()

    def fill(self, report: Report) -> Report:
        """`report` with what this node holds and has reached."""
        return msgspec.structs.replace(
            report,
            holdings=self.holdings,
            ready=tuple(sorted(self.ready)),
            rehearsed=tuple(sorted(self.rehearsed.items())),
            finished=tuple(sorted(self.finished)),
            store=self.store,
            moved=self.moves,
            able=self.able,
            unable=self.unable,
            pruned=self.pruned,
        )


class Processes:
    """The inputs from this node's processes."""

    def __init__(self, context: Context, inventory: Inventory, failures: Failures) -> None:
        self._ctx, self._inventory, self._failures = context, inventory, failures
        self._to_hold: frozenset[Rank] = frozenset()

    def begin_generation(self) -> None:
        ctx = self._ctx
        self._to_hold = held_by(ctx.world, ctx.node, ctx.policy.copies)

    def take_in(self, event: Input) -> bool:
        """Note what the coordinator must hear of. Returns: whether a promise that was made says too little now."""
        ctx, inventory = self._ctx, self._inventory
        match event:
            case SnapshotHeld(holding, generation):
                if inventory.held(holding, generation, ctx.world.generation):
                    # A step is committed once every node has all of it, so one's own part is told when it is complete.
                    ctx.note(inventory.has_all(self._to_hold, holding.step))
            case WorkerMoved():
                inventory.moves += 1  # the next report will say so
            case HoldingsDropped(rank, newer_than):
                ctx.note(inventory.dropped(rank, newer_than))
            case WorkerReady(rank):
                if ctx.begins_at_top:
                    self._add(rank, inventory.ready)
            case WorkerRestored(rank, generation):
                if generation == ctx.world.generation and not ctx.swapping:
                    self._add(rank, inventory.ready)
            case WorkerFinished(rank):
                self._add(rank, inventory.finished)
            case CheckpointSaved(step, path, whole):
                ctx.note(ctx.learn_checkpoint(Checkpoint(whole, step, path)))
            case RecordsDropped():
                ctx.note(not inventory.pruned)
                inventory.pruned = True
            case ConnectionBroke():
                self._connection_broke(event)
            case WorkerLost(rank, reason):
                return self._must_say(self._failures.lost(rank, reason))
            case WorkerFailed(rank, exit_code, reason):
                return self._must_say(self._failures.raised(rank, exit_code, reason))
            case StoreOffered(address, local_slot, stand_in):
                return self._must_say(inventory.offer(address, local_slot, stand_in))
            case StoreLost(address):
                new = self._must_say(inventory.lose_store(address))
                # One that nobody has built upon yet is an offer less; without the one we build upon nobody gets on.
                if ctx.plan is not None and address == ctx.plan.store and not (ctx.training or ctx.swapping):
                    ctx.get_stuck(STORE_GONE)
                return new
        return False

    def _add(self, rank: Rank, ranks: set[Rank]) -> None:
        self._ctx.note(rank not in ranks)
        ranks.add(rank)

    def _must_say(self, new: bool) -> bool:
        self._ctx.note(new)
        return new

    def _connection_broke(self, event: ConnectionBroke) -> None:
        """Interrupt all: it is never the script's error, and the processes of the generation are well."""
        ctx = self._ctx
        if event.generation == ctx.world.generation and not (ctx.swapping or ctx.broken):
            ends = {ctx.world.node_of[rank] for rank in event.peers}
            reason = f"a training connection of rank {event.rank} broke, and no host is lost: {event.reason}"
            ctx.get_stuck(reason, tuple(ends) if len(ends) == 1 else (ctx.node,))
