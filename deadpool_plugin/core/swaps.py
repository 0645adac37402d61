"""From evidence to a decided plan: the proposer's and the voter's part of a swap.

Rules of this file: the lowest living member proposes; a round needs the promise of every member not counted as lost, so
that its plan knows everything that survives; who does not answer in time is lost and the round is repeated, a bounded
number of times. Whoever is counted as lost and still speaks is told so and leaves. A plan a former round may have
decided is proposed again, and a loss it does not cover is the next generation's. See membership.py for the votes.
May import everything of core but the controller and coordination.
"""

from __future__ import annotations

from collections.abc import Mapping

from .context import Context
from .inventory import Inventory
from .io import AbortWorkers
from .ledger import Ledger
from .membership import Acceptor, Proposal, is_quorum
from .messages import Accepted, Decided, NodeFailed, Prepare, Promise, Propose, Refused, Report, Verdict
from .placement import takers_of
from .planning import plan_swap
from .types import EXIT_UNRECOVERABLE, Ballot, NodeId, SwapPlan, Unrecoverable

ROUNDS_MAX = 64
RIVAL_INTERVALS = 4
"""Heartbeat intervals a refused proposer waits for its rival's decision."""


class Swaps:
    """The swap out of one generation, if there is one; a new object for each generation."""

    def __init__(self, context: Context, inventory: Inventory) -> None:
        self._ctx = context
        self._inventory = inventory
        self._acceptor = Acceptor()
        self._proposal: Proposal | None = None
        self._rounds = 0
        self._round_seen = 0
        self._retry_at = context.now
        self._announced: set[NodeId] = set()
        self._told: set[tuple[NodeId, NodeId]] = set()

    # -- losses ------------------------------------------------------------------------------------------------

    def react(self) -> None:
        """Act on the evidence there is. Safe to call at any time; does something once per new piece of evidence."""
        ctx = self._ctx
        suspects = ctx.suspects
        if not suspects:
            return
        if ctx.world.generation == 0 and not ctx.training:
            self._give_up_start(suspects)
        elif not ctx.has_quorum:
            self._without_quorum(suspects)
        elif not ctx.leads:
            self._tell(suspects)
        elif (self._proposal is None or self._proposal.is_outdated(suspects)) and ctx.now >= self._retry_at:
            self._begin_round(suspects)

    def _give_up_start(self, suspects: Mapping[NodeId, str]) -> None:
        ctx = self._ctx
        if not ctx.leads:
            self._tell(suspects)
            return
        reason = f"{_described(suspects)} before training had started: nothing to go back to, start the job again"
        self._announce(suspects)
        ctx.conclude(Verdict(0, EXIT_UNRECOVERABLE, reason, self._unrecoverable(reason)))

    def _without_quorum(self, suspects: Mapping[NodeId, str]) -> None:
        """Nothing can be decided here. Below a half the others may go on, so only this node ends."""
        ctx = self._ctx
        living, members = ctx.living, ctx.world.members
        what = f"{_described(suspects)}; {len(living)} of {len(members)} members are left and cannot decide alone"
        self._announce(suspects)
        if 2 * len(living) < len(members):
            ctx.fence(what)
        else:
            reason = f"{what} (a tie)"
            ctx.conclude(Verdict(ctx.world.generation, EXIT_UNRECOVERABLE, reason, self._unrecoverable(reason)))

    def _tell(self, suspects: Mapping[NodeId, str]) -> None:
        """Our own evidence, to the coordinator, once."""
        ctx = self._ctx
        for node, reason in suspects.items():
            if node in ctx.watch.evidence and (ctx.coordinator, node) not in self._told:
                self._told.add((ctx.coordinator, node))
                ctx.send(ctx.coordinator, NodeFailed(ctx.world.generation, node, reason))

    def _announce(self, suspects: Mapping[NodeId, str]) -> None:
        fresh = {node: reason for node, reason in suspects.items() if node not in self._announced}
        self._announced |= fresh.keys()
        if fresh:
            self._ctx.emit("NodeLost", lost=tuple(fresh), evidence=_described(fresh))

    def _unrecoverable(self, reason: str) -> Unrecoverable:
        return Unrecoverable(reason, self._ctx.lost_ranks(), self._ctx.newest_committed)

    # -- proposer ----------------------------------------------------------------------------------------------

    def _begin_round(self, suspects: Mapping[NodeId, str]) -> None:
        ctx = self._ctx
        self._announce(suspects)
        self._rounds += 1
        if self._rounds > ROUNDS_MAX:
            ctx.fence(f"no agreement within {ROUNDS_MAX} rounds")
            return
        if self._acceptor.promised is not None:
            self._round_seen = max(self._round_seen, self._acceptor.promised.round)
        self._round_seen += 1
        ballot = Ballot(ctx.world.generation + 1, self._round_seen, ctx.node)
        self._proposal = Proposal(ballot, dict(suspects), ctx.now + ctx.timing.phase_timeout_s)
        ctx.broadcast(Prepare(ballot, tuple(suspects)))

    def promise(self, sender: NodeId, message: Promise) -> None:
        proposal = self._proposal
        if proposal is None or proposal.ballot != message.ballot or proposal.plan is not None:
            return
        proposal.promises[sender] = message
        if not proposal.missing(self._ctx.world):
            self._propose(proposal)

    def _propose(self, proposal: Proposal) -> None:
        ctx = self._ctx
        plan = proposal.inherited() or self._plan(proposal)
        if isinstance(plan, Unrecoverable):
            reason = f"{_described(proposal.lost)}: {plan.reason}"
            ctx.conclude(Verdict(ctx.world.generation, EXIT_UNRECOVERABLE, reason, plan))
        elif plan.store:
            proposal.plan = plan
            proposal.deadline = ctx.now + ctx.timing.phase_timeout_s
            ctx.broadcast(Propose(proposal.ballot, plan))

    def _plan(self, proposal: Proposal) -> SwapPlan | Unrecoverable:
        ctx = self._ctx
        promises = {node: promise for node, promise in proposal.promises.items() if node not in proposal.lost}
        # Who took over at the last restore step has no calls from before it, so nothing older can be gone back to.
        oldest = ctx.plan.restore_step if ctx.plan is not None else 0
        ledger = Ledger({node: [h for h in one.holdings if h.step >= oldest] for node, one in promises.items()})
        stores = {node: promise.store for node, promise in promises.items()}
        return plan_swap(ctx.world, ledger, proposal.lost, stores, ctx.newest_committed)

    def accepted(self, sender: NodeId, message: Accepted) -> None:
        ctx, proposal = self._ctx, self._proposal
        if proposal is None or proposal.plan is None or proposal.ballot != message.ballot:
            return
        proposal.accepted.add(sender)
        if not is_quorum(ctx.world, proposal.accepted):
            return
        plan, self._proposal = proposal.plan, None
        takers = takers_of(ctx.world, plan.lost_nodes) or {}
        ctx.emit(
            "SwapPlanned",
            restore_step=plan.restore_step,
            lost_nodes=plan.lost_nodes,
            takers={str(lost): taker for lost, taker in takers.items()},
            duration_s=ctx.now - ctx.swap_since,
        )
        ctx.emit("Unprotected", reason=f"snapshots of step {plan.restore_step} are not all mirrored again yet")
        ctx.broadcast(Decided(plan))

    def refused(self, message: Refused) -> None:
        """Somebody proposed above us: try again above that, unless it is decided by then.

        If it is one we count as lost it may count us as lost: give it the time to win, else both of us lose.
        """
        ctx = self._ctx
        if self._proposal is not None and self._proposal.ballot == message.ballot:
            self._round_seen = max(self._round_seen, message.promised.round)
            self._proposal = None
            rival = message.promised.node in ctx.watch.evidence
            self._retry_at = ctx.now + (RIVAL_INTERVALS * ctx.timing.heartbeat_interval_s if rival else 0.0)

    # -- voter -------------------------------------------------------------------------------------------------

    def prepare(self, sender: NodeId, message: Prepare) -> None:
        ctx = self._ctx
        if not self._is_next(sender, message.ballot) or self._is_doomed(sender):
            return
        if ctx.node in message.lost:
            ctx.fence(f"counted as lost by node {sender}")
            return
        if self._acceptor.prepare(message.ballot):
            ctx.hearsay = (sender, {node: f"counted as lost by node {sender}" for node in message.lost})
            self._fence_generation()
            self.answer()
        else:
            self._refuse(sender, message.ballot)

    def answer(self) -> None:
        """Send the promise, again if what it carries (a store above all) has come only now."""
        promised = self._acceptor.promised
        if promised is not None:
            holdings, store = self._inventory.holdings, self._inventory.store
            self._ctx.send(promised.node, Promise(promised, self._acceptor.accepted, holdings, store))

    def propose(self, sender: NodeId, message: Propose) -> None:
        ctx = self._ctx
        if not self._is_next(sender, message.ballot) or self._is_doomed(sender):
            return
        if ctx.node in message.plan.lost_nodes:
            ctx.fence(f"counted as lost by node {sender}")
        elif self._acceptor.accept(message.ballot, message.plan):
            self._fence_generation()
            ctx.send(sender, Accepted(message.ballot))
        else:
            self._refuse(sender, message.ballot)

    def _refuse(self, sender: NodeId, ballot: Ballot) -> None:
        if self._acceptor.promised is not None:
            self._ctx.send(sender, Refused(ballot, self._acceptor.promised))

    def _fence_generation(self) -> None:
        ctx = self._ctx
        if not ctx.swapping:
            ctx.fenced_for = ctx.world.generation + 1
            ctx.swap_since = ctx.now
            ctx.act(AbortWorkers(ctx.fenced_for))

    def _is_next(self, sender: NodeId, ballot: Ballot) -> bool:
        """Whether `ballot` is for the generation after ours; helps whoever is behind, asks for help if it is us."""
        ctx = self._ctx
        if ballot.generation <= ctx.world.generation:
            self.bring_up_to_date(sender)
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

    def bring_up_to_date(self, node: NodeId) -> None:
        """`node` speaks of an older generation: tell it what was decided, and what is being asked since."""
        ctx, proposal = self._ctx, self._proposal
        if ctx.plan is not None:
            ctx.send(node, Decided(ctx.plan))
        if proposal is not None and proposal.plan is None and node in proposal.missing(ctx.world):
            ctx.send(node, Prepare(proposal.ballot, tuple(proposal.lost)))

    # -- deadlines ---------------------------------------------------------------------------------------------

    def tick(self) -> None:
        ctx, proposal = self._ctx, self._proposal
        if proposal is not None and ctx.now >= proposal.deadline:
            self._expire(proposal)
        elif ctx.swapping and ctx.now - ctx.swap_since >= ctx.timing.start_timeout_s:
            ctx.fence(f"no decision about generation {ctx.fenced_for} within {ctx.timing.start_timeout_s:g} s")

    def _expire(self, proposal: Proposal) -> None:
        ctx = self._ctx
        missing = proposal.missing(ctx.world)
        phase = "Prepare" if proposal.plan is None else "Propose"
        for node in missing:
            if node != ctx.node:
                ctx.watch.accuse(node, f"no answer to {phase} within {ctx.timing.phase_timeout_s:g} s")
        if missing or proposal.plan is not None:
            self._proposal = None
        else:
            reason = f"{_described(proposal.lost)}: no surviving node offers a store to build groups over"
            ctx.conclude(Verdict(ctx.world.generation, EXIT_UNRECOVERABLE, reason, self._unrecoverable(reason)))


def _described(suspects: Mapping[NodeId, str]) -> str:
    return "; ".join(f"node {node} was lost ({reason})" for node, reason in suspects.items())
