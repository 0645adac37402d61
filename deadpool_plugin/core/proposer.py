"""The coordinator's part of a swap: one round after another until a plan is decided, or none can be.

Rules of this file: a round needs the promise of every member not counted as lost, so that its plan knows everything
that survives; who does not answer in time is lost and the round is repeated, a bounded number of times. A plan a former
round may have decided is proposed again, as it is: whom it names and who is dead by now is the next generation's loss.
May import everything of core but the controller's other parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .api import Claim, Look
from .context import Context
from .events import HostJoined, StepsUndone, SwapPlanned, Unprotected, WaitingForHost
from .ledger import Ledger
from .membership import Acceptor, Proposal, is_half, is_quorum
from .messages import Accepted, Decided, Promise, Propose, Refused
from .planning import NoSpare, Situation, plan_swap
from .types import NO_STEP, Ballot, NodeId, Rank, SwapPlan, Unrecoverable, listed

ROUNDS_MAX = 64
RIVAL_INTERVALS = 4
"""Heartbeat intervals a refused proposer waits for its rival's decision."""


class Proposer:
    """The proposer's part of the swap out of one generation."""

    def __init__(self, context: Context, acceptor: Acceptor) -> None:
        self._ctx, self._acceptor = context, acceptor
        self._rounds = 0
        self._round_seen = 0
        self.proposal: Proposal | None = None
        self.retry_at = context.now
        self._look_at = context.now

    def begin_round(self, suspects: Mapping[NodeId, str]) -> None:
        ctx = self._ctx
        self._rounds += 1
        if self._rounds > ROUNDS_MAX:
            ctx.fence(f"no agreement within {ROUNDS_MAX} rounds")
            return
        if self._acceptor.promised is not None:
            self._round_seen = max(self._round_seen, self._acceptor.promised.round)
        self._round_seen += 1
        ballot = Ballot(ctx.world.generation + 1, self._round_seen, ctx.node)
        silent = tuple(node for node in suspects if ctx.is_silent(node))
        deadline = ctx.now + ctx.timing.phase_timeout_s
        if not ctx.watch.unheard <= suspects.keys():  # it may link up still, and wait for a host that stands still
            deadline = max(deadline, ctx.formed_at + ctx.timing.linking_s)
        self.proposal = Proposal(ballot, dict(suspects), deadline, silent)
        ctx.broadcast(self.proposal.prepare())

    # -- from promises to a plan -------------------------------------------------------------------------------

    def promise(self, sender: NodeId, message: Promise) -> None:
        proposal = self.proposal
        if proposal is None or proposal.ballot != message.ballot or proposal.plan is not None:
            return
        proposal.promises[sender] = message
        self._ctx.learn(message)
        if proposal.is_complete(self._ctx.world):
            self._propose(proposal)

    def reconsider(self) -> bool:
        """Plan again with the hosts that have asked by now, while the round waits for some.

        Returns: whether there are other ones now.
        """
        proposal = self.proposal
        if proposal is None or proposal.waits_with is None or proposal.waits_with == self._ctx.joinable:
            return False
        self._propose(proposal)
        return True

    def _propose(self, proposal: Proposal) -> None:
        ctx = self._ctx
        promises = {node: promise for node, promise in proposal.promises.items() if node not in proposal.lost}
        failed = {failure.rank: failure for promise in promises.values() for failure in promise.failed}
        raised = [failure for _, failure in sorted(failed.items()) if failure.exit_code > 0]
        if raised and len(failed) == len(ctx.world.node_of):  # an error that no rank was spared is the user's
            ctx.stop(f"every rank failed: {raised[0].reason}", raised[0].exit_code)
            return
        plan = proposal.inherited() or self._plan(proposal, promises, failed)
        if isinstance(plan, NoSpare):
            plan = plan.verdict
            if ctx.policy.wait_for_hosts:  # everyone has said what it holds: that stays true for as long as it takes
                proposal.waits_with = ctx.joinable
                if not ctx.waiting:
                    ctx.wait_for_host()
                    ctx.emit(WaitingForHost(f"{described(proposal.lost)}; {plan.reason}"))
                return
        if isinstance(plan, Unrecoverable):
            ctx.learn_committed(plan.newest_committed)
            ctx.stop("; ".join(filter(None, (described(proposal.lost), plan.reason))), lost_ranks=plan.lost_ranks)
        elif plan.store or plan.restore_step == NO_STEP:
            if proposal.claim is not None:
                return  # the witness is being asked
            self._restart_phase(proposal)
            if self._needs_witness(proposal):
                proposal.claim = plan
                ctx.act(Claim(plan))
            else:
                self._ask_to_accept(proposal, plan)
        elif proposal.waits_with is not None:
            self._restart_phase(proposal)

    def _restart_phase(self, proposal: Proposal) -> None:
        proposal.waits_with, proposal.deadline = None, self._ctx.now + self._ctx.timing.phase_timeout_s

    def _needs_witness(self, proposal: Proposal) -> bool:
        """Return whether those who have promised are half only."""
        return self._ctx.policy.witness and not is_quorum(self._ctx.world, proposal.promises, witness=True)

    def claimed(self, plan: SwapPlan) -> None:
        """Propose the witness's plan, the only one a half may: that of an earlier attempt, or of the other half."""
        ctx, proposal = self._ctx, self.proposal
        if proposal is None or proposal.plan is not None or plan.world.generation != proposal.ballot.generation:
            return
        if proposal.claim is None and proposal.waits_with is None:
            return
        if plan != proposal.claim and proposal.inherited() is not None:
            ctx.give_up("the witness keeps another plan than the one that was accepted here", ctx.lost_ranks())
            return
        proposal.claimed = True
        self._ask_to_accept(proposal, plan)

    def _ask_to_accept(self, proposal: Proposal, plan: SwapPlan) -> None:
        proposal.plan = plan
        self._restart_phase(proposal)
        self._ctx.broadcast(Propose(proposal.ballot, plan))

    def _plan(
        self, proposal: Proposal, promises: Mapping[NodeId, Promise], failed: Collection[Rank]
    ) -> SwapPlan | NoSpare | Unrecoverable:
        ctx = self._ctx
        # A replacement of the last swap has no calls from before its restore step: the job can go back no further.
        oldest = ctx.plan.restore_step if ctx.plan is not None else 0
        case = Situation(
            world=ctx.world,
            ledger=Ledger({node: [h for h in one.holdings if h.step >= oldest] for node, one in promises.items()}),
            lost=proposal.lost,
            stores={node: promise.store for node, promise in promises.items()},
            newest_committed=ctx.newest_committed,
            lost_ranks=tuple(sorted(failed)),
            joined=ctx.joinable,
            may_start_over=not ctx.has_trained and ctx.newest_committed == NO_STEP,
            copies=ctx.policy.copies,
            racks=ctx.candidates,
            able=tuple(node for node, promise in promises.items() if promise.able),
        )
        return plan_swap(case)

    # -- from a plan to a decision -----------------------------------------------------------------------------

    def accepted(self, sender: NodeId, message: Accepted) -> None:
        ctx, proposal = self._ctx, self.proposal
        if proposal is None or proposal.plan is None or proposal.ballot != message.ballot:
            return
        proposal.accepted.add(sender)
        enough = is_quorum(ctx.world, proposal.accepted, ctx.policy.witness)
        if not enough and not (proposal.claimed and is_half(ctx.world, proposal.accepted)):
            return
        decided, self.proposal = Decided(proposal.plan, proposal.ballot), None
        self._announce(decided.plan)
        self._announce_undone(decided.plan, proposal.promises)
        for node in (*ctx.world.members, *decided.plan.joined):
            ctx.send(node, decided)

    def _announce(self, plan: SwapPlan) -> None:
        ctx = self._ctx
        moved = zip(ctx.world.node_of, plan.world.node_of, strict=True)
        takers: dict[str, object] = {str(lost): taker for lost, taker in moved if lost != taker}
        took_s = ctx.now - ctx.swap_since
        ctx.emit(SwapPlanned(plan.restore_step, plan.lost_nodes, plan.lost_ranks, plan.joined, takers, took_s))
        for node in plan.joined:
            ctx.emit(HostJoined(node))
        if len(plan.world.members) == 1:
            ctx.emit(Unprotected("no other host is left to hold snapshots; to do: deadpool join"))
        elif plan.restore_step != NO_STEP:
            ctx.emit(Unprotected(f"snapshots of step {plan.restore_step} are not all mirrored again yet"))

    def _announce_undone(self, plan: SwapPlan, promises: Mapping[NodeId, Promise]) -> None:
        """Say which committed steps are done again, as more was lost than `copies` cover."""
        ctx, step = self._ctx, self._ctx.newest_committed
        if plan.restore_step >= step:
            return
        alive = [node for node in promises if node not in plan.lost_nodes]
        ranks = Ledger({node: promises[node].holdings for node in alive}).missing(ctx.world, step, alive)
        if ranks:
            reason = f"no node that is left holds the snapshot of step {step} of rank(s) {listed(ranks)}"
        else:
            reason = f"that step {step} had been committed was learned after the plan was made"
        ctx.emit(StepsUndone(plan.restore_step + 1, step, reason))

    def refused(self, message: Refused) -> None:
        """Try again above whoever proposed above us, unless it is decided by then.

        If it is one we count as lost it may count us as lost: give it the time to win, else both of us lose.
        """
        ctx = self._ctx
        if self.proposal is not None and self.proposal.ballot == message.ballot:
            self._round_seen = max(self._round_seen, message.promised.round)
            self.proposal = None
            rival = message.promised.node in ctx.watch.evidence
            self.retry_at = ctx.now + (RIVAL_INTERVALS * ctx.timing.heartbeat_interval_s if rival else 0.0)

    def excuse_pause(self, gap_s: float) -> None:
        if self.proposal is not None:
            self.proposal.deadline += gap_s

    def expire(self, proposal: Proposal) -> None:
        """Go on without those who have not answered once the phase's deadline, if it has one, is over."""
        ctx = self._ctx
        if proposal.waits_with is not None:
            # While half of the members wait for a host the others may go on without them; the witness would know.
            if self._needs_witness(proposal) and proposal.claim is None and ctx.now >= self._look_at:
                self._look_at = ctx.now + ctx.timing.silent_after_s
                ctx.act(Look(proposal.ballot.generation))
            return
        if ctx.now < proposal.deadline:
            return
        missing = proposal.missing(ctx.world)
        phase, limit = "Prepare" if proposal.plan is None else "Propose", f"within {ctx.timing.phase_timeout_s:g} s"
        for node in missing:
            if node != ctx.node:
                linking = f"since the hosts met, {ctx.now - ctx.formed_at:.0f} s ago"
                when = linking if node in ctx.watch.unheard else limit
                ctx.suspect(node, f"no answer to {phase} {when}", silent=True)
        if missing or proposal.plan is not None:
            self.proposal = None
        elif proposal.claim is not None:
            ctx.give_up(f"the witness has not answered {limit}, and half cannot decide alone", ctx.lost_ranks())
        else:
            reason = "no surviving node offers a store to build groups over"
            ctx.stop("; ".join(filter(None, (described(proposal.lost), reason))), lost_ranks=ctx.lost_ranks())


def described(suspects: Mapping[NodeId, str]) -> str:
    return "; ".join(f"node {node} was lost ({reason})" for node, reason in suspects.items())
