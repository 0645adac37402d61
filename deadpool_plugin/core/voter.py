"""A member's vote in a swap: fence first, then promise what one holds, then accept.

Rules of this file: single-decree Paxos, one plan per generation; it forgets everything when the generation is decided.
Whoever is counted as lost and still speaks is told so and leaves. A promise is sent again when what it carries changes.
Source: Lamport, Paxos Made Simple, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from .context import Context
from .messages import Accepted, NodeFailed, Prepare, Promise, Propose, Refused, Report
from .processes import Processes
from .types import NEVER, Ballot, NodeId, SwapPlan


@dataclass
class Acceptor:
    """A voter's promises for the next generation."""

    promised: Ballot = Ballot(0, 0, 0)  # below every ballot: none yet
    accepted: tuple[Ballot, SwapPlan] | None = None

    def prepare(self, ballot: Ballot) -> bool:
        """Promise to accept nothing below `ballot`; False if a larger one was promised already."""
        if ballot < self.promised:
            return False
        self.promised = ballot
        return True

    def accept(self, ballot: Ballot, plan: SwapPlan) -> bool:
        """Accept `plan`; False if a larger ballot was promised meanwhile."""
        if not self.prepare(ballot):
            return False
        self.accepted = (ballot, plan)
        return True


class Voter:
    """The voter's part of the swap out of one generation."""

    def __init__(self, context: Context, processes: Processes) -> None:
        self._ctx, self._processes = context, processes
        self.acceptor = Acceptor()
        # When this node first promised each ballot. What was decided by one was decided later: nobody proposes before
        # all have promised. (An acceptance may come when a majority has long accepted.)
        self.promised_at: dict[Ballot, float] = {}
        self._postponed: dict[NodeId, Prepare] = {}
        self._asked_about: dict[NodeId, float] = {}  # coordinators to be, and when (`awake`) their loss was first asked
        self._excused_at = NEVER

    def prepare(self, sender: NodeId, message: Prepare) -> None:
        ctx = self._ctx
        if not self._may_ask(sender, message.ballot):
            return
        if ctx.node in message.lost:
            self.suspected(sender, f"counted as lost by node {sender}", ctx.node in message.silent)
        elif self._hears_who_is_silent(message):
            self._postponed[sender] = message
        elif self.acceptor.prepare(message.ballot):
            ctx.report_suspects(message)
            self.fence_generation()
            self.answer()
        else:
            ctx.send(sender, Refused(message.ballot, self.acceptor.promised))

    def tick(self) -> None:
        """Answer what was postponed, if the coordinator that was heard then has been silent for long enough by now.
        Until then report to the proposers too, so that they do not take this node for lost."""
        ctx, postponed, self._postponed = self._ctx, self._postponed, {}
        for sender, message in postponed.items():
            self.prepare(sender, message)
        if self._postponed and ctx.now - self._excused_at >= ctx.timing.heartbeat_interval_s:
            self._excused_at = ctx.now
            for sender in self._postponed:
                ctx.send(sender, Report(ctx.world.generation))

    def _hears_who_is_silent(self, message: Prepare) -> bool:
        """Return whether the coordinator to be, which is to be replaced for its silence, can still count on us.

        One that this node does not follow yet can until it has had the time to be heard.
        """
        ctx = self._ctx
        gone = ctx.suspects.keys() | (set(message.lost) - set(message.silent))  # ours of now, as the sender knows
        coordinator = next(node for node in ctx.world.seniority if node not in gone)
        if coordinator == ctx.node or coordinator not in message.silent:
            return False
        asked_s = ctx.awake - self._asked_about.setdefault(coordinator, ctx.awake)
        is_new = coordinator != ctx.coordinator and asked_s < ctx.timing.silent_after_s
        return is_new or ctx.watch.hears(coordinator, ctx.awake)

    def suspected(self, sender: NodeId, reason: str, silent: bool) -> None:
        """Leave, or suspect `sender`, which counts this node as lost: of two the one goes that no majority hears."""
        ctx = self._ctx
        if silent and ctx.in_contact and ctx.contact_at > ctx.formed_at:
            ctx.suspect(sender, "it does not hear this node, but a majority does")
        else:
            ctx.fence(reason)

    def answer(self) -> None:
        """Send the promise, again if what it carries (a store above all) has come only now."""
        ctx, promised = self._ctx, self.acceptor.promised
        if promised.generation:
            self.promised_at.setdefault(promised, ctx.now)
            promise = Promise(
                promised,
                self.acceptor.accepted,
                self._processes.holdings,
                self._processes.store,
                failed=self._processes.failures,
                committed=ctx.newest_committed,
                training=ctx.has_trained,
                checkpoint=ctx.checkpoint,
                covers=self._processes.rehearsing.covers,
            )
            ctx.send(promised.node, promise)

    def propose(self, sender: NodeId, message: Propose) -> None:
        ctx = self._ctx
        if not self._may_ask(sender, message.ballot):
            return
        if ctx.node in message.plan.lost_nodes:
            ctx.fence(f"counted as lost by node {sender}")
        elif self.acceptor.accept(message.ballot, message.plan):
            self.fence_generation()
            ctx.send(sender, Accepted(message.ballot))
        else:
            ctx.send(sender, Refused(message.ballot, self.acceptor.promised))

    def fence_generation(self) -> None:
        """Interrupt this generation's workers, unless they are; what they hold stays as it is."""
        ctx = self._ctx
        if not ctx.swapping:
            ctx.fence_for(ctx.world.generation + 1)

    def _may_ask(self, sender: NodeId, ballot: Ballot) -> bool:
        """Return whether `ballot` is for the generation after ours and `sender` lives; else tell it why not, or ask."""
        ctx, generation = self._ctx, self._ctx.world.generation
        if ballot.generation <= generation:
            if ctx.decided is not None:
                ctx.send(sender, ctx.decided)
        elif ballot.generation > generation + 1:
            ctx.send(sender, Report(generation))
        elif sender in ctx.watch.evidence:
            reason = f"counted as lost by node {ctx.node}: {ctx.watch.evidence[sender]}"
            ctx.send(sender, NodeFailed(generation, sender, reason, ctx.is_silent(sender)))
        else:
            return True
        return False
