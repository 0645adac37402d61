"""One node's part of the protocol: `Controller.step(input, now)` returns what the caller must do now.

The caller's obligations, in this order: feed inputs one at a time, in the order in which they happened, `now` never
going back; carry out the returned actions in their order before the next input; feed `Ticked` at least four times per
heartbeat interval; deliver each peer's messages in the order they were sent, or report LinkLost; after `Leave` nothing
is returned any more. AbortWorkers always comes before the Promise or Reconfigure it belongs to.

Of this node's processes: feed a death when you notice it, once, and never that of a process you have ended or replaced
yourself; feed StoreLost after it for every store it had offered.

Rules of this file: inputs and messages are dispatched here and decided in the parts; a duplicate, late or foreign
message never harms. Whoever speaks of an older generation is told the newest, and nothing else comes of it (but that it
gives itself up); a word of a node that is counted as lost does not count. The table of phases is the truth: a move that
it lacks raises and is a bug of ours, each of its moves is made by some test, and the diagram in README.md shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from . import api, events, messages
from .contact import HostProbes, PartialPartition, SelfFencing
from .context import Context
from .coordination import Coordination
from .messages import AnyMessage, generation_of
from .pairing import Pairing
from .policy import Policy, Timing
from .processes import Processes
from .spares import JoinAttempt, SpareSupply
from .stalls import Stalls
from .swaps import Swaps
from .types import EXIT_SIGNALLED, NEVER, Generation, NodeId, Rank, Step, World


class Phase(Enum):
    """Phase of a node. The value says it to people."""

    OUTSIDE = "has not met the others"
    JOINING = "asks a running job to take it in"
    STARTING = "the script begins"
    RESTORING = "a plan is carried out"
    TRAINING = "all ranks are in training"
    FENCED = "its processes are interrupted, the next world is undecided"
    WAITING = "the same, and a host must join before anything is decided"
    ENDED = "has left"


_LEAVES = {Phase.ENDED: "verdict, or out"}
_FENCES = {Phase.FENCED: "asked to promise, or without contact"}
_TRAINS = {Phase.TRAINING: "all ranks ready"}
_DECIDED = {Phase.RESTORING: "decided", Phase.STARTING: "decided, before training"}
_UNASKED = {Phase.RESTORING: "decided unasked"}

MOVES: Mapping[Phase, Mapping[Phase, str]] = {
    Phase.OUTSIDE: {
        Phase.STARTING: "all have met",
        Phase.RESTORING: "all have met, to resume",
        Phase.JOINING: "met a job that runs",
        **_LEAVES,
    },
    Phase.JOINING: _DECIDED | _LEAVES,
    Phase.STARTING: _TRAINS | _FENCES | _UNASKED | _LEAVES,
    Phase.RESTORING: _TRAINS | _FENCES | _LEAVES,
    Phase.TRAINING: _FENCES | _UNASKED | _LEAVES,
    Phase.FENCED: _DECIDED | {Phase.WAITING: "no spare is left"} | _LEAVES,
    Phase.WAITING: _DECIDED | _LEAVES,
    Phase.ENDED: {},
}


class IllegalMove(Exception):
    """A bug of ours: a node left one phase for another that does not follow it."""


class Controller:
    """The state machine of one node. Thread: one; it never blocks."""

    def __init__(self, node: NodeId, timing: Timing, policy: Policy = Policy()) -> None:
        self._ctx = Context(node, timing, policy)
        self._processes = Processes(self._ctx)
        self._stalls = Stalls(self._ctx)
        self._partition = PartialPartition(self._ctx)
        self._probes = HostProbes(self._ctx)
        self._self_fencing = SelfFencing(self._ctx)
        self._joining: JoinAttempt | None = None
        self._supply = SpareSupply(self._ctx)
        self.phase = Phase.OUTSIDE
        self._early: dict[object, api.Received] = {}
        self._former: set[NodeId] = set()  # members of older generations: none is a candidate
        self._reported_at = 0.0
        self._own_pause_s, self._slept_s = timing.own_pause_s, 0.0
        self._watching: tuple[Generation, NodeId] | None = None
        self._looked = (NEVER, 0.0)  # for want of progress since when others were last looked for, and after how long
        self._started = False  # this generation's workers were told over which store to build groups
        self._begin_generation()

    @property
    def world(self) -> World | None:
        """The last decided world, None before WorldFormed."""
        return self._ctx.world if self._ctx.formed else None

    @property
    def generation(self) -> Generation:
        return self._ctx.world.generation

    @property
    def resumes(self) -> bool:
        """Return whether the job is still to take up the state of an earlier one."""
        return self._ctx.resuming

    @property
    def newest_committed(self) -> Step:
        """The newest step that this node knows to be committed, and that no plan has undone."""
        return self._ctx.newest_committed

    @property
    def leads(self) -> bool:
        """Return whether this node coordinates, as far as it knows; before WorldFormed it speaks for itself."""
        return self._ctx.leads or not self._ctx.formed

    @property
    def awaited(self) -> tuple[Rank, ...]:
        """Ranks whose way to training the coordinator waits for; () on other nodes and while nothing is decided."""
        ctx = self._ctx
        if not (ctx.formed and ctx.leads) or ctx.training or ctx.swapping or ctx.ended:
            return ()
        return self._coordination.unready

    def step(self, event: api.Input, now: float) -> list[api.Action]:
        ctx = self._ctx
        if ctx.ended:
            return []
        gap_s, ctx.now = now - ctx.now, now
        if gap_s > self._own_pause_s:  # what the others sent meanwhile may still be queued
            self._slept_s += gap_s
        ctx.awake = now - self._slept_s
        self._take_in(event)
        self._mark()
        if reason := self._self_fencing.look(gap_s):
            ctx.get_stuck(reason)
            self._swaps.voter.fence_generation()
            self._mark()
        self._settle()
        return ctx.take_actions() if ctx.actions else []

    def _take_in(self, event: api.Input) -> None:
        ctx = self._ctx
        match event:
            case api.Received():
                self._received(event)
            case api.Ticked():
                self._ticked()
            case api.LinkLost():
                self._link_lost(event)
            case api.HostAnswered():
                self._probes.answered(event)
            case api.WorldFormed() | api.Joining() if self.phase is not Phase.OUTSIDE:
                raise IllegalMove(f"{type(event).__name__} in phase {self.phase.name}: a node meets the others once")
            case api.WorldFormed(world, resumes):
                ctx.form(world, resumes)
                self._begin_generation()
                ctx.note()
                if ctx.leads:
                    ctx.emit(events.WorldFormed(world.node_of, world.spares))
                self._hear_early()
            case api.Joining(members, rack):
                self._joining = JoinAttempt(ctx, members, rack)
            case api.CallsRead(generation, ranks, question):
                self._pairing.read(generation, ranks, question)
            case api.NodeGivenUp(reason):
                ctx.resign(reason)
            case api.StopRequested(reason, exit_code):
                ctx.stop(reason, exit_code)
            case api.SpareCommandEnded():
                self._supply.ended(event)
            case api.Claimed(plan):
                self._swaps.claimed(plan)
            case _:
                if self._processes.take_in(event) and ctx.swapping:  # too late for a report
                    self._swaps.voter.answer()

    def _mark(self) -> None:
        ctx = self._ctx
        if ctx.ended:
            phase = Phase.ENDED
        elif not ctx.formed:
            phase = Phase.JOINING if self._joining is not None else Phase.OUTSIDE
        elif ctx.swapping:
            phase = Phase.WAITING if ctx.waiting else Phase.FENCED
        elif ctx.training:
            phase = Phase.TRAINING
        else:
            phase = Phase.STARTING if ctx.begins_at_top else Phase.RESTORING
        if phase is not self.phase:
            if phase not in (moves := MOVES[self.phase]):
                leads_to = [after.name for after in moves]
                raise IllegalMove(f"{self.phase.name} -> {phase.name}; from {self.phase.name} lead {leads_to}")
            self.phase = phase

    def _settle(self) -> None:
        """Handle what this node says to itself, act on evidence and report changes, until nothing is left to do."""
        ctx = self._ctx
        while ctx.formed and not ctx.ended:
            if ctx.loopback:
                self._hear(ctx.node, ctx.loopback.popleft())
                self._mark()
                continue
            self._watch_the_right_ones()
            self._swaps.react()
            self._mark()
            if ctx.changed and not ctx.ended:
                ctx.forget_news()
                self._reported_at = ctx.now
                self._processes.report()
            if not ctx.loopback:
                return

    def _watch_the_right_ones(self) -> None:
        """Count the silence of others from when they report to a new coordinator, not before."""
        ctx = self._ctx
        watching = (ctx.world.generation, ctx.coordinator)
        if watching != self._watching:
            # Their silence was not towards who lets them run; whoever is lower is why this node leads. What was found
            # while the hosts linked up stays found.
            if ctx.leads and self._watching is not None:
                for node in [node for node in ctx.watch.silent if node > ctx.node]:
                    ctx.clear(node)
            self._watching = watching
            ctx.watch.heard.update(dict.fromkeys(ctx.world.members, ctx.awake))
            if ctx.has_trained and not ctx.resuming:
                ctx.watch.unheard.clear()
            ctx.note()

    def _link_lost(self, event: api.LinkLost) -> None:
        ctx, node = self._ctx, event.node
        if self._joining is not None:
            self._joining.link_lost(node, event.reason)
        ctx.candidates.pop(node, None)
        if event.still and not {ctx.node, node} <= set(ctx.world.active):
            return  # a spare holds nobody up until it has to fetch something, and that says so itself
        if event.silent and ctx.leads and node in ctx.world.members and ctx.watch.hears(node, ctx.awake):
            self._partition.hear(ctx.node, node)  # its processes run until it is silent, too
            return
        if event.silent and node in ctx.watch.silent:
            self._swaps.insist(node)
        ctx.suspect(node, event.reason, event.silent)

    def _ticked(self) -> None:
        ctx = self._ctx
        if self._joining is not None:
            self._joining.tick()
        if not ctx.formed:
            return
        watched = ctx.living if ctx.leads else (ctx.coordinator,)
        for node, reason in ctx.watch.silences(watched, ctx.awake):
            if node != ctx.node:
                ctx.suspect(node, reason, silent=True)
        self._probes.tick(watched)
        self._swaps.tick()
        if not (ctx.training or ctx.swapping):
            self._look_around()
        self._processes.rehearsing.tick()
        if not ctx.ended and (reason := self._coordination.tick()):
            self._swaps.stuck(ctx.node, reason)
        self._supply.tick()
        if ctx.now - self._reported_at >= ctx.timing.heartbeat_interval_s:
            ctx.note()

    def _look_around(self) -> None:
        """Find out which other hosts this one cannot reach, if nothing gets on: that may be why. Few have a link.

        Of two hosts the larger looks, as it is the one that begins links; after a patience (nearly half of one if the
        coordinator asks where ranks are), and whenever the time has doubled.
        """
        ctx = self._ctx
        since, looked_s = self._looked
        waited_s = ctx.awake - ctx.moved_at
        first_s = ctx.timing.slow_after_s
        if ctx.training:  # a step was committed here a little later than where it is asked, after 5 s at the least
            first_s = first_s / 2 - ctx.timing.heartbeat_interval_s
        if waited_s >= (2 * looked_s if since == ctx.moved_at else first_s):
            self._looked = ctx.moved_at, waited_s
            others = [node for node in ctx.world.active if node < ctx.node and node not in ctx.suspects]
            if others and ctx.node in ctx.world.active:
                ctx.act(api.LookAround(tuple(sorted(others, reverse=True))))  # so all do not ask the same ones first

    def _received(self, event: api.Received) -> None:
        ctx, sender, message = self._ctx, event.sender, event.message
        if not ctx.formed:
            self._received_early(event)
            return
        ctx.watch.hear(sender, ctx.awake)
        if sender in ctx.watch.silent and not self._swaps.counts_as_lost(sender):
            ctx.clear(sender)  # nothing has come of its silence here, and nothing need
        generation, ours = generation_of(message), ctx.world.generation
        if generation > ours and not isinstance(message, (messages.Decided, messages.Verdict, messages.Goodbye)):
            ctx.send(sender, messages.Report(ours))  # who decided it may have died before it told us
        if isinstance(message, messages.JoinRequest):
            if ctx.decided is not None and (sender in ctx.world.members or sender in self._former):
                ctx.send(sender, ctx.decided)  # it has not heard yet that it is a member, or is one no more
            elif sender not in ctx.world.members:
                ctx.clear(sender)
                ctx.candidates[sender] = message.rack
        elif sender in ctx.world.members or isinstance(message, messages.Decided):  # by whom it has taken in
            self._hear(sender, message)
        elif isinstance(message, messages.Goodbye):
            ctx.candidates.pop(sender, None)
        elif generation < ours:
            self._swaps.bring_up_to_date(sender)

    def _received_early(self, event: api.Received) -> None:
        """Hear a member of the job that this node asks to join; keep what comes before it knows a world."""
        joining, message = self._joining, event.message
        if isinstance(message, messages.JoinRequest) or (joining is not None and joining.hear(event.sender, message)):
            return  # a request is said again
        if joining is not None and isinstance(message, messages.Decided):
            self._on_decided(event.sender, message)
            self._hear_early()
        else:  # a beat says all that the one before it did, and whoever links up still may hear many
            is_beat = isinstance(message, messages.Report | messages.Status)
            key = (event.sender, type(message)) if is_beat else len(self._early)
            self._early.pop(key, None)
            self._early[key] = event

    def _hear_early(self) -> None:
        early, self._early = self._early, {}
        for received in early.values():
            self._mark()
            if not self._ctx.ended:
                self._received(received)

    def _hear(self, sender: NodeId, message: AnyMessage) -> None:
        ctx, swaps = self._ctx, self._swaps
        match message:
            case messages.Report() | messages.Status() | messages.RankFailed() if message.generation < self.generation:
                swaps.bring_up_to_date(sender)
            case messages.Report():
                self._report(sender, message)
            case messages.Status():
                self._status(sender, message)
            case messages.NodeFailed():
                self._node_failed(sender, message)
            case messages.Probe():
                self._probes.hear(sender, message)
            case messages.RankFailed():
                self._processes.hear_gone(sender, message)
            case messages.Start(world, store):
                if world.generation == self.generation and ctx.begins_at_top and not (self._started or ctx.swapping):
                    self._started = True
                    self._processes.consume(store)
                    ctx.act(api.StartWorkers(world, store))
            case messages.Rehearse():
                self._processes.rehearsing.ordered(message)
            case messages.Compare(generation, question, stacks):
                if generation == ctx.world.generation:
                    ctx.act(api.ReadCalls(generation, question, stacks))
                    if question and not ctx.swapping:
                        self._look_around()
            case messages.Calls():
                (self._stalls if message.question else self._pairing).hear(sender, message)
            case messages.Replace():
                self._pairing.replace(message)
            case messages.Prepare():
                swaps.voter.prepare(sender, message)
            case messages.Promise():
                swaps.promise(sender, message)
            case messages.Propose():
                swaps.voter.propose(sender, message)
            case messages.Accepted():
                swaps.accepted(sender, message)
            case messages.Refused():
                swaps.refused(message)
            case messages.Decided():
                self._on_decided(sender, message)
            case messages.Verdict():
                self._verdict(sender, message)
            case messages.Goodbye():
                ctx.suspect(sender, "it has left the job")

    def _report(self, sender: NodeId, message: messages.Report) -> None:
        ctx = self._ctx
        if message.generation != ctx.world.generation:
            return
        if not ctx.leads:
            # `sender` takes this node for the coordinator: it knows already of losses that this node is yet to notice,
            # and is not to take the silence meanwhile for one more.
            ctx.send(sender, messages.Status(self.generation, ctx.committed, ctx.training, ctx.waiting, ctx.now))
        self._coordination.hear(sender, message)
        is_stuck = message.stuck and not ctx.swapping
        if is_stuck and not (message.broken and self._partition.broke(sender, message.broken[0])):
            self._swaps.stuck(sender, message.stuck)

    def _status(self, sender: NodeId, message: messages.Status) -> None:
        ctx = self._ctx
        if message.generation != ctx.world.generation or sender in ctx.watch.evidence:
            return
        if sender in ctx.suspects:  # a rival of our coordinator, which is not to take the silence for a loss meanwhile
            ctx.send(sender, messages.Report(ctx.world.generation))
        else:
            ctx.follow(sender, message)

    def _node_failed(self, sender: NodeId, message: messages.NodeFailed) -> None:
        ctx = self._ctx
        suspects = ctx.suspects
        if message.generation < ctx.world.generation and message.node != sender:
            self._swaps.bring_up_to_date(sender)  # who was lost then has been seen to, or is told of again
        elif message.node == ctx.node and message.generation > ctx.world.generation:
            ctx.fence(message.reason)
        elif message.node == ctx.node and sender in ctx.watch.evidence:
            return  # each counts the other as lost: the one whose plan is decided goes on, else both would go
        elif message.node == ctx.node:
            self._swaps.voter.suspected(sender, message.reason, message.silent)
        elif message.silent and ctx.watch.hears(message.node, ctx.awake):
            self._partition.hear(sender, message.node)
        elif sender in suspects and message.node != sender:
            ctx.send(sender, messages.NodeFailed(ctx.world.generation, sender, suspects[sender], ctx.is_silent(sender)))
        elif message.node in ctx.world.members:
            ctx.suspect(message.node, message.reason, message.silent)

    def _verdict(self, sender: NodeId, message: messages.Verdict) -> None:
        ctx = self._ctx
        if message.exit_code > EXIT_SIGNALLED:
            ctx.conclude(message)  # a person wants the job to end, in whatever generation that was said
        elif message.generation < ctx.world.generation:
            # `sender` had not heard of this generation and is lost to it; so many that the rest could not decide any
            # more have ended the job.
            ctx.suspect(sender, f"it ended in generation {message.generation}: {message.reason}")
            self._ended |= {sender} & set(ctx.world.members)
            if not ctx.can_decide_without(self._ended):
                ctx.conclude(message)
        # That all scripts have ended well is true even from a suspected node, unless we accepted a plan that others
        # may already be executing.
        elif sender not in ctx.suspects or (message.exit_code == 0 and self._swaps.voter.acceptor.accepted is None):
            ctx.conclude(message)

    def _on_decided(self, sender: NodeId, message: messages.Decided) -> None:
        """Begin a new generation: forget the old one's books and act."""
        ctx, plan = self._ctx, message.plan
        if plan.world.generation <= self.generation:
            return
        if ctx.node not in plan.world.members:
            ctx.fence(f"not a member of generation {plan.world.generation}: counted as lost ({sender} says)")
            return
        if not ctx.swapping or plan.world.generation > self.generation + 1:
            ctx.fence_for(plan.world.generation)
        self._self_fencing.resume()
        # The plan was decided after this node had promised (or asked to join), and before anybody watched its silence.
        promised_at = self._swaps.voter.promised_at.get(message.ballot, NEVER)
        asked_at = self._joining.first_asked_at if self._joining is not None else promised_at
        before, self._joining = ctx.world, None
        self._pairing.judge_newcomers(plan)
        ctx.enter(message, asked_at)
        self._supply.joined(len(plan.joined))
        self._former |= before.positions.keys() - ctx.world.positions.keys()
        for node in [node for node in ctx.candidates if node in ctx.world.positions or node in self._former]:
            ctx.candidates.pop(node)
        self._begin_generation()
        ctx.note()
        for node in plan.lost_nodes:  # whoever lives is not to take the end of this link for a loss
            reason = f"counted as lost in generation {self.generation}"
            ctx.send(node, messages.NodeFailed(self.generation, node, reason))
        ctx.act(api.Reconfigure(plan))

    def _begin_generation(self) -> None:
        """Make anew the parts that live no longer than a generation."""
        ctx = self._ctx
        self._processes.begin_generation()
        self._pairing = Pairing(ctx, self._processes)
        self._stalls.begin_generation(self._pairing)
        self._coordination = Coordination(ctx, self._pairing, self._stalls)
        self._swaps = Swaps(ctx, self._processes, self._pairing)
        self._started = False
        self._ended: set[NodeId] = set()  # members that have ended the job in an older generation
