"""One node's part of the protocol: `Controller.step(input, now)` returns what the caller must do now.

The caller's obligations, in this order: feed inputs one at a time, in the order in which they happened, `now` never
going back; carry out the returned actions in their order before the next input; feed `Ticked` at least four times per
heartbeat interval; deliver each peer's messages in the order they were sent, or report LinkLost; after `Leave` nothing
is returned any more. AbortWorkers always comes before the Promise or Reconfigure it belongs to.

Of this node's processes: feed a death when you notice it, once, and never that of a process you have ended or replaced
yourself; feed StoreLost after it for every store it had offered.

Rules of this file: inputs are dispatched here and decided in processes, failures and rehearsing (this node),
message_handlers and coordination (between swaps), swaps, and joining; a duplicate, late or foreign message never harms.
May import everything of core, nothing else.
"""

from __future__ import annotations

from . import events
from .api import (
    Action,
    CallsRead,
    Claimed,
    Input,
    Joining,
    LinkLost,
    NodeGivenUp,
    Received,
    Reconfigure,
    SpareFailed,
    SpareRehearsed,
    SpareUnable,
    StopRequested,
    Ticked,
    WorldFormed,
)
from .context import Context
from .coordination import Coordination
from .joining import Candidates, JoinAttempt
from .message_handlers import MessageHandlers
from .messages import AnyMessage, Decided, Goodbye, JoinRequest, NodeFailed, Report, Verdict, generation_of
from .pairing import Pairing, judge_newcomers
from .partial_partition import PartialPartition
from .phases import IllegalMove, Phase, moved
from .policy import Policy, Timing
from .processes import STORE_GONE, Failures, Inventory, Processes
from .rehearsing import Rehearsing
from .self_fencing import SelfFencing
from .swaps import Swaps
from .types import NEVER, Generation, NodeId, Rank, Step, World


