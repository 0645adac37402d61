"""This node's own processes: what they hold, how far they are, which stores they offer, which of them are gone.

Rules of this file: what the coordinator must hear of is noted in the context; what a plan depends on goes into the
promise if it is too late for a report. Each node counts and judges the failures of its own ranks, within a budget; the
coordinator only learns that a swap is due.

A failure may be forgotten when the next generation is decided. A process that dies
- before its node promises is named by the promise, and so by the plan;
- between the promise and Reconfigure is replaced by Reconfigure, as every rank here that has none. The plan did not
  depend on it: snapshots are in the agents' memory, verified before the promise and frozen since by the fence;
- after Reconfigure is reported in the new generation, and the next round begins.
One thing does die with a process: the store it offered. If the plan builds upon that, the new generation is stuck from
the start.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from . import api, local
from .context import Context
from .events import RankLost
from .messages import RankFailed, Report
from .placement import held_by
from .policy import Budget
from .spares import Rehearsing
from .types import NEVER, NO_STEP, Checkpoint, Failure, Generation, Holding, NodeId, Rank, Step, Suspicion, listed

AGAIN_WITHIN_STEPS = 2  # an error that comes back before more steps (snapshots, if apart) were committed is the same
RAISES_MAX = 3  # of a script in a row, first and second on one host, third on another: then the error is its own
STORE_GONE = "the process whose store the groups were to be built over is gone"


class Processes:
    """The processes of this node, and the ranks elsewhere that have none."""

    def __init__(self, context: Context) -> None:
        self._ctx = context
        self.rehearsing = Rehearsing(context)
        self._held: dict[tuple[Rank, Step], Holding] = {}
        self._to_hold: frozenset[Rank] = frozenset()
        self._floor: Step = NO_STEP  # the step the world went back to last
        self._ready: set[Rank] = set()
        self._finished: set[Rank] = set()
        self._moves = 0  # how often a process has got on
        self._took_steps: dict[Rank, float] = {}  # how many steps the newest mirroring took that each rank knows of
        self._most: dict[Rank, int] = {}  # how many steps snapshots may be apart, by the memory of each rank
        self._wanted, self._passed = set[Step](), set[Step]()
        self._stored = self._stored_or_left = NO_STEP  # the newest step that this node has written to disk, or left out
        self._read = False  # the files of an earlier job, from which this one is resumed
        self._pruned = False  # records of the first steps of a rank of this node are dropped
        self._offers: dict[int, tuple[bool, str]] = {}  # whether a slot's process runs a rank, its store; newest last
        self._lost_stores: set[str] = set()
        self.gone: dict[Rank, Failure] = {}
        self._gone_elsewhere: set[Rank] = set()
        policy, storm_s = context.policy, context.timing.slow_after_s
        self._restarts = Budget(policy.restarts_max, policy.restarts_window_s, storm_s)
        self._suspicions: dict[Rank, Suspicion] = {}  # of all ranks, as decided, and newer ones of this node's

    @property
    def holdings(self) -> tuple[Holding, ...]:
        return tuple(map(self._held.__getitem__, sorted(self._held)))

    @property
    def store(self) -> str:
        """The one to build upon next, "" if there is none: the newest, and of a process that runs a rank if any is."""
        offers = [address for runs, address in self._offers.values() if runs] or [a for _, a in self._offers.values()]
        return offers[-1] if offers else ""

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(self.gone[rank] for rank in sorted(self.gone))

    @property
    def any_gone(self) -> bool:
        return bool(self.gone or self._gone_elsewhere)

    def report(self) -> None:
        """Tell the coordinator; while fenced only that this node lives (its promise says the rest)."""
        ctx = self._ctx
        report = Report(
            ctx.world.generation,
            checkpoint=ctx.checkpoint,
            stuck=ctx.stuck,
            sent_at=ctx.now,
            heard=ctx.echo[1] if ctx.echo[0] == ctx.coordinator else NEVER,
            broken=ctx.broken,
        )
        if not ctx.swapping:
            report = msgspec.structs.replace(
                report,
                holdings=self.holdings,
                ready=tuple(sorted(self._ready)),
                rehearsed=tuple(sorted(self.rehearsing.rehearsed)),
                finished=tuple(sorted(self._finished)),
                store=self.store,
                moved=self._moves,
                able=self.rehearsing.able,
                unable=self.rehearsing.unable,
                pruned=self._pruned,
                took_steps=max(self._took_steps.values(), default=0.0),
                most=min(self._most.values(), default=0),
                wanted=tuple(sorted(step for step in self._wanted if step > ctx.committed)),
                passed=tuple(sorted(step for step in self._passed if step > ctx.committed)),
                stored=self._stored,
                stored_or_left=self._stored_or_left,
                read=self._read,
            )
        ctx.send(ctx.coordinator, report)
        for failure in () if ctx.swapping else self.failures:
            ctx.send(ctx.coordinator, RankFailed(ctx.world.generation, failure))

    def take_in(self, event: api.Input) -> bool:
        """Note what the coordinator must hear of. Returns: whether a promise that was made says too little now."""
        ctx = self._ctx
        match event:
            case api.SnapshotHeld(holding, generation, older, took_steps, most):
                if took_steps:
                    self._took_steps[holding.rank] = took_steps
                if most:
                    self._most[holding.rank] = most
                if self._hold(holding, generation, older):
                    # A step is committed once every node has all of it, so one's own part is told when it is complete.
                    ctx.note(all((rank, holding.step) in self._held for rank in self._to_hold))
            case local.WorkerMoved():
                self._moves += 1  # the next report will say so
            case api.HoldingsDropped(rank, newer_than):
                kept = {key: one for key, one in self._held.items() if key[0] != rank or key[1] <= newer_than}
                ctx.note(len(kept) < len(self._held))
                self._held = kept
            case api.WorkerReady(rank) if ctx.begins_at_top:
                self._reach(self._ready, rank)
            case local.WorkerRestored(rank, generation):
                if generation == ctx.world.generation and not ctx.swapping:
                    self._reach(self._ready, rank)
            case local.WorkerFinished(rank):
                self._reach(self._finished, rank)
            case local.Wanted() | local.Passed():
                steps = self._wanted if isinstance(event, local.Wanted) else self._passed
                if event.generation == ctx.world.generation and not ctx.swapping:
                    ctx.note(event.step not in steps)
                    steps.add(event.step)
            case local.CheckpointSaved(step, path, whole):
                ctx.note(ctx.learn_checkpoint(Checkpoint(whole, step, path)))
            case api.StepWritten(step, generation, well) if generation == ctx.world.generation:
                ctx.note()
                self._stored_or_left = step
                self._stored = step if well else self._stored
            case api.FilesRead():
                ctx.note(not self._read)
                self._read = True
            case api.RecordsDropped():
                ctx.note(not self._pruned)
                self._pruned = True
            case local.ConnectionBroke(rank, generation, peers, reason):
                # It is never the script's error, and the processes of the generation are well: all are interrupted.
                if generation == ctx.world.generation and not (ctx.swapping or ctx.broken):
                    ends = {ctx.world.node_of[peer] for peer in peers}
                    what = f"a training connection of rank {rank} broke, and no host is lost: {reason}"
                    ctx.get_stuck(what, tuple(ends) if len(ends) == 1 else (ctx.node,))
            case (
                api.SpareRehearsed() | api.SpareFailed() | api.SpareUnable() | api.SpareDropped() | api.SpareFull()
                | api.SpareShort()
            ):  # fmt: skip
                self.rehearsing.take_in(event)
            case api.WorkerLost(rank, reason):
                return self._lose(Failure(rank, -1, reason))
            case api.WorkerFailed(rank, exit_code, reason):
                return self._raise(rank, exit_code, reason)
            case api.StoreOffered(address, local_slot, stand_in):
                before = self.store
                self._offers.pop(local_slot, None)
                self._offers[local_slot] = (not stand_in, address)
                return ctx.note(self.store != before)
            case api.StoreLost(address):
                before = self.store
                self._lost_stores.add(address)
                self.consume(address)
                # One that nobody has built upon yet is an offer less; without the one we build upon nobody gets on.
                if ctx.plan is not None and address == ctx.plan.store and not (ctx.training or ctx.swapping):
                    ctx.get_stuck(STORE_GONE)
                return ctx.note(self.store != before)
        return False

    def _hold(self, holding: Holding, generation: Generation, before: Step) -> bool:
        """Note a verified snapshot. One of an older generation counts only up to the step the world went back to."""
        key, current = (holding.rank, holding.step), self._ctx.world.generation
        if generation != current and not (generation < current and holding.step <= self._floor):
            return False
        if self._held.get(key) == holding:
            return False
        self._held[key] = holding
        for rank, step in list(self._held):
            if rank == holding.rank and step < holding.step and step != before:
                del self._held[rank, step]
        return True

    def _reach(self, ranks: set[Rank], rank: Rank) -> None:
        self._ctx.note(rank not in ranks)
        ranks.add(rank)

    def suspicions(self, failed: Iterable[Failure] = ()) -> dict[Rank, Suspicion]:
        """Those that count still, and those of scripts that have just `failed`. A rank that has got further since has
        met another error."""
        newest = self._ctx.newest_committed
        within = AGAIN_WITHIN_STEPS * self._ctx.every
        found = {rank: one for rank, one in self._suspicions.items() if newest - one.step <= within}
        return found | {one.rank: Suspicion(one.rank, one.raises, newest) for one in failed if one.raises}

    def _raise(self, rank: Rank, exit_code: int, reason: str) -> bool:
        """Take in an error of the script, which ends the job before training, or if it came back here and elsewhere.

        Returns: whether a promise that was made says too little now.
        """
        if rank in self.gone:
            return False
        ctx, before = self._ctx, self.suspicions().get(rank)
        failure = Failure(rank, exit_code, reason, before.raises + 1 if before is not None else 1)
        # While a swap is under way others may be in the next generation already, whose verdict this is not.
        if not ctx.swapping and not ctx.has_trained:
            ctx.stop(self._told(failure), exit_code)
        elif not ctx.swapping and failure.raises >= RAISES_MAX:
            self.blame(failure)
        else:
            self._suspicions[rank] = Suspicion(rank, failure.raises, ctx.newest_committed)
            return self._lose(failure)
        return False

    def _told(self, failure: Failure) -> str:
        node = self._ctx.world.node_of[failure.rank] if self._ctx.formed else self._ctx.node
        return f"script of rank {failure.rank} on node {node} ended with {failure.exit_code}: {failure.reason}"

    def blame(self, failure: Failure) -> None:
        """End the job for an error of the script that has come back too often."""
        others = listed(sorted(self._ctx.unproven - {failure.rank}))
        new = f"; rank(s) {others} run in new processes: do these issue other collectives?" if others else ""
        again = f"{failure.raises} processes in a row, the last one on another host if a spare was there"
        self._ctx.stop(f"{self._told(failure)} ({again}{new})", failure.exit_code)

    def _lose(self, failure: Failure) -> bool:
        """Record that a process is gone. Returns: whether that is news."""
        ctx, rank = self._ctx, failure.rank
        if not ctx.formed:
            ctx.resign(f"rank {rank} was lost before the world had formed: {failure.reason}")
        elif rank not in ctx.world.ranks_of(ctx.node) or rank in self.gone:
            return False
        elif not self._restarts.spend(rank, ctx.now):
            often = f"more than {self._restarts} on this node (restarts_max, restarts_window_s)"
            if failure.raises:  # the error may follow the rank to the host that takes it
                ctx.broadcast(RankFailed(ctx.world.generation, failure))
            ctx.resign(f"rank {rank} was lost {often}: {failure.reason}")
        else:
            self.gone[rank] = failure
            ctx.emit(RankLost(rank, self._told(failure) if failure.raises else failure.reason))
            return ctx.note(True)
        return False

    def hear_gone(self, sender: NodeId, message: RankFailed) -> None:
        world, rank = self._ctx.world, message.failure.rank
        if message.generation == world.generation and rank in world.ranks_of(sender) and sender != self._ctx.node:
            self._gone_elsewhere.add(rank)
            if message.failure.raises:
                self._suspicions[rank] = Suspicion(rank, message.failure.raises, self._ctx.newest_committed)

    def consume(self, store: str) -> None:
        """Withdraw a store: it is built upon, or gone."""
        self._offers = {slot: offer for slot, offer in self._offers.items() if offer[1] != store}

    def begin_generation(self) -> None:
        """Go back to the restore step: newer snapshots are of a history that did not happen."""
        ctx, plan = self._ctx, self._ctx.plan
        self._to_hold = held_by(ctx.world, ctx.node, ctx.policy.copies)
        if plan is None:
            return
        if plan.store in self._lost_stores:
            ctx.get_stuck(STORE_GONE)
        self._floor, self._stored, self._stored_or_left = plan.restore_step, NO_STEP, NO_STEP
        for one in plan.suspicions:  # what this node knows of its own ranks may be newer
            known = self._suspicions.get(one.rank)
            if known is None or (known.step, known.raises) < (one.step, one.raises):
                self._suspicions[one.rank] = one
        self._held = {key: holding for key, holding in self._held.items() if key[1] <= plan.restore_step}
        self._moves = 0
        self._took_steps.clear()
        self._most.clear()
        if ctx.begins_at_top:
            self._offers.clear()  # every process is a new one
        self.consume(plan.store)
        # Reconfigure replaces the dead processes; ranks are ready and finished again only when they say so again.
        of_the_old_one = self._ready, self._finished, self._lost_stores, self.gone, self._gone_elsewhere
        for each in (*of_the_old_one, self._wanted, self._passed):
            each.clear()
        self.rehearsing.begin_generation()
