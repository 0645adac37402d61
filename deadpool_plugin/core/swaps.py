"""When a swap is due: a node is lost, a rank has no process, a host wants to join.

Rules of this file: the lowest living member proposes, everybody else tells it what it knows; below a majority nobody
proposes. Once this generation is fenced it must come to an end, whatever has become of the reason. A loss that the plan
does not cover is the next generation's. proposer.py and voter.py do the rest.
May import everything of core but the controller and coordination.
"""

from __future__ import annotations

from collections.abc import Mapping

from .context import Context
from .events import NodeLost, Note
from .messages import NodeFailed, Report
from .pairing import Pairing
from .processes import Failures, Inventory
from .proposer import Proposer, described
from .types import NEVER, NodeId
from .voter import Voter


class Swaps:
    """The swap out of one generation, if there is one; a new object for each generation."""

    def __init__(self, context: Context, inventory: Inventory, failures: Failures, pairing: Pairing) -> None:
        self._ctx, self._failures, self._pairing = context, failures, pairing
        self.voter = Voter(context, inventory, failures)
        self.proposer = Proposer(context, self.voter.acceptor)
        self._announced: set[NodeId] = set()
        self._told: set[tuple[NodeId, NodeId]] = set()
        self._is_stuck = False
        self._asked_at = NEVER

    def stuck(self, node: NodeId, reason: str) -> None:
        """Note what `node` says: this generation cannot go on as it is."""
        if not self._is_stuck:
            self._is_stuck = True
            self._ctx.emit(Note(f"node {node}: {reason}"))

    def react(self) -> bool:
        """Act on what is known. Safe to call at any time; does something once per new piece of evidence.

        Returns: whether this node may have come into another phase by it.
        """
        ctx, suspects = self._ctx, self._ctx.suspects
        if suspects and not ctx.can_decide_without(suspects):
            self._without_quorum(suspects)
            return True
        self._asked_at = NEVER
        if not ctx.leads:
            if suspects:
                self._tell(suspects)
            return False
        if not self._is_due(suspects):
            return self.proposer.reconsider()
        self._announce(suspects)
        if ctx.unproven:  # a process that complains may have been answered by one that issues something else
            self._pairing.ask()
        self.proposer.begin_round(suspects)
        return True

    def _is_due(self, suspects: Mapping[NodeId, str]) -> bool:
        ctx, proposal = self._ctx, self.proposer.proposal
        if ctx.now < self.proposer.retry_at:
            return False
        if proposal is not None:
            return proposal.is_outdated(suspects)
        if not suspects:
            due = self._failures.any or self._is_stuck or ctx.swapping
            return due or (ctx.training and bool(ctx.joinable))
        if not all(ctx.is_silent(node) for node in suspects):
            return True
        # If others fall silent too it may be this node that hears nobody, and whoever it asks to go on without the
        # silent ones makes them leave.
        return not any(ctx.watch.is_late(node, ctx.now) for node in ctx.living if node != ctx.node)

    def _without_quorum(self, suspects: Mapping[NodeId, str]) -> None:
        """Ask whether others know of a newer generation, and end alone if not: they may see it otherwise and go on."""
        ctx, accepted = self._ctx, self.voter.acceptor.accepted
        living, members = ctx.living, ctx.world.members
        # Whoever decided it may have died before it told all; the hosts that our accepted plan takes in may know, too.
        may_know = (*living, *(accepted[1].joined if accepted is not None else ()))
        others = [node for node in may_know if node != ctx.node and node not in ctx.watch.evidence]
        if others and self._asked_at == NEVER:
            self._asked_at = ctx.now
            for node in others:
                ctx.send(node, Report(ctx.world.generation))
        if others and ctx.now - self._asked_at < ctx.timing.silent_after_s:
            if not all(ctx.is_silent(node) for node in suspects):
                self.voter.fence_generation()  # the others need not have waited for a lease
            return
        what = f"{described(suspects)}; {len(living)} of {len(members)} members are left and cannot decide alone"
        self._announce(suspects)
        if 2 * len(living) < len(members):
            ctx.fence(what)
        else:
            ctx.give_up(f"{what} (a tie: half is enough only with a `witness`)", ctx.lost_ranks())

    def _tell(self, suspects: Mapping[NodeId, str]) -> None:
        """Tell the coordinator our own evidence, once (and again if we insist)."""
        ctx = self._ctx
        for node, reason in suspects.items():
            if node in ctx.watch.evidence and (ctx.coordinator, node) not in self._told:
                self._told.add((ctx.coordinator, node))
                ctx.send(ctx.coordinator, NodeFailed(ctx.world.generation, node, reason, ctx.is_silent(node)))

    def insist(self, node: NodeId) -> None:
        """Say again that `node` is silent, to a coordinator that may hear it."""
        self._told.discard((self._ctx.coordinator, node))

    def _announce(self, suspects: Mapping[NodeId, str]) -> None:
        fresh = {node: reason for node, reason in suspects.items() if node not in self._announced}
        self._announced |= fresh.keys()
        if fresh:
            self._ctx.emit(NodeLost(tuple(fresh), described(fresh)))

    def counts_as_lost(self, node: NodeId) -> bool:
        """Return whether the swap under way was begun, or goes on, without `node`."""
        return node in self._announced or node in self._ctx.reported_suspects.lost

    def bring_up_to_date(self, node: NodeId) -> None:
        """Tell `node`, which speaks of an older generation, what was decided and what is being asked since."""
        ctx, proposal = self._ctx, self.proposer.proposal
        if ctx.decided is not None:
            ctx.send(node, ctx.decided)
        if proposal is not None and proposal.plan is None and proposal.is_missing(ctx.world, node):
            ctx.send(node, proposal.prepare())

    def tick(self) -> None:
        """Look at the deadlines. A coordinator that waits for a host suspends everybody's."""
        ctx = self._ctx
        self.voter.tick()
        if self.proposer.proposal is not None:
            self.proposer.expire(self.proposer.proposal)
        limit_s = ctx.timing.decision_timeout_s
        if not ctx.ended and ctx.swapping and ctx.now - ctx.patient_since >= limit_s:
            ctx.fence(f"no decision about generation {ctx.world.generation + 1} within {limit_s:g} s")
