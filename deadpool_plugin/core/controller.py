"""One node's part of the protocol: `Controller.step(input, now)` returns what the caller must do now.

The caller's obligations, in this order: feed inputs one at a time, in the order in which they happened, `now` never
going back; carry out the returned actions in their order before the next input; feed `Ticked` at least four times per
heartbeat interval; deliver each peer's messages in the order they were sent, or report LinkLost; after `Leave` nothing
is returned any more. AbortWorkers always comes before the Promise or Reconfigure it belongs to.

Of this node's processes: feed a death when you notice it, once, and never that of a process you have ended or replaced
yourself; feed StoreLost after it for every store it had offered.

Rules of this file: inputs and messages are dispatched here and decided in processes, failures and rehearsing (this
node), hearing and coordination (between swaps), swaps, and joining; a duplicate, late or foreign message never harms.
May import everything of core, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from . import events, joining
from .api import (
    AbortWorkers,
    Action,
    CallsRead,
    Claimed,
    Input,
    Joining,
    LinkLost,
    NodeGivenUp,
    Received,
    Reconfigure,
    RecordsDropped,
    SpareFailed,
    SpareRehearsed,
    SpareUnable,
    StopRequested,
    Ticked,
    WorldFormed,
)
from .context import Context, Hearsay
from .coordination import Coordination
from .failures import Failures
from .hearing import Hearing
from .inventory import Inventory
from .messages import (
    Accepted,
    Calls,
    Compare,
    Decided,
    Goodbye,
    JoinRequest,
    NodeFailed,
    Prepare,
    Promise,
    Propose,
    RankFailed,
    Refused,
    Rehearse,
    Replace,
    Report,
    Start,
    Status,
    Verdict,
    generation_of,
)
from .pairing import Pairing
from .partial_partition import PartialPartition
from .phases import IllegalMove, Phase, moved, phase_of
from .policy import Policy, Timing
from .processes import SAYS, STORE_GONE, Processes
from .rehearsing import Rehearsing
from .self_fencing import SelfFencing
from .suspicion import suspects as suspects_at
from .swaps import Swaps
from .types import NEVER, NO_STEP, Generation, NodeId, Rank, Step, SwapPlan, World

PROVED_AFTER = 3
"""Steps committed in a generation."""
_NEED_NO_QUESTION = (Decided, Verdict, Goodbye)


class Controller:
    """The state machine of one node. Thread: one; it never blocks."""

    def __init__(self, node: NodeId, timing: Timing, policy: Policy = Policy()) -> None:
        self._ctx = Context(node, timing, policy)
        self._inventory = Inventory()
        self._failures = Failures(self._ctx)
        self._partition = PartialPartition(self._ctx)
        self._self_fencing = SelfFencing(self._ctx)
        self._rehearsing = Rehearsing(self._ctx, self._inventory, self._failures)
        self._candidates = joining.Candidates(self._ctx)
        self._joining: joining.Joining | None = None
        self.phase = Phase.OUTSIDE
        """Where this node stands; see phases.py."""
        self._begin_generation()
        self._early: list[Received] = []
        self._reported_at = 0.0
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
        return not self._ctx.formed or self._ctx.leads

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
        before, ctx.now = ctx.now, now
        if ctx.watch.excuse_pause(now - before, ctx.timing):
            self._swaps.excuse_pause(now - before)
            self._coordination.excuse_pause(now - before)
        self._take_in(event)
        self._mark()
        if reason := self._self_fencing.look(before):
            ctx.get_stuck(reason)
            self._swaps.voter.fence_generation()
            self._mark()
        self._settle()
        actions, ctx.actions = ctx.actions, []
        return actions

    def _take_in(self, event: Input) -> None:
        if (says := SAYS.get(type(event))) is not None:
            says(self._processes, event)
        else:
            _INPUTS[type(event)](self, event)

    def _mark(self) -> None:
        phase = phase_of(self._ctx, self._joining is not None)
        if phase is not self.phase:
            self.phase = moved(self.phase, phase)

    def _settle(self) -> None:
        """Handle what this node says to itself, act on evidence and report changes, until nothing is left to do."""
        ctx = self._ctx
        while ctx.formed and not ctx.ended:
            if ctx.loopback:
                message = ctx.loopback.popleft()
                _MESSAGES[type(message)](self, ctx.node, message)
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
        """Others report to a new coordinator only from now on, so their silence counts from now on."""
        ctx = self._ctx
        watching = (ctx.world.generation, ctx.standing.coordinator)
        if watching != self._watching:
            is_first, self._watching = self._watching is None, watching
            # Their silence was not towards who lets them run; whoever is lower is why this node leads. What was found
            # while the hosts linked up stays found.
            anew = [node for node in ctx.watch.silent if node > ctx.node] if ctx.leads and not is_first else ()
            ctx.watch.begin(ctx.world.members, ctx.now, anew)
            if ctx.has_trained:
                ctx.watch.unheard.clear()
            ctx.changed = True

    def _report(self) -> None:
        """Tell the coordinator; while fenced only that this node lives (its promise says the rest)."""
        ctx = self._ctx
        ctx.changed = False
        self._reported_at = ctx.now
        of, heard = ctx.echo
        report = Report(self.generation, stuck=ctx.stuck, sent_at=ctx.now, checkpoint=ctx.checkpoint, broken=ctx.broken)
        if of == ctx.coordinator:
            report = msgspec.structs.replace(report, heard=heard)
        ctx.send(ctx.coordinator, report if ctx.swapping else self._inventory.fill(report))
        if not ctx.swapping:
            self._failures.say()

    # -- inputs of this node -----------------------------------------------------------------------------------

    def _world_formed(self, event: WorldFormed) -> None:
        ctx = self._ctx
        self._only_outside(event)
        ctx.world, ctx.contact_at, ctx.formed_at = event.world, ctx.now, ctx.now
        ctx.watch.unheard = set(event.world.members) - {ctx.node}
        self._begin_generation()
        ctx.changed = True
        if ctx.leads:
            ctx.emit(events.WorldFormed(event.world.node_of, event.world.spares))
        self._hear_early()

    def _hear_early(self) -> None:
        """Handle the messages that came before this node knew the world."""
        early, self._early = self._early, []
        for received in early:
            self._mark()
            if not self._ctx.ended:
                self._received(received)

    def _ask_to_join(self, event: Joining) -> None:
        self._only_outside(event)
        self._joining = joining.Joining(self._ctx, event.members, event.rack)

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
        if event.silent and counts_on_us and ctx.watch.hears(event.node, ctx.now, ctx.timing):
            self._partition.hear(ctx.node, event.node)  # its processes run until it is silent, too
            return
        if event.silent and event.node in ctx.watch.silent:
            self._swaps.insist(event.node)
        ctx.watch.accuse(event.node, f"link lost: {event.reason}", event.silent)

    def _ticked(self, event: Ticked) -> None:
        ctx = self._ctx
        if self._joining is not None:
            self._joining.tick()
        if not ctx.formed:
            return
        standing = ctx.standing
        watched = ctx.living if standing.leads else (standing.coordinator,)
        for node, reason in suspects_at(ctx.now, ctx.watch, watched, ctx.timing).items():
            if node != ctx.node:
                ctx.watch.accuse(node, reason, silent=True)
        self._swaps.tick()
        ctx.note(self._rehearsing.tick())
        if not ctx.ended:
            self._coordination.tick()
        if not ctx.ended and (reason := self._coordination.stalled()):
            self._swaps.stuck(ctx.node, reason)
        if ctx.now - self._reported_at >= ctx.timing.heartbeat_interval_s:
            ctx.changed = True

    # -- messages ----------------------------------------------------------------------------------------------

    def _received(self, event: Received) -> None:
        ctx = self._ctx
        if not ctx.formed:
            self._received_early(event)
            return
        ctx.watch.hear(event.sender, ctx.now)
        if event.sender in ctx.watch.silent and not self._swaps.counts_as_lost(event.sender):
            ctx.watch.pardon(event.sender)  # nothing has come of its silence here, and nothing need
        if generation_of(event.message) > self.generation and not isinstance(event.message, _NEED_NO_QUESTION):
            ctx.send(event.sender, Report(self.generation))  # who decided it may have died before it told us
        if isinstance(event.message, JoinRequest):
            self._candidates.ask(event.sender, event.message.rack)
        elif event.sender in ctx.world.members or isinstance(event.message, Decided):  # by whom it has taken in
            _MESSAGES[type(event.message)](self, event.sender, event.message)
        elif isinstance(event.message, Goodbye):
            self._candidates.forget(event.sender)
        elif generation_of(event.message) < self.generation:
            self._swaps.bring_up_to_date(event.sender)

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
        """A new generation: forget the old one's books and act."""
        ctx, plan = self._ctx, message.plan
        if plan.world.generation <= self.generation:
            return
        if ctx.node not in plan.world.members:
            ctx.fence(f"not a member of generation {plan.world.generation}: counted as lost ({sender} says)")
            return
        if ctx.fenced_for < plan.world.generation:
            ctx.fenced_for, ctx.swap_since = plan.world.generation, ctx.now
            ctx.act(AbortWorkers(plan.world.generation))
        self._self_fencing.resume()
        self._enter(message)
        for node in plan.lost_nodes:  # whoever lives is not to take the end of this link for a loss
            ctx.send(node, NodeFailed(self.generation, node, f"counted as lost in generation {self.generation}"))
        ctx.act(Reconfigure(plan))

    def _enter(self, decided: Decided) -> None:
        ctx, before, inventory, plan = self._ctx, self._ctx.world, self._inventory, decided.plan
        # The plan was decided after this node had promised (or asked to join), and before anybody watched its silence.
        asked_at = self._swaps.voter.promised_at(decided.ballot)
        if self._joining is not None:
            asked_at = ctx.formed_at = self._joining.first_asked_at
        self._judge_newcomers(plan)
        ctx.world, ctx.decided, ctx.hearsay = plan.world, decided, Hearsay(ctx.node)
        ctx.committed, ctx.training, ctx.waiting = NO_STEP, False, False
        ctx.contact_at = max(ctx.contact_at, asked_at)
        ctx.echo = (ctx.node, NEVER)
        ctx.newest_committed = plan.restore_step  # what was committed after it is of a history that did not happen
        ctx.has_trained = ctx.has_trained or plan.restore_step != NO_STEP
        ctx.broken = ()
        ctx.stuck = STORE_GONE if inventory.has_lost(plan.store) else ""
        inventory.begin_generation(plan.restore_step, plan.store)
        self._candidates.begin_generation(before)
        self._failures.begin_generation()
        self._rehearsing.begin_generation()
        self._begin_generation()
        self._joining, ctx.changed = None, True

    def _judge_newcomers(self, plan: SwapPlan) -> None:
        """Trust newcomers after PROVED_AFTER committed steps of the generation that ends. A process of this node
        that ended after its promise is replaced, too, although the plan does not say so."""
        ctx, floor = self._ctx, self._ctx.plan.restore_step if self._ctx.plan else 0
        proved, own = ctx.committed >= floor + PROVED_AFTER, plan.world.ranks_of(ctx.node)
        since = self.generation if proved else 0
        ctx.replaced = {rank: when for rank, when in ctx.replaced.items() if rank in own and when >= since}
        if proved:
            ctx.unproven = frozenset()
        before = ctx.world.node_of or (-1,) * len(plan.world.node_of)
        moved = (rank for rank, (old, new) in enumerate(zip(before, plan.world.node_of, strict=True)) if old != new)
        ctx.unproven |= {*moved, *plan.lost_ranks, *(failure.rank for failure in self._failures.own)}

    def _begin_generation(self) -> None:
        """Make anew the parts that live no longer than a generation."""
        ctx, inventory, failures = self._ctx, self._inventory, self._failures
        self._pairing = Pairing(ctx)
        self._coordination = Coordination(ctx, self._pairing)
        self._swaps = Swaps(ctx, inventory, failures, self._pairing)
        self._processes = Processes(ctx, inventory, failures, self._swaps)
        self._hearing = Hearing(ctx, inventory, failures, self._partition, self._coordination, self._swaps)


