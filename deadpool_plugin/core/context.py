"""State that the parts of one node's controller share: the world, the view of the others, and the ways to speak.

Rules of this file: a message to oneself goes through `loopback` and is handled like any other, in the same step; after
`conclude` or `fence` nothing is said any more. May import everything of core but the controller's other parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

import msgspec

from .api import Action, Emit, Leave, Send
from .events import Event, JobFinished, JobStopped, NodeFenced
from .membership import is_quorum, is_quorum_without
from .messages import AnyMessage, Decided, Promise, Verdict
from .policy import Policy, Timing
from .suspicion import Watch
from .types import (
    EXIT_FENCED,
    EXIT_UNRECOVERABLE,
    NEVER,
    NO_STEP,
    Checkpoint,
    Generation,
    NodeId,
    Rank,
    Step,
    SwapPlan,
    Unrecoverable,
    World,
)


class Hearsay(msgspec.Struct, frozen=True):
    """The nodes that the proposer we last promised counts as lost, and those of them that are only silent."""

    proposer: NodeId
    lost: Mapping[NodeId, str] = {}
    silent: tuple[NodeId, ...] = ()


class Standing(msgspec.Struct, frozen=True):
    """The members of a world as one node sees them. `suspects`: who is lost, and why. `coordinator`: the lowest living
    one, -1 in a world of none. `leads`: it is this node."""

    suspects: Mapping[NodeId, str]
    coordinator: NodeId
    leads: bool


def standing_of(node: NodeId, world: World, evidence: Mapping[NodeId, str], hearsay: Hearsay) -> Standing:
    """Derive the standing of `node` from its `evidence` and `hearsay`. The cost grows with the evidence only."""
    known = evidence if hearsay.proposer in evidence else {**hearsay.lost, **evidence}
    places = world.positions
    suspects = {node: known[node] for node in sorted(known.keys() & places.keys(), key=places.__getitem__)}
    coordinator = next((node for node in world.seniority if node not in suspects), -1)
    return Standing(suspects, coordinator, coordinator == node)


class Context:
    """The shared state of one controller."""

    def __init__(self, node: NodeId, timing: Timing, policy: Policy) -> None:
        self.node = node
        self.timing = timing
        self.policy = policy
        self.now = 0.0
        self.world = World(generation=0, node_of=())
        self.decided: Decided | None = None
        """The decision that began this generation; None in generation 0."""
        self.watch = Watch()
        self.hearsay = Hearsay(node)
        """Void if its proposer is lost itself: of two nodes that have lost each other only one shall go."""
        self.candidates: dict[NodeId, str] = {}
        """Hosts that are no members and ask to become some, each with its rack ("" if it stands alone)."""
        self.actions: list[Action] = []
        self.loopback: deque[AnyMessage] = deque()
        self.ended = False
        self.committed: Step = NO_STEP
        """In this generation."""
        self.newest_committed: Step = NO_STEP
        """In this history: `committed`, or the restore step of the newest plan until a step is committed after it."""
        self.step_s = 0.0
        """The time between the two newest commits, where this node coordinates."""
        self.training = False
        self.has_trained = False
        """Training has begun in this generation or in one before it: the script must not begin again."""
        self.checkpoint = Checkpoint()
        """The newest one known here."""
        self.fenced_for: Generation = 0
        """The generation this node's workers were last aborted for."""
        self.swap_since = 0.0
        self.waiting = False
        """The coordinator (perhaps one before it) waits for a host to join."""
        self.stalls: list[Step] = []
        """The committed step at each stall that this node saw as coordinator, as far as they follow each other soon."""
        self.unproven: frozenset[Rank] = frozenset()
        """Ranks run by other processes than before, and of which too few steps were committed when the newest plan was
        decided. Each node is right about its own; a host that has joined takes all for new."""
        self.replaced: dict[Rank, Generation] = {}
        """Those of this node whose process was ended for the collectives it had issued, and in which generation."""
        self.stuck = ""
        """Why this generation cannot go on as it is, as far as this node is concerned; "" if it can."""
        self.broken: tuple[NodeId, ...] = ()
        """The other end of the training connection that broke in this generation (this node itself if that is not
        known); () if none did."""
        self.contact_at = 0.0
        """Until then, by our clock, a majority has been in contact with us for certain (self_fencing.py)."""
        self.formed_at = NEVER
        """When this node knew of its first world, or asked to join: until then nobody had heard of it for certain."""
        self.paused = False
        """This node's workers are stopped for want of contact."""
        self.changed = False
        """Something here that the coordinator has not heard of yet."""
        self.echo: tuple[NodeId, float] = (node, NEVER)
        """The newest Status of this generation: whose, and when it was sent by that node's clock."""
        self.patient_since = 0.0
        """Since when this node has waited for a decision that nobody has told it to wait for."""
        self._known: tuple[World, Hearsay, int] | None = None
        self._standing = standing_of(node, self.world, {}, self.hearsay)

    @property
    def formed(self) -> bool:
        return bool(self.world.node_of)

    @property
    def plan(self) -> SwapPlan | None:
        """The plan this generation was decided by; None in generation 0."""
        return self.decided.plan if self.decided is not None else None

    @property
    def swapping(self) -> bool:
        """This generation is fenced here and the next one is not decided yet."""
        return self.fenced_for > self.world.generation

    @property
    def begins_at_top(self) -> bool:
        """Return whether the script begins from its top in this generation."""
        return self.plan is None or self.plan.restore_step == NO_STEP

    @property
    def standing(self) -> Standing:
        """Find the lost nodes and the coordinator. Computed again only when the evidence has changed."""
        known = (self.world, self.hearsay, self.watch.findings)
        if known != self._known:
            self._known = known
            self._standing = standing_of(self.node, self.world, self.watch.evidence, self.hearsay)
        return self._standing

    @property
    def suspects(self) -> Mapping[NodeId, str]:
        """The members that are lost, by our own evidence or by hearsay, each with the reason."""
        return self.standing.suspects

    def is_silent(self, suspect: NodeId) -> bool:
        """Return whether nothing but silence speaks against `suspect`, as far as we know."""
        watch = self.watch
        return suspect in watch.silent or (suspect not in watch.evidence and suspect in self.hearsay.silent)

    @property
    def living(self) -> tuple[NodeId, ...]:
        suspects = self.suspects
        return tuple(node for node in self.world.members if node not in suspects)

    @property
    def joinable(self) -> tuple[NodeId, ...]:
        """The candidates that were heard of lately."""
        if not self.candidates:
            return ()
        limit_s = self.timing.silent_after_s
        heard = self.watch.heard
        return tuple(n for n in sorted(self.candidates) if self.now - heard.get(n, self.now) < limit_s)

    @property
    def coordinator(self) -> NodeId:
        """The lowest living member, as far as this node knows."""
        return self.standing.coordinator

    @property
    def leads(self) -> bool:
        return self.standing.leads

    @property
    def in_contact(self) -> bool:
        """Return whether a majority can still be certain not to have replaced this node."""
        return self.now - self.contact_at < self.timing.lease_s

    @property
    def cut_off(self) -> bool:
        """Return whether others may have gone on without this node, or ended the job."""
        return not self.in_contact and not is_quorum(self.world, (self.node,), self.policy.witness)

    @property
    def has_quorum(self) -> bool:
        """Return whether those who live can decide."""
        return self.can_decide_without(self.suspects)

    def can_decide_without(self, lost: Collection[NodeId]) -> bool:
        """Return whether all members but `lost` can decide, if need be with the witness's help."""
        half = 2 * len(lost) <= len(self.world.members)
        return is_quorum_without(self.world, lost) or (self.policy.witness and half)

    def note(self, changed: bool) -> None:
        self.changed = self.changed or changed

    def get_stuck(self, reason: str) -> None:
        self.changed, self.stuck = True, reason

    def learn(self, promise: Promise) -> None:
        """Take over what another member knows of the job's past."""
        self.newest_committed = max(self.newest_committed, promise.committed)
        self.has_trained = self.has_trained or promise.training
        self.checkpoint = max(self.checkpoint, promise.checkpoint)

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
        """To every member, oneself and those believed lost included (they shall learn of it if they can)."""
        for node in self.world.members:
            self.send(node, message)

    def lost_ranks(self) -> tuple[Rank, ...]:
        suspects = self.suspects
        return tuple(rank for rank, node in enumerate(self.world.node_of) if node in suspects)

    # -- the end -----------------------------------------------------------------------------------------------

    def stop(self, reason: str, exit_code: int = EXIT_UNRECOVERABLE, lost_ranks: tuple[Rank, ...] = ()) -> None:
        """The job cannot go on (or shall not): a verdict that says what is left of it."""
        self.conclude(self._verdict(reason, exit_code, lost_ranks))

    def give_up(self, reason: str, lost_ranks: tuple[Rank, ...]) -> None:
        """Stop this node alone: it cannot decide, and does not know whether others can."""
        self._say_and_leave(self._verdict(reason, EXIT_UNRECOVERABLE, lost_ranks))

    def _verdict(self, reason: str, exit_code: int, lost_ranks: tuple[Rank, ...]) -> Verdict:
        saved = self.checkpoint
        left = f"newest checkpoint: step {saved.step} in {saved.path}" if saved.path else "no checkpoint was saved"
        cause = Unrecoverable(f"{reason}; {left}", lost_ranks, self.newest_committed)
        return Verdict(self.world.generation, exit_code, cause.reason, cause)

    def conclude(self, verdict: Verdict) -> None:
        """The job ends: pass the verdict on once (whoever sent it may have died half-way) and leave."""
        for node in (*self.world.members, *sorted(self.candidates)):
            if node != self.node:
                self.send(node, verdict)
        self._say_and_leave(verdict, verdict)

    def _say_and_leave(self, verdict: Verdict, of_all: Verdict | None = None) -> None:
        if verdict.exit_code == 0 and verdict.cause is None:
            self.emit(JobFinished())
        else:
            lost_ranks = verdict.cause.lost_ranks if verdict.cause else ()
            newest = verdict.cause.newest_committed if verdict.cause else self.newest_committed
            self.emit(JobStopped(verdict.exit_code, verdict.reason, lost_ranks, newest))
        self._leave(verdict.exit_code, verdict.reason, of_all)

    def fence(self, reason: str) -> None:
        """This node is out; the others may go on without it."""
        self.emit(NodeFenced(reason))
        self._leave(EXIT_FENCED, reason)

    def _leave(self, exit_code: int, reason: str, verdict: Verdict | None = None) -> None:
        self.act(Leave(exit_code, reason, verdict))
        self.loopback.clear()
        self.ended = True
