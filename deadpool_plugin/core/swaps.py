"""A swap: when one is due, and round after round until a plan is decided, or none can be.

Rules of this file: the lowest living member proposes, everybody else tells it what it knows; below a majority nobody
proposes. Once this generation is fenced it must come to an end, whatever has become of the reason. A round needs the
promise of every member not counted as lost, so that its plan knows everything that survives; who does not answer in
time is lost and the round is repeated, a bounded number of times. A plan a former round may have decided is proposed
again, as it is: whom it names and who is dead by now is the next generation's loss, as is any that a plan lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .api import Claim, Look
from .context import Context
from .events import HostJoined, NodeLost, Note, StepsUndone, SwapPlanned, Unprotected, WaitingForHost
from .ledger import Ledger, NoSpare, plan_swap
from .messages import Accepted, Decided, NodeFailed, Prepare, Promise, Propose, Refused, Report
from .pairing import Pairing
from .processes import RAISES_MAX, Processes
from .types import NEVER, NO_STEP, Ballot, NodeId, Rank, SwapPlan, Unrecoverable, World, listed
from .voter import Voter

ROUNDS_MAX = 64
CALMS = 8  # in a storm a plan waits until this fraction of `slow_after_s` has brought no further loss
RIVAL_INTERVALS = 4  # heartbeat intervals a refused proposer waits for its rival's decision


@dataclass
class Proposal:
    """A proposer's current round. First it collects promises, then, once `plan` is set, acceptances."""

    ballot: Ballot
    lost: dict[NodeId, str]
    deadline: float  # by `Context.awake`
    silent: tuple[NodeId, ...] = ()
    calm_at: float = NEVER  # in a storm: by `Context.now`, when it is planned unless one more loss is heard of
    promises: dict[NodeId, Promise] = field(default_factory=dict)
    plan: SwapPlan | None = None
    accepted: set[NodeId] = field(default_factory=set)
    claim: SwapPlan | None = None  # the plan that the witness was asked to keep
    claimed: bool = False
    waits_with: tuple[NodeId, ...] | None = None  # while it waits for hosts: the candidates that are too few

    def prepare(self) -> Prepare:
        return Prepare(self.ballot, tuple(self.lost), self.silent)

    def is_complete(self, world: World) -> bool:
        """Return whether every member that is not lost has promised. It is asked often, so the count comes first."""
        return len(self.promises) + len(self.lost) >= len(world.members) and not self.missing(world)

    def missing(self, world: World) -> tuple[NodeId, ...]:
        return tuple(node for node in world.members if self.waits_for(node))

    def waits_for(self, member: NodeId) -> bool:
        return member not in self.lost and member not in (self.promises if self.plan is None else self.accepted)

    def inherited(self) -> SwapPlan | None:
        """The plan this round must propose because an earlier one may have been decided: that of the largest ballot."""
        earlier = [promise.accepted for promise in self.promises.values() if promise.accepted is not None]
        return max(earlier, key=lambda pair: pair[0])[1] if earlier else None

    def is_decided(self, world: World, witness: bool) -> bool:
        return world.is_quorum(self.accepted, witness) or (self.claimed and world.is_half(self.accepted))