_INPUTS: Mapping[type[Input], Callable[[Controller, Any], None]] = {
    WorldFormed: Controller._world_formed,
    Joining: Controller._ask_to_join,
    Ticked: Controller._ticked,
    Received: Controller._received,
    LinkLost: Controller._link_lost,
    NodeGivenUp: lambda self, event: self._failures.give_up(event.reason),
    SpareRehearsed: lambda self, event: self._ctx.note(self._rehearsing.done(event)),
    SpareFailed: lambda self, event: self._ctx.note(self._rehearsing.failed(event)),
    SpareUnable: lambda self, event: self._ctx.note(self._rehearsing.unable(event.reason)),
    RecordsDropped: lambda self, event: self._ctx.note(self._inventory.prune()),
    StopRequested: lambda self, event: self._ctx.stop(event.reason, event.exit_code),
    CallsRead: lambda self, event: self._hearing.read(event.generation, event.ranks),
    Claimed: lambda self, event: self._swaps.proposer.claimed(event.plan),
}

_MESSAGES: Mapping[type[Any], Callable[[Controller, NodeId, Any], None]] = {
    Report: lambda self, sender, message: self._hearing.report(sender, message),
    Status: lambda self, sender, message: self._hearing.status(sender, message),
    Start: lambda self, sender, message: self._hearing.start(sender, message),
    Rehearse: lambda self, sender, message: self._rehearsing.ordered(sender, message),
    NodeFailed: lambda self, sender, message: self._hearing.node_failed(sender, message),
    RankFailed: lambda self, sender, message: self._hearing.rank_failed(sender, message),
    Compare: lambda self, sender, message: self._hearing.compare(message),
    Calls: lambda self, sender, message: self._pairing.hear(sender, message),
    Replace: lambda self, sender, message: self._hearing.replace(message),
    Prepare: lambda self, sender, message: self._swaps.voter.prepare(sender, message),
    Promise: lambda self, sender, message: self._swaps.proposer.promise(sender, message),
    Propose: lambda self, sender, message: self._swaps.voter.propose(sender, message),
    Accepted: lambda self, sender, message: self._swaps.proposer.accepted(sender, message),
    Refused: lambda self, sender, message: self._swaps.proposer.refused(message),
    Decided: Controller._on_decided,
    Verdict: lambda self, sender, message: self._hearing.verdict(sender, message),
    Goodbye: lambda self, sender, message: self._hearing.goodbye(sender, message),
}
