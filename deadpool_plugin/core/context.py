"""State that the parts of one node's controller share: the world, the view of the others, and the ways to speak.

Rules of this file: each field has one writer, a method of `Context` or one part (tests/unit/core/test_context.py). A
message to oneself goes through `loopback` and is handled like any other, in the same step; after `conclude` or `fence`
nothing is said any more. One's own pause is no evidence about others: what they are late with is measured by `awake`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from .api import AbortWorkers, Action, Announce, Commit, Emit, Leave, Send, StepStored, WriteStep
from .chain import AUTO, Chain
from .events import Event, JobFinished, JobStopped, NodeFenced
from .messages import AnyMessage, Decided, NodeFailed, Prepare, Promise, Status, Verdict
from .policy import Policy, Timing
from .types import (
    EXIT_FENCED,
    EXIT_UNRECOVERABLE,
    NEVER,
    NO_STEP,
    Ballot,
    Checkpoint,
    Generation,
    NodeId,
    Rank,
    Step,
    SwapPlan,
    Unrecoverable,
    World,
)


@dataclass
class Watch:
    """One node's view of the others. All times are those of `Context.awake`."""

    timing: Timing
    evidence: dict[NodeId, str] = field(default_factory=dict)  # why each lost node is lost
    silent: set[NodeId] = field(default_factory=set)  # those for nothing but silence, which alone may be taken back
    heard: dict[NodeId, float] = field(default_factory=dict)  # when this node last heard of each
    answered: dict[NodeId, float] = field(default_factory=dict)
    """When the kernel of a late node's host last answered (contact.py, `HostProbes`): the host lives, and is slow."""
    unheard: set[NodeId] = field(default_factory=set)
    """Nodes that have not said a word to this one since the hosts met. They may still wait for a link to a host that
    has died, so their silence counts only after `Timing.linking_s`; a link that ends counts as ever. Nobody is in it
    any more where training has begun and another node coordinates: others need not have spoken to that one before."""

    def hear(self, node: NodeId, now: float) -> None:
        self.heard[node] = now
        self.unheard.discard(node)

    def host_answers(self, node: NodeId, now: float) -> None:
        self.answered[node] = max(now, self.answered.get(node, NEVER))

    def hears(self, node: NodeId, now: float) -> bool:
        """Return whether a silence of `node` does not count yet."""
        silence_s, timing = now - self.heard.get(node, NEVER), self.timing
        return silence_s < (timing.slow_after_s if self._lives(node, now) else timing.silent_after_s)

    def _lives(self, node: NodeId, now: float) -> bool:
        return now - self.answered.get(node, NEVER) < self.timing.silent_after_s

    def is_quiet(self, node: NodeId, now: float) -> bool:
        """Return whether half of the time is over after which `node` is lost, should its host not answer."""
        return now - self.heard.get(node, now) >= self.timing.silent_after_s / 2

    def is_late(self, node: NodeId, now: float) -> bool:
        """Return whether nothing of `node` was heard for half of that time, nor of its host."""
        half_s = self.timing.silent_after_s / 2
        return self.is_quiet(node, now) and now - self.answered.get(node, NEVER) >= half_s

    def silences(self, nodes: Collection[NodeId], now: float) -> Iterator[tuple[NodeId, str]]:
        """Find those of `nodes` that are to be counted as lost for their silence, each with the reason."""
        timing = self.timing
        for node in nodes:
            silence_s = now - self.heard.get(node, now)
            if silence_s < timing.silent_after_s or node in self.evidence:
                continue
            if node in self.unheard or self._lives(node, now):
                limit_s = timing.linking_s if node in self.unheard else timing.slow_after_s
                if silence_s >= limit_s:
                    yield node, f"its agent was silent for {silence_s:.1f} s (limit {limit_s:g} s)"
            else:
                yield node, f"silent for {silence_s:.1f} s (limit {timing.silent_after_s:g} s)"


