"""A member's vote in a swap: fence first, then promise what one holds, then accept.

Rules of this file: whoever is counted as lost and still speaks is told so and leaves; a promise is sent again when what
it carries changes. See membership.py for the votes. May import everything of core but the controller's other parts.
"""

from __future__ import annotations

from .context import Context
from .failures import Failures
from .inventory import Inventory
from .io import AbortWorkers
from .membership import Acceptor
from .messages import Accepted, Decided, NodeFailed, Prepare, Promise, Propose, Refused, Report
from .types import Ballot, NodeId


class Voter:
    """The voter's part of the swap out of one generation."""

    def __init__(self, context: Context, inventory: Inventory, failures: Failures) -> None:
        self._ctx, self._inventory, self._failures = context, inventory, failures
        self.acceptor = Acceptor()

    def prepare(self, sender: NodeId, message: Prepare) -> None:
        ctx = self._ctx
        if not self._is_next(sender, message.ballot) or self._is_doomed(sender):
            return
        if ctx.node in message.lost:
            ctx.fence(f"counted as lost by node {sender}")
            return
        if self.acceptor.prepare(message.ballot):
            ctx.hearsay = (sender, {node: f"counted as lost by node {sender}" for node in message.lost})
            self._fence_generation()
            self.answer()
        else:
            self._refuse(sender, message.ballot)

    def answer(self) -> None:
        """Send the promise, again if what it carries (a store above all) has come only now."""
        ctx, promised = self._ctx, self.acceptor.promised
        if promised is not None:
            promise = Promise(
                ballot=promised,
                accepted=self.acceptor.accepted,
                holdings=self._inventory.holdings,
                store=self._inventory.store,
                failed=self._failures.own,
                committed=ctx.newest_committed,
                training=ctx.has_trained,
                checkpoint=ctx.checkpoint,
            )
            ctx.send(promised.node, promise)

    def propose(self, sender: NodeId, message: Propose) -> None:
        ctx = self._ctx
        if not self._is_next(sender, message.ballot) or self._is_doomed(sender):
            return
        if ctx.node in message.plan.lost_nodes:
            ctx.fence(f"counted as lost by node {sender}")
        elif self.acceptor.accept(message.ballot, message.plan):
            self._fence_generation()
            ctx.send(sender, Accepted(message.ballot))
        else:
            self._refuse(sender, message.ballot)

    def _refuse(self, sender: NodeId, ballot: Ballot) -> None:
        if self.acceptor.promised is not None:
            self._ctx.send(sender, Refused(ballot, self.acceptor.promised))

    def _fence_generation(self) -> None:
        ctx = self._ctx
        if not ctx.swapping:
            ctx.fenced_for = ctx.world.generation + 1
            ctx.swap_since = ctx.patient_since = ctx.now
            ctx.act(AbortWorkers(ctx.fenced_for))

    def _is_next(self, sender: NodeId, ballot: Ballot) -> bool:
        """Whether `ballot` is for the generation after ours; helps whoever is behind, asks for help if it is us."""
        ctx = self._ctx
        if ballot.generation <= ctx.world.generation and ctx.plan is not None:
            ctx.send(sender, Decided(ctx.plan))
        elif ballot.generation > ctx.world.generation + 1:
            ctx.send(sender, Report(ctx.world.generation, ctx.node))
        return ballot.generation == ctx.world.generation + 1

    def _is_doomed(self, sender: NodeId) -> bool:
        """Whether `sender` is counted as lost here; if so it is told."""
        ctx = self._ctx
        if sender not in ctx.watch.evidence:
            return False
        reason = f"counted as lost by node {ctx.node}: {ctx.watch.evidence[sender]}"
        ctx.send(sender, NodeFailed(ctx.world.generation, sender, reason))
        return True
