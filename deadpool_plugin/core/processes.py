"""This node's own processes: what they hold, how far they are, which stores they offer, which of them are gone.

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
from .events import RankLost
from .messages import NodeFailed, RankFailed, Report
from .placement import held_by
from .policy import Budget
from .types import NO_STEP, Checkpoint, Failure, Generation, Holding, NodeId, Rank, Step, listed

AGAIN_WITHIN_STEPS = 2
"""An error that comes back before more than so many steps were committed is the script's own."""
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
        """Note a verified snapshot. One of an older generation counts only up to the step the world went back to."""
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
        """Withdraw the store at `address`: it is built upon, or gone."""
        before = self.store
        self._offers = {slot: offer for slot, offer in self._offers.items() if offer[1] != address}
        return self.store != before

    def has_lost(self, store: str) -> bool:
        """Return whether `store` was to be built upon next and is gone."""
        return store in self._lost_stores

    def begin_generation(self, restore_step: Step, used_store: str) -> None:
        """Go back to `restore_step`: newer snapshots are of a history that did not happen.

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


class Failures:
    """The processes of ranks that are gone while their node is well, here and on other nodes.

    Each rank's own node counts and judges, within a budget; the coordinator only learns that a swap is due.

    A failure may be forgotten when the next generation is decided. A process that dies
    - before its node promises is named by the promise, and so by the plan;
    - between the promise and Reconfigure may not be named by the plan, but Reconfigure begins a process for every rank
      here that has none. Nothing in the plan depended on the process: step and sources come from snapshots in the
      agents' memory, verified before the promise and frozen since by the fence;
    - after Reconfigure is reported in the new generation, and the next round begins.
    The caller never reports the death of a process that it has replaced, so the two last cases cannot be mixed up. One
    thing does die with a process: the store it offered. If the plan builds upon that, the new generation is stuck from
    the start, and is told so (controller.py). A coordinator that dies takes no failure with it: they are said again
    with every report, and in every promise.
    """

    def __init__(self, context: Context) -> None:
        self._ctx = context
        self._own: dict[Rank, Failure] = {}
        self._others: set[Rank] = set()
        self._restarts = Budget(context.policy.restarts_max, context.policy.restarts_window_s)
        self._raised_at: dict[Rank, Step] = {}

    @property
    def own(self) -> tuple[Failure, ...]:
        return tuple(self._own[rank] for rank in sorted(self._own))

    @property
    def any(self) -> bool:
        """Return whether a rank of a living node has no process."""
        return bool(self._own) or bool(self._others)

    # -- this node ---------------------------------------------------------------------------------------------

    def lost(self, rank: Rank, reason: str) -> bool:
        """Record a process that died by a signal or cannot be brought back. Returns: whether that is news."""
        return self._record(Failure(rank, -1, reason))

    def raised(self, rank: Rank, exit_code: int, reason: str) -> bool:
        """Record a script that ended by itself. Returns: whether that is news.

        Before training, and if it comes back, the error would do so on any node: the job ends. Not while a swap is
        under way: others may be in the next generation already, whose verdict this is not.
        """
        ctx = self._ctx
        code = exit_code or 1
        what = f"script of rank {rank} on node {ctx.node} ended with {exit_code}: {reason}"
        before = self._raised_at.get(rank)
        if not ctx.swapping and not ctx.has_trained:
            ctx.stop(what, code)
            return False
        if not ctx.swapping and before is not None and ctx.newest_committed - before <= AGAIN_WITHIN_STEPS:
            others = listed(sorted(ctx.unproven - {rank}))
            new = f"; rank(s) {others} run in new processes: do these issue other collectives?" if others else ""
            ctx.stop(f"{what} (its process before that one failed after step {before}, too{new})", code)
            return False
        self._raised_at[rank] = ctx.newest_committed
        return self._record(Failure(rank, code, what))

    def _record(self, failure: Failure) -> bool:
        ctx, rank = self._ctx, failure.rank
        if not ctx.formed:
            self.give_up(f"rank {rank} was lost before the world had formed: {failure.reason}")
            return False
        if rank not in ctx.world.ranks_of(ctx.node) or rank in self._own:
            return False
        if not self._restarts.spend(rank, ctx.now):
            often = f"more than {self._restarts} on this node (restarts_max, restarts_window_s)"
            self.give_up(f"rank {rank} was lost {often}: {failure.reason}")
            return False
        self._own[rank] = failure
        ctx.emit(RankLost(rank, failure.reason))
        return True

    def give_up(self, reason: str) -> None:
        """Leave, and have the others replace this node at once: it cannot go on."""
        ctx = self._ctx
        others = [node for node in ctx.living if node != ctx.node]
        if ctx.formed and not others:
            ctx.stop(f"the only node is lost: {reason}", lost_ranks=tuple(range(len(ctx.world.node_of))))
            return
        for node in others:
            ctx.send(node, NodeFailed(ctx.world.generation, ctx.node, reason))
        ctx.fence(reason)

    def say(self) -> None:
        """Tell the coordinator (again: it may be another one now)."""
        ctx = self._ctx
        for failure in self.own:
            ctx.send(ctx.coordinator, RankFailed(ctx.world.generation, failure))

    # -- others ------------------------------------------------------------------------------------------------

    def hear(self, sender: NodeId, message: RankFailed) -> None:
        world, rank = self._ctx.world, message.failure.rank
        if message.generation == world.generation and rank in world.ranks_of(sender) and sender != self._ctx.node:
            self._others.add(rank)

    def begin_generation(self) -> None:
        """Forget all failures: Reconfigure replaces every dead process of this node."""
        self._others.clear()
        self._own.clear()


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