class Context:
    """The shared state of one controller."""

    def __init__(self, node: NodeId, timing: Timing, policy: Policy) -> None:
        self.node, self.timing, self.policy = node, timing, policy
        self.now = 0.0
        self.awake = 0.0  # as `now`, but that it stands still while this node does
        self._lease_s = timing.lease_s

        # The world and the view of its members.
        self.world = World(generation=0, node_of=())
        self.formed = False  # this node knows a world
        self.formed_at = NEVER  # when it knew of its first world, or asked to join: nobody had heard of it before
        self.decided: Decided | None = None  # the decision that began this generation; None in generation 0
        self.plan: SwapPlan | None = None  # that of `decided`
        self.begins_at_top = True  # the script begins from its top in this generation
        self.resuming = False  # the files of an earlier job are being read: its state is this job's first restore step
        self.watch = Watch(timing)
        self.reported = Prepare(Ballot(0, 0, node), ())
        """The newest one that was promised: whom its proposer counts as lost. Void if the proposer is lost itself: of
        two nodes that have lost each other only one shall go."""
        self.suspects: Mapping[NodeId, str] = {}  # why a member is lost, by our own evidence or as reported
        self.coordinator: NodeId = -1  # the lowest living member, as far as this node knows; -1 in a world of none
        self.leads = False  # this node coordinates, as far as it knows
        self.candidates: dict[NodeId, str] = {}  # hosts that ask to become members, with their racks ("" for none)
        self.faults = Counter[NodeId]()  # processes that each host has lost and replaced, as far as this node knows

        # Words and deeds of this node.
        self.actions: list[Action] = []
        self.loopback: deque[AnyMessage] = deque()
        self.ended = False
        self.changed = False  # something here that the coordinator has not heard of yet

        # Training.
        self.committed: Step = NO_STEP  # in this generation
        self.newest_committed: Step = NO_STEP  # in this history: `committed`, or the restore step until there is one
        self.every = policy.begins_every  # how many steps snapshots are apart, as far as this node knows
        self.chain = self.begun_chain()  # the snapshots of this generation, as far as this node knows them
        self.to_store: Step = NO_STEP  # the newest step of this generation that was to be written to disk,
        self.stored: Step = NO_STEP  # and that all have written
        self.moved_at = NEVER  # by `awake`: when a step was last committed, or training or this generation began
        self.training = False
        self.has_trained = False  # in this generation or one before it: the script must not begin again
        self.checkpoint = Checkpoint()  # the newest one known here

        # The way out of this generation.
        self.stuck = ""  # why this generation cannot go on as it is, as far as this node is concerned
        self.broken: tuple[NodeId, ...] = ()  # the other end of the training connection that broke (itself: not known)
        self.swapping = False  # this generation is fenced here and the next one is not decided yet
        self.swap_since = 0.0
        self.entered_at = 0.0  # when this generation began here
        self.interrupted_s = float("inf")  # from then until all ranks were in training again
        self.patient_since = 0.0  # when it was last told to wait for a decision, or began to, by `awake`
        self.waiting = False  # the coordinator (perhaps one before it) waits for a host to join

        # Contact with a majority (contact.py).
        self.contact_at = 0.0  # until then, by our clock, a majority has been in contact with us for certain
        self.echo: tuple[NodeId, float] = (node, NEVER)  # whose the newest Status is, and its `sent_at`

        # Written by one of the parts.
        self.step_s = 0.0  # the time between the two newest commits, where this node coordinates
        self.unproven: frozenset[Rank] = frozenset()
        """Ranks run by other processes than before, and of which too few steps were committed when the newest plan was
        decided. Each node is right about its own; a host that has joined takes all for new."""
        self.replaced: dict[Rank, Generation] = {}  # when the process here was ended for its collectives
        self.paused = False  # this node's workers are stopped for want of contact

    # -- the world and the view of its members -----------------------------------------------------------------

    def form(self, world: World, resumes: Step = NO_STEP) -> None:
        self.world, self.formed = world, True
        if resumes != NO_STEP:
            self.resuming, self.begins_at_top, self.has_trained = True, False, True
            self.learn_committed(resumes)
        self.contact_at = self.formed_at = self.now
        self.moved_at = self.awake
        self.watch.unheard = set(world.members) - {self.node}
        self._find_suspects()

    def enter(self, decided: Decided, asked_at: float) -> None:
        """Begin the generation that was `decided` later than at `asked_at`."""
        plan = decided.plan
        if not self.formed:
            self.formed, self.formed_at = True, asked_at
        self.world, self.decided, self.plan = plan.world, decided, plan
        self.faults.update(plan.world.node_of[rank] for rank in plan.lost_ranks)
        self.begins_at_top, self.resuming = plan.restore_step == NO_STEP, False
        self.committed = self.to_store = self.stored = NO_STEP
        self.newest_committed = plan.restore_step  # what was committed after it is of a history that did not happen
        self.every = plan.every
        self.chain = self.begun_chain()
        self.training, self.has_trained = False, self.has_trained or not self.begins_at_top
        self.entered_at, self.interrupted_s = self.now, float("inf")
        self.moved_at = self.awake
        self.stuck, self.broken = "", ()
        self.swapping = self.waiting = False
        self.contact_at, self.echo = max(self.contact_at, asked_at), (self.node, NEVER)
        self.report_suspects(Prepare(Ballot(plan.world.generation, 0, self.node), ()))

    def suspect(self, node: NodeId, reason: str, silent: bool = False) -> None:
        """Count `node` as lost, by our own evidence; the first reason stays."""
        watch = self.watch
        if not silent:
            watch.silent.discard(node)
        if node not in watch.evidence:
            if silent:
                watch.silent.add(node)
            watch.evidence[node] = reason
            self._find_suspects()

    def clear(self, node: NodeId) -> None:
        """Drop the evidence about `node`: a silence is over, or one that is no member asks anew."""
        self.watch.silent.discard(node)
        if self.watch.evidence.pop(node, None) is not None:
            self._find_suspects()

    def report_suspects(self, prepare: Prepare) -> None:
        self.reported = prepare
        self._find_suspects()

    def _find_suspects(self) -> None:
        """Find the lost members and the coordinator again. The cost grows with the evidence only."""
        evidence, proposer, places = self.watch.evidence, self.reported.ballot.node, self.world.positions
        reported = () if proposer in evidence else self.reported.lost
        known = {**dict.fromkeys(reported, f"counted as lost by node {proposer}"), **evidence}
        self.suspects = {node: known[node] for node in sorted(known.keys() & places.keys(), key=places.__getitem__)}
        self.coordinator = next((node for node in self.world.seniority if node not in self.suspects), -1)
        self.leads = self.coordinator == self.node

    def is_silent(self, suspect: NodeId) -> bool:
        """Return whether nothing but silence speaks against `suspect`, as far as we know."""
        watch = self.watch
        return suspect in watch.silent or (suspect not in watch.evidence and suspect in self.reported.silent)

    @property
    def living(self) -> tuple[NodeId, ...]:
        suspects, members = self.suspects, self.world.members
        return tuple(node for node in members if node not in suspects) if suspects else members

    @property
    def joinable(self) -> tuple[NodeId, ...]:
        """The candidates that were heard of lately."""
        return tuple(node for node in sorted(self.candidates) if self.watch.hears(node, self.awake))

    @property
    def lost_ranks(self) -> tuple[Rank, ...]:
        return tuple(rank for rank, node in enumerate(self.world.node_of) if node in self.suspects)

    @property
    def in_contact(self) -> bool:
        """Return whether a majority can still be certain not to have replaced this node."""
        return self.now - self.contact_at < self._lease_s

    @property
    def cut_off(self) -> bool:
        """Return whether others may have gone on without this node, or ended the job."""
        return not self.in_contact and not self.world.is_quorum((self.node,), self.policy.witness)

    def can_decide_without(self, lost: Collection[NodeId]) -> bool:
        """Return whether all members but `lost` can decide, if need be with the witness's help."""
        half = 2 * len(lost) <= len(self.world.members)
        return self.world.is_quorum_without(lost) or (self.policy.witness and half)

    # -- what this node learns -----------------------------------------------------------------------------------

    def begun_chain(self) -> Chain:
        """Make this generation's chain as all know it when it begins."""
        first = max(self.plan.restore_step, 0) if self.plan is not None else 0
        return Chain(first, self.every, self.policy.mirror_every != AUTO)

    @property
    def next_snapshot(self) -> Step:
        """The step that is to be committed next, as far as this node knows."""
        found = self.chain.after(self.newest_committed)
        return found if found != NO_STEP else self.newest_committed + 1

    @property
    def chooses(self) -> bool:
        """Return whether this node says which steps are snapshots."""
        return self.leads and self.world.seniority[0] == self.node

    def follow(self, coordinator: NodeId, status: Status) -> None:
        """Take over what a coordinator says of this generation, and tell the workers what is news."""
        self.echo = (coordinator, status.sent_at)
        self.contact_at = max(self.contact_at, status.certain)
        if self.swapping:
            if status.waiting:
                self.waiting = True
                self.be_patient()
            return
        if status.training:
            self.begin_training()
        is_news = self.chain.learn(status.snapshots, status.void)
        if status.snapshots:
            self.every = status.every
        if status.committed > self.committed:
            self.committed, self.moved_at = status.committed, self.awake
            self.learn_committed(status.committed)
            self.chain.forget_before(status.committed)
            self.act(Commit(status.committed, status.snapshots, status.void))
        elif is_news:
            self.act(Announce(status.snapshots, status.void))
        if status.to_store > self.to_store:
            self.to_store = status.to_store
            self.act(WriteStep(status.to_store))
        if status.stored > self.stored:
            self.stored = status.stored
            self.act(StepStored(status.stored))

    def learn(self, promise: Promise) -> None:
        self.learn_committed(promise.committed)
        self.has_trained = self.has_trained or promise.training
        self.learn_checkpoint(promise.checkpoint)

    def learn_committed(self, step: Step) -> None:
        self.newest_committed = max(self.newest_committed, step)

    def learn_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Note a checkpoint. Returns: whether it is the newest one."""
        before, self.checkpoint = self.checkpoint, max(self.checkpoint, checkpoint)
        return self.checkpoint != before

    def begin_training(self) -> None:
        if not self.training:
            self.interrupted_s, self.moved_at = self.now - self.entered_at, self.awake
        self.training = self.has_trained = True

    # -- the way out of this generation --------------------------------------------------------------------------

    def fence_for(self, generation: Generation) -> None:
        """Interrupt the workers of older generations; what they hold stays as it is."""
        self.swapping, self.swap_since = True, self.now
        self.be_patient()
        self.act(AbortWorkers(generation))

    def be_patient(self) -> None:
        """Wait for a decision from now on."""
        self.patient_since = self.awake

    def wait_for_host(self) -> None:
        self.waiting = True

    def get_stuck(self, reason: str, broken: tuple[NodeId, ...] = ()) -> None:
        self.changed, self.stuck, self.broken = True, reason, self.broken or broken

    # -- the ways to speak ---------------------------------------------------------------------------------------

    def note(self, changed: bool = True) -> bool:
        """Have it said with the next report that something here has changed, if it has."""
        self.changed = self.changed or changed
        return changed

    def forget_news(self) -> None:
        self.changed = False

    def take_actions(self) -> list[Action]:
        actions, self.actions = self.actions, []
        return actions

    def act(self, action: Action) -> None:
        if not self.ended:
            self.actions.append(action)

    def emit(self, event: Event) -> None:
        self.act(Emit(event))

    def send(self, to: NodeId, message: AnyMessage) -> None:
        if to == self.node:
            self.loopback.append(message)
        else:
            self.act(Send(to, message))

    def broadcast(self, message: AnyMessage) -> None:
        """Send it to every member, oneself and those believed lost included (they shall learn of it if they can)."""
        for node in self.world.members:
            self.send(node, message)

    # -- the end -----------------------------------------------------------------------------------------------

    def stop(
        self, reason: str, exit_code: int = EXIT_UNRECOVERABLE, lost_ranks: tuple[Rank, ...] = (), alone: bool = False
    ) -> None:
        """Stop the job, or this node `alone`, with a verdict that says what is left of it."""
        saved = self.checkpoint
        left = f"newest checkpoint: step {saved.step} in {saved.path}" if saved.path else "no checkpoint was saved"
        cause = Unrecoverable(f"{reason}; {left}", lost_ranks, self.newest_committed)
        self.conclude(Verdict(self.world.generation, exit_code, cause.reason, cause), alone)

    def give_up(self, reason: str) -> None:
        """Stop this node alone: it cannot decide, and does not know whether others can."""
        self.stop(reason, lost_ranks=self.lost_ranks, alone=True)

    def conclude(self, verdict: Verdict, alone: bool = False) -> None:
        """Leave by a verdict. Pass on one that is for all, once: whoever sent it may have died half-way."""
        for node in () if alone else (*self.world.members, *sorted(self.candidates)):
            if node != self.node:
                self.send(node, verdict)
        cause = verdict.cause
        if verdict.exit_code == 0 and cause is None:
            self.emit(JobFinished())
        else:
            lost_ranks, newest = (cause.lost_ranks, cause.newest_committed) if cause else ((), self.newest_committed)
            self.emit(JobStopped(verdict.exit_code, verdict.reason, lost_ranks, newest))
        self._leave(Leave(verdict.exit_code, verdict.reason, None if alone else verdict))

    def resign(self, reason: str) -> None:
        """Leave, and have the others replace this node at once: it cannot go on."""
        others = [node for node in self.living if node != self.node]
        if self.formed and not others:
            self.stop(f"the only node is lost: {reason}", lost_ranks=tuple(range(len(self.world.node_of))))
            return
        for node in others:
            self.send(node, NodeFailed(self.world.generation, self.node, reason))
        self.fence(reason)

    def fence(self, reason: str) -> None:
        """Leave the job; the others may go on without this node."""
        self.emit(NodeFenced(reason))
        self._leave(Leave(EXIT_FENCED, reason))

    def _leave(self, action: Leave) -> None:
        self.act(action)
        self.loopback.clear()
        self.ended = True