class Swaps:
    """The swap out of one generation, if there is one; a new object for each generation."""

    def __init__(self, context: Context, processes: Processes, pairing: Pairing) -> None:
        self._ctx, self._processes, self._pairing = context, processes, pairing
        self.voter = Voter(context, processes)
        self.proposal: Proposal | None = None
        self._rounds = self._round_seen = 0
        self._retry_at = self._look_at = context.now
        self._announced: set[NodeId] = set()
        self._told: set[tuple[NodeId, NodeId]] = set()  # to which coordinator, about whom
        self._is_stuck = False
        self._asked_at = NEVER

    # -- when a swap is due ---------------------------------------------------------------------------------------

    def stuck(self, node: NodeId, reason: str) -> None:
        if not self._is_stuck:
            self._is_stuck = True
            self._ctx.emit(Note(f"node {node}: {reason}"))

    def react(self) -> None:
        """Act on what is known. Safe to call at any time; does something once per new piece of evidence."""
        ctx, suspects, proposal = self._ctx, self._ctx.suspects, self.proposal
        if suspects and not ctx.can_decide_without(suspects):
            self._without_quorum(suspects)
            return
        self._asked_at = NEVER
        if not ctx.leads:
            for node, reason in suspects.items():  # tell our own evidence once (and again if we insist)
                if node in ctx.watch.evidence and (ctx.coordinator, node) not in self._told:
                    self._told.add((ctx.coordinator, node))
                    ctx.send(ctx.coordinator, NodeFailed(ctx.world.generation, node, reason, ctx.is_silent(node)))
        elif self._is_due(suspects):
            self._announce(suspects)
            if ctx.unproven:  # a process that complains may have been answered by one that issues something else
                self._pairing.ask()
            self._begin_round(suspects)
        elif proposal is not None and proposal.waits_with is not None and proposal.waits_with != ctx.joinable:
            self._propose(proposal)  # again, with the hosts that have asked by now

    def _is_due(self, suspects: Mapping[NodeId, str]) -> bool:
        ctx = self._ctx
        if ctx.now < self._retry_at:
            return False
        if self.proposal is not None:
            # It counts on a lost node's promise. A later loss is the next generation's.
            return self.proposal.plan is None and any(node not in self.proposal.lost for node in suspects)
        if not suspects:
            is_gone = self._processes.any_gone and not ctx.resuming  # then all processes are new, once all have read
            return is_gone or self._is_stuck or ctx.swapping or self._may_join
        if not all(ctx.is_silent(node) for node in suspects):
            return True
        # If others fall silent too it may be this node that hears nobody, and whoever it asks to go on without the
        # silent ones makes them leave.
        return not any(ctx.watch.is_late(node, ctx.awake) for node in ctx.living if node != ctx.node)

    @property
    def _may_join(self) -> bool:
        """Return whether hosts are waiting to be taken in, and there is a step that all could go back to."""
        ctx = self._ctx
        return ctx.training and ctx.newest_committed != NO_STEP and bool(ctx.joinable)

    def _without_quorum(self, suspects: Mapping[NodeId, str]) -> None:
        """Ask whether others know of a newer generation, and end alone if not: they may see it otherwise and go on."""
        ctx, accepted = self._ctx, self.voter.acceptor.accepted
        living, members = ctx.living, ctx.world.members
        # Its proposer may have died before it told all. The hosts that our accepted plan takes in may know of it, too.
        may_know = (*living, *(accepted[1].joined if accepted is not None else ()))
        others = [node for node in may_know if node != ctx.node and node not in ctx.watch.evidence]
        if others and self._asked_at == NEVER:
            self._asked_at = ctx.now
            for node in others:
                ctx.send(node, Report(ctx.world.generation))
        only_silent = all(ctx.is_silent(node) for node in suspects)  # a network may come back; nobody decides meanwhile
        limit_s = ctx.timing.phase_timeout_s if only_silent else ctx.timing.slow_after_s
        if others and ctx.now - self._asked_at < limit_s:
            if not only_silent:
                self.voter.fence_generation()  # the others need not have waited for a lease
            return
        what = f"{described(suspects)}; {len(living)} of {len(members)} members are left and cannot decide alone"
        self._announce(suspects)
        if 2 * len(living) < len(members):
            ctx.fence(what)
        else:
            ctx.give_up(f"{what} (a tie: half is enough only with a `witness`)")

    def insist(self, node: NodeId) -> None:
        self._told.discard((self._ctx.coordinator, node))

    def _announce(self, suspects: Mapping[NodeId, str]) -> None:
        fresh = {node: reason for node, reason in suspects.items() if node not in self._announced}
        self._announced |= fresh.keys()
        if fresh:
            self._ctx.emit(NodeLost(tuple(fresh), described(fresh)))

    def counts_as_lost(self, node: NodeId) -> bool:
        """Return whether the swap under way was begun, or goes on, without `node`."""
        return node in self._announced or node in self._ctx.reported.lost

    def bring_up_to_date(self, node: NodeId) -> None:
        """Tell `node`, which speaks of an older generation, what was decided and what is being asked since."""
        ctx, proposal = self._ctx, self.proposal
        if ctx.decided is not None:
            ctx.send(node, ctx.decided)
        if proposal and proposal.plan is None and node in ctx.world.positions and proposal.waits_for(node):
            ctx.send(node, proposal.prepare())

    # -- from promises to a plan ----------------------------------------------------------------------------------

    def _begin_round(self, suspects: Mapping[NodeId, str]) -> None:
        ctx = self._ctx
        self._rounds += 1
        if self._rounds > ROUNDS_MAX:
            ctx.fence(f"no agreement within {ROUNDS_MAX} rounds")
            return
        self._round_seen = max(self._round_seen, self.voter.acceptor.promised.round) + 1
        ballot = Ballot(ctx.world.generation + 1, self._round_seen, ctx.node)
        silent = tuple(node for node in suspects if ctx.is_silent(node))
        limit_s = ctx.timing.phase_timeout_s
        if not ctx.watch.unheard <= suspects.keys():  # it may link up still, and wait for a host that stands still
            limit_s = max(limit_s, ctx.formed_at + ctx.timing.linking_s - ctx.now)
        self.proposal = Proposal(ballot, dict(suspects), ctx.awake + limit_s, silent, self._calm_at)
        ctx.broadcast(self.proposal.prepare())

    @property
    def _calm_at(self) -> float:
        """Return when a plan for a loss may be made: at once, but after a while if the last loss was lately.

        Each plan of a storm costs all ranks an interruption, so what is lost meanwhile is planned together. To wait
        for longer than the last plan took to carry out would cost more than that saves. A host that joins is no loss.
        """
        ctx, plan, storm_s = self._ctx, self._ctx.plan, self._ctx.timing.slow_after_s
        only_joins = not (ctx.suspects or self._processes.any_gone or self._is_stuck or ctx.swapping)
        after_loss = plan is not None and (plan.lost_nodes or plan.lost_ranks) and ctx.now - ctx.entered_at < storm_s
        return ctx.now + min(storm_s / CALMS, ctx.interrupted_s) if after_loss and not only_joins else NEVER

    def promise(self, sender: NodeId, message: Promise) -> None:
        ctx, proposal = self._ctx, self.proposal
        if proposal is None or proposal.ballot != message.ballot or proposal.plan is not None:
            return
        before = proposal.promises.get(sender)
        proposal.promises[sender] = message
        ctx.learn(message)
        if before is not None and before.failed != message.failed and proposal.calm_at != NEVER:
            proposal.calm_at = self._calm_at
        self._propose_if_calm(proposal)

    def _propose_if_calm(self, proposal: Proposal) -> None:
        ctx = self._ctx
        if proposal.plan is None and ctx.now >= proposal.calm_at and proposal.is_complete(ctx.world):
            self._propose(proposal)

    def _propose(self, proposal: Proposal) -> None:
        ctx = self._ctx
        promises = {node: promise for node, promise in proposal.promises.items() if node not in proposal.lost}
        failed = {failure.rank: failure for promise in promises.values() for failure in promise.failed}
        same = {(failure.exit_code, failure.reason) for failure in failed.values() if failure.raises}
        if len(same) == 1 and all(rank in failed and failed[rank].raises for rank in range(len(ctx.world.node_of))):
            ((exit_code, reason),) = same
            ctx.stop(f"the script of every rank ended with {exit_code}: {reason}", exit_code)
            return
        if again := [failure for _, failure in sorted(failed.items()) if failure.raises >= RAISES_MAX]:
            self._processes.blame(again[0])
            return
        doubted = [failure.rank for failure in failed.values() if failure.raises == RAISES_MAX - 1]
        # A replacement of the last swap has no calls from before its restore step: the job can go back no further.
        oldest = ctx.plan.restore_step if ctx.plan is not None else 0
        plan = proposal.inherited() or plan_swap(
            world=ctx.world,
            ledger=Ledger({node: [h for h in one.holdings if h.step >= oldest] for node, one in promises.items()}),
            lost=proposal.lost,
            stores={node: promise.store for node, promise in promises.items()},
            newest_committed=ctx.newest_committed,
            lost_ranks=tuple(sorted(failed)) if not ctx.resuming else self._ranks_without(proposal.lost),
            joined={node: ctx.candidates[node] for node in ctx.joinable},
            may_start_over=not ctx.has_trained and ctx.newest_committed == NO_STEP,
            copies=ctx.policy.copies,
            covers={node: dict(promise.covers) for node, promise in promises.items() if promise.covers},
            suspicions=tuple(self._processes.suspicions(failed.values()).values()),
            doubted={ctx.world.node_of[rank] for rank in doubted},
            every=ctx.every if ctx.has_trained else ctx.policy.begins_every,
        )
        if isinstance(plan, NoSpare) and ctx.policy.wait_for_hosts:
            proposal.waits_with = ctx.joinable  # all have said what they hold: that stays true for as long as it takes
            if not ctx.waiting:
                ctx.wait_for_host()
                ctx.emit(WaitingForHost(f"{described(proposal.lost)}; {plan.reason}"))
        elif isinstance(plan, Unrecoverable):
            ctx.learn_committed(plan.newest_committed)
            kept = "; the files of the earlier job are as they were: start again" if ctx.resuming else ""
            self._stop(proposal, f"{plan.reason}{kept}", plan.lost_ranks)
        elif plan.store or plan.restore_step == NO_STEP:
            if proposal.claim is not None:
                return  # the witness is being asked
            if self._needs_witness(proposal):
                self._restart_phase(proposal)
                proposal.claim = plan
                ctx.act(Claim(plan))
            else:
                self._ask_to_accept(proposal, plan)
        elif proposal.waits_with is not None:
            self._restart_phase(proposal)

    def _ranks_without(self, lost: Mapping[NodeId, str]) -> tuple[Rank, ...]:
        return tuple(rank for rank, node in enumerate(self._ctx.world.node_of) if node not in lost)

    def _restart_phase(self, proposal: Proposal) -> None:
        proposal.waits_with, proposal.deadline = None, self._ctx.awake + self._ctx.timing.phase_timeout_s

    def _needs_witness(self, proposal: Proposal) -> bool:
        return self._ctx.policy.witness and not self._ctx.world.is_quorum(proposal.promises, witness=True)

    def claimed(self, plan: SwapPlan) -> None:
        """Propose the witness's plan, the only one a half may: that of an earlier attempt, or of the other half."""
        proposal = self.proposal
        if proposal is None or proposal.plan is not None or plan.world.generation != proposal.ballot.generation:
            return
        if proposal.claim is None and proposal.waits_with is None:
            return
        if plan != proposal.claim and proposal.inherited() is not None:
            self._ctx.give_up("the witness keeps another plan than the one that was accepted here")
            return
        proposal.claimed = True
        self._ask_to_accept(proposal, plan)

    def _stop(self, proposal: Proposal, reason: str, lost_ranks: tuple[Rank, ...]) -> None:
        self._ctx.stop("; ".join(filter(None, (described(proposal.lost), reason))), lost_ranks=lost_ranks)

    # -- from a plan to a decision --------------------------------------------------------------------------------

    def _ask_to_accept(self, proposal: Proposal, plan: SwapPlan) -> None:
        proposal.plan = plan
        self._restart_phase(proposal)
        self._ctx.broadcast(Propose(proposal.ballot, plan))

    def accepted(self, sender: NodeId, message: Accepted) -> None:
        ctx, proposal = self._ctx, self.proposal
        if proposal is None or proposal.plan is None or proposal.ballot != message.ballot:
            return
        proposal.accepted.add(sender)
        if not proposal.is_decided(ctx.world, ctx.policy.witness):
            return
        decided, self.proposal = Decided(proposal.plan, proposal.ballot), None
        self._announce_plan(decided.plan, proposal.promises)
        for node in (*ctx.world.members, *decided.plan.joined):
            ctx.send(node, decided)

    def _announce_plan(self, plan: SwapPlan, promises: Mapping[NodeId, Promise]) -> None:
        """Say what was decided, and which committed steps are done again if more was lost than `copies` cover."""
        ctx, step = self._ctx, self._ctx.newest_committed
        moved = zip(ctx.world.node_of, plan.world.node_of, strict=True)
        takers: dict[str, object] = {str(lost): taker for lost, taker in moved if lost != taker}
        took_s = ctx.now - ctx.swap_since
        vacated = plan.vacated
        ctx.emit(SwapPlanned(plan.restore_step, plan.lost_nodes, plan.lost_ranks, plan.joined, takers, took_s, vacated))
        for node in plan.joined:
            ctx.emit(HostJoined(node))
        if len(plan.world.members) == 1:
            ctx.emit(Unprotected("no other host is left to hold snapshots; to do: deadpool join"))
        elif plan.restore_step != NO_STEP:
            ctx.emit(Unprotected(f"snapshots of step {plan.restore_step} are not all mirrored again yet"))
        if plan.restore_step < step:
            alive = [node for node in promises if node not in plan.lost_nodes]
            ranks = Ledger({node: promises[node].holdings for node in alive}).missing(ctx.world, step, alive)
            reason = f"that step {step} had been committed was learned after the plan was made"
            if ranks:
                reason = f"no node that is left holds the snapshot of step {step} of rank(s) {listed(ranks)}"
            ctx.emit(StepsUndone(plan.restore_step + 1, step, reason))

    def refused(self, message: Refused) -> None:
        """Try again above whoever proposed above us, unless it is decided by then."""
        ctx = self._ctx
        if self.proposal is not None and self.proposal.ballot == message.ballot:
            self._round_seen = max(self._round_seen, message.promised.round)
            self.proposal = None
            # A rival that is lost to us may count us as lost: give it the time to win, else both of us lose.
            rival = message.promised.node in ctx.watch.evidence
            self._retry_at = ctx.now + (RIVAL_INTERVALS * ctx.timing.heartbeat_interval_s if rival else 0.0)

    # -- deadlines ------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at the deadlines. A coordinator that waits for a host suspends everybody's."""
        ctx = self._ctx
        self.voter.tick()
        if self.proposal is not None:
            if NEVER < self.proposal.calm_at <= ctx.now:
                self.proposal.calm_at = NEVER
                self._propose_if_calm(self.proposal)
            self._expire(self.proposal)
        limit_s = ctx.timing.decision_timeout_s
        if not ctx.ended and ctx.swapping and ctx.awake - ctx.patient_since >= limit_s:
            ctx.fence(f"no decision about generation {ctx.world.generation + 1} within {limit_s:g} s")

    def _expire(self, proposal: Proposal) -> None:
        """Go on without those who have not answered once the phase's deadline, if it has one, is over."""
        ctx = self._ctx
        if proposal.waits_with is not None:
            # While half of the members wait for a host the others may go on without them; the witness would know.
            if self._needs_witness(proposal) and proposal.claim is None and ctx.now >= self._look_at:
                self._look_at = ctx.now + ctx.timing.slow_after_s
                ctx.act(Look(proposal.ballot.generation))
            return
        if ctx.awake < proposal.deadline:
            return
        missing = proposal.missing(ctx.world)
        phase, limit = "Prepare" if proposal.plan is None else "Propose", f"within {ctx.timing.phase_timeout_s:g} s"
        linking = f"since the hosts met, {ctx.now - ctx.formed_at:.0f} s ago"
        for node in missing:
            if node != ctx.node:
                when = linking if node in ctx.watch.unheard else limit
                ctx.suspect(node, f"no answer to {phase} {when}", silent=True)
        if missing or proposal.plan is not None:
            self.proposal = None
        elif proposal.claim is not None:
            ctx.give_up(f"the witness has not answered {limit}, and half cannot decide alone")
        else:
            self._stop(proposal, "no surviving node offers a store to build groups over", ctx.lost_ranks)


def described(suspects: Mapping[NodeId, str]) -> str:
    return "; ".join(f"node {node} was lost ({reason})" for node, reason in suspects.items())
