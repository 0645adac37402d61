"""Processes of ranks that are gone while their node is well: replaced in place, within a budget.

Rules of this file: each rank's own node counts and judges; the coordinator only learns that a swap is due.

Why a failure may be forgotten when the next generation is decided. A process can die
- before its node promises: the promise names it, and so does the plan;
- after the promise and before the node carries out Reconfigure: the plan may not name it, but Reconfigure begins a
  process for every rank here that has none, so it heals this death too. Nothing in the plan depended on the process:
  step and sources come from snapshots in the agents' memory, verified before the promise and frozen since by the fence;
- after Reconfigure: then it is reported in the new generation, and the next round begins.
The caller reports a death when it notices it and never of a process it has replaced, so the two last cases cannot be
mixed up. One thing does die with a process: the store it offered. If the plan builds upon that, the new generation is
stuck from the start, and is told to be so (controller.py).
A coordinator that dies takes no failure with it: they are said again with every report, and in every promise.

May import everything of core but the controller's other parts.
"""

from __future__ import annotations

from .context import Context
from .events import RankLost
from .messages import NodeFailed, RankFailed
from .policy import Budget
from .types import Failure, NodeId, Rank, Step, listed

AGAIN_WITHIN_STEPS = 2
"""An error that comes back before more than so many steps were committed is the script's own."""


class Failures:
    """The failures of one node's ranks, and what it knows of the others' in this generation."""

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
        """A process died by a signal or cannot be brought back. Returns: whether there is something new to say."""
        return self._record(Failure(rank, -1, reason))

    def raised(self, rank: Rank, exit_code: int, reason: str) -> bool:
        """A script ended by itself. Before training, and if it comes back, it would do so on any node: the job ends;
        not while a swap is under way, as others may be in the next generation already, whose verdict this is not."""
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
        """This node cannot go on: the others shall replace it, at once."""
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
        """Reconfigure replaces every dead process of this node."""
        self._others.clear()
        self._own.clear()