class Controller:
    """The state machine of one node. Thread: one; it never blocks."""

    def __init__(self, node: NodeId, timing: Timing, policy: Policy = Policy()) -> None:
        self._ctx = Context(node, timing, policy)
        self._inventory = Inventory()
        self._failures = Failures(self._ctx)
        self._processes = Processes(self._ctx, self._inventory, self._failures)
        self._partition = PartialPartition(self._ctx)
        self._self_fencing = SelfFencing(self._ctx)
        self._rehearsing = Rehearsing(self._ctx, self._inventory, self._failures)
        self._candidates = Candidates(self._ctx)
        self._joining: JoinAttempt | None = None
        self.phase = Phase.OUTSIDE
        """Where this node stands; see phases.py."""
        self._begin_generation()
        self._early: list[Received] = []
        self._reported_at = 0.0
        self._own_pause_s = timing.own_pause_s
        self._watching: tuple[Generation, NodeId] | None = None

    # -- what the caller may look at ---------------------------------------------------------------------------

    @property
    def world(self) -> World | None:
        """The last decided world, None before WorldFormed."""
        return self._ctx.world if self._ctx.formed else None

    @property
    def generation(self) -> Generation:
        return self._ctx.world.generation

    @property
    def committed(self) -> Step:
        """The newest committed step of this generation this node knows of."""
        return self._ctx.committed

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

    @property
    def ended(self) -> bool:
        return self._ctx.ended

    # -- one input ---------------------------------------------------------------------------------------------

    def step(self, event: Input, now: float) -> list[Action]:
        """Take in `event` at time `now` and say what to do about it, in order."""
        ctx = self._ctx
        if ctx.ended:
            return []
        gap_s, ctx.now = now - ctx.now, now
        if gap_s > self._own_pause_s:
            ctx.watch.excuse_pause(gap_s)
            ctx.be_patient(gap_s)
            self._swaps.proposer.excuse_pause(gap_s)
            self._coordination.excuse_pause(gap_s)
        self._take_in(event)
        self._mark()
        if reason := self._self_fencing.look(gap_s):
            ctx.get_stuck(reason)
            self._swaps.voter.fence_generation()
            self._mark()
        self._settle()
        return ctx.take_actions() if ctx.actions else []

    def _take_in(self, event: Input) -> None:
        ctx = self._ctx
        match event:
            case Received():
                self._received(event)
            case Ticked():
                self._ticked()
            case LinkLost():
                self._link_lost(event)
            case WorldFormed(world):
                self._only_outside(event)
                self._world_formed(world)
            case Joining(members, rack):
                self._only_outside(event)
                self._joining = JoinAttempt(ctx, members, rack)
            case CallsRead(generation, ranks):
                self._pairing.read(generation, ranks)
            case SpareRehearsed(local_slot, rank):
                self._rehearsing.done(local_slot, rank)
            case SpareFailed(local_slot, rank, reason):
                self._rehearsing.failed(local_slot, rank, reason)
            case SpareUnable(reason):
                self._rehearsing.unable(reason)
            case NodeGivenUp(reason):
                self._failures.give_up(reason)
            case StopRequested(reason, exit_code):
                ctx.stop(reason, exit_code)
            case Claimed(plan):
                self._swaps.proposer.claimed(plan)
            case _:
                if self._processes.take_in(event) and ctx.swapping:  # too late for a report
                    self._swaps.voter.answer()

    def _mark(self) -> None:
        """Move to the phase that what the parts know amounts to."""
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
            self.phase = moved(self.phase, phase)

    def _settle(self) -> None:
        """Handle what this node says to itself, act on evidence and report changes, until nothing is left to do."""
        ctx = self._ctx
        while ctx.formed and not ctx.ended:
            if ctx.loopback:
                self._hear(ctx.node, ctx.loopback.popleft())
                self._mark()
                continue
            self._watch_the_right_ones()
            if self._swaps.react():
                self._mark()
            if ctx.changed and not ctx.ended:
                self._report()
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
            ctx.watch.heard.update(dict.fromkeys(ctx.world.members, ctx.now))
            if ctx.has_trained:
                ctx.watch.unheard.clear()
            ctx.note()

    def _report(self) -> None:
        """Tell the coordinator; while fenced only that this node lives (its promise says the rest)."""
        ctx = self._ctx
        ctx.forget_news()
        self._reported_at = ctx.now
        heard = ctx.echo[1] if ctx.echo[0] == ctx.coordinator else NEVER
        report = Report(
            self.generation,
            checkpoint=ctx.checkpoint,
            stuck=ctx.stuck,
            sent_at=ctx.now,
            heard=heard,
            broken=ctx.broken,
        )
        ctx.send(ctx.coordinator, report if ctx.swapping else self._inventory.fill(report))
        if not ctx.swapping:
            self._failures.say()

    # -- inputs of this node -----------------------------------------------------------------------------------

    def _world_formed(self, world: World) -> None:
        ctx = self._ctx
        ctx.form(world)
        self._begin_generation()
        ctx.note()
        if ctx.leads:
            ctx.emit(events.WorldFormed(world.node_of, world.spares))
        self._hear_early()

    def _hear_early(self) -> None:
        """Handle the messages that came before this node knew the world."""
        early, self._early = self._early, []
        for received in early:
            self._mark()
            if not self._ctx.ended:
                self._received(received)

    def _only_outside(self, event: Input) -> None:
        if self.phase is not Phase.OUTSIDE:
            raise IllegalMove(f"{type(event).__name__} in phase {self.phase.name}: a node meets the others once")

    def _link_lost(self, event: LinkLost) -> None:
        if self._joining is not None:
            self._joining.link_lost(event.node, event.reason)
        self._candidates.forget(event.node)
        ctx = self._ctx
        if event.still and not {ctx.node, event.node} <= set(ctx.world.active):
            return  # a spare holds nobody up until it has to fetch something, and that says so itself
        counts_on_us = ctx.leads and event.node in ctx.world.members
        if event.silent and counts_on_us and ctx.watch.hears(event.node, ctx.now):
            self._partition.hear(ctx.node, event.node)  # its processes run until it is silent, too
            return
        if event.silent and event.node in ctx.watch.silent:
            self._swaps.insist(event.node)
        ctx.suspect(event.node, f"link lost: {event.reason}", event.silent)

    def _ticked(self) -> None:
        ctx = self._ctx
        if self._joining is not None:
            self._joining.tick()
        if not ctx.formed:
            return
        watched = ctx.living if ctx.leads else (ctx.coordinator,)
        for node, reason in ctx.watch.silences(watched, ctx.now).items():
            if node != ctx.node:
                ctx.suspect(node, reason, silent=True)
        self._swaps.tick()
        self._rehearsing.tick()
        if not ctx.ended and (reason := self._coordination.tick()):
            self._swaps.stuck(ctx.node, reason)
        if ctx.now - self._reported_at >= ctx.timing.heartbeat_interval_s:
            ctx.note()

    # -- messages ----------------------------------------------------------------------------------------------

    def _received(self, event: Received) -> None:
        ctx, sender, message = self._ctx, event.sender, event.message
        if not ctx.formed:
            self._received_early(event)
            return
        ctx.watch.hear(sender, ctx.now)
        if sender in ctx.watch.silent and not self._swaps.counts_as_lost(sender):
            ctx.clear(sender)  # nothing has come of its silence here, and nothing need
        generation = generation_of(message)
        if generation > self.generation and not isinstance(message, (Decided, Verdict, Goodbye)):
            ctx.send(sender, Report(self.generation))  # who decided it may have died before it told us
        if isinstance(message, JoinRequest):
            self._candidates.ask(sender, message.rack)
        elif sender in ctx.world.members or isinstance(message, Decided):  # by whom it has taken in
            self._hear(sender, message)
        elif isinstance(message, Goodbye):
            self._candidates.forget(sender)
        elif generation < self.generation:
            self._swaps.bring_up_to_date(sender)

    def _hear(self, sender: NodeId, message: AnyMessage) -> None:
        if isinstance(message, Decided):
            self._on_decided(sender, message)
        else:
            self._handlers.handle(sender, message)

    def _received_early(self, event: Received) -> None:
        if isinstance(event.message, JoinRequest):
            return  # it is said again
        if self._joining is None:
            self._early.append(event)
        elif not self._joining.hear(event.sender, event.message):
            if isinstance(event.message, Decided):
                self._on_decided(event.sender, event.message)
                self._hear_early()
            else:
                self._early.append(event)

    def _on_decided(self, sender: NodeId, message: Decided) -> None:
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
        promised_at = self._swaps.voter.promised_at(message.ballot)
        asked_at = self._joining.first_asked_at if self._joining is not None else promised_at
        before, self._joining = ctx.world, None
        judge_newcomers(ctx, plan, [failure.rank for failure in self._failures.own])
        ctx.enter(message, asked_at)
        if self._inventory.has_lost(plan.store):
            ctx.get_stuck(STORE_GONE)
        self._inventory.begin_generation(plan.restore_step, plan.store)
        self._candidates.begin_generation(before)
        self._failures.begin_generation()
        self._rehearsing.begin_generation()
        self._begin_generation()
        ctx.note()
        for node in plan.lost_nodes:  # whoever lives is not to take the end of this link for a loss
            ctx.send(node, NodeFailed(self.generation, node, f"counted as lost in generation {self.generation}"))
        ctx.act(Reconfigure(plan))

    def _begin_generation(self) -> None:
        """Make anew the parts that live no longer than a generation."""
        ctx, inventory, failures = self._ctx, self._inventory, self._failures
        self._processes.begin_generation()
        self._pairing = Pairing(ctx)
        self._coordination = Coordination(ctx, self._pairing)
        self._swaps = Swaps(ctx, inventory, failures, self._pairing)
        self._handlers = MessageHandlers(
            ctx, inventory, failures, self._rehearsing, self._partition, self._pairing, self._coordination, self._swaps
        )
