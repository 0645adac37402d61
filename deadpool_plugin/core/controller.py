"""One node's part of the protocol: `Controller.step(input, now)` returns what the caller must do now.

The caller's obligations, in this order: feed inputs one at a time, in the order in which they happened, `now` never
going back; carry out the returned actions in their order before the next input; feed `Ticked` at least four times per
heartbeat interval; deliver each peer's messages in the order they were sent, or report LinkLost; after `Leave` nothing
is returned any more. AbortWorkers always comes before the Promise or Reconfigure it belongs to.

Rules of this file: inputs and messages are dispatched here and decided in inventory (this node), coordination (between
swaps) and swaps; a duplicate, late or foreign message never harms. May import everything of core, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .context import Context
from .coordination import Coordination
from .inventory import Inventory
from .io import (
    AbortWorkers,
    Action,
    Commit,
    HoldingsDropped,
    Input,
    LinkLost,
    Received,
    Reconfigure,
    SnapshotHeld,
    SpareFailed,
    SpareRehearsed,
    StartRehearsal,
    StartWorkers,
    StopRequested,
    StoreOffered,
    Ticked,
    WorkerFailed,
    WorkerFinished,
    WorkerLost,
    WorkerReady,
    WorkerRestored,
    WorldFormed,
)
from .messages import (
    Accepted,
    AnyMessage,
    Decided,
    Goodbye,
    NodeFailed,
    Prepare,
    Promise,
    Propose,
    Refused,
    Rehearse,
    Report,
    Start,
    Status,
    Verdict,
)
from .suspicion import suspects as suspects_at
from .swaps import Swaps
from .timing import Timing
from .types import EXIT_UNRECOVERABLE, NO_STEP, Generation, NodeId, Step, Unrecoverable, World


class Controller:
    """The state machine of one node. Thread: one; it never blocks."""

    def __init__(self, node: NodeId, timing: Timing) -> None:
        self._ctx = Context(node, timing)
        self._inventory = Inventory()
        self._coordination = Coordination(self._ctx)
        self._swaps = Swaps(self._ctx, self._inventory)
        self._early: list[Received] = []
        self._changed = False
        self._started = False
        self._reported_at = 0.0
        self._watching: tuple[Generation, NodeId] | None = None
        self._tasks: dict[int, Rehearse] = {}
        self._inputs: dict[type[Input], Callable[[Any], None]] = {
            WorldFormed: self._world_formed,
            Ticked: lambda _: self._ticked(),
            Received: self._received,
            LinkLost: lambda event: self._ctx.watch.accuse(event.node, f"link lost: {event.reason}"),
            StoreOffered: self._store_offered,
            WorkerReady: self._worker_ready,
            SnapshotHeld: self._snapshot_held,
            HoldingsDropped: lambda event: self._note(self._inventory.dropped(event.rank, event.newer_than)),
            WorkerRestored: self._worker_restored,
            WorkerFinished: lambda event: self._note(self._inventory.finished(event.rank)),
            WorkerLost: lambda event: self._give_up(f"worker of rank {event.rank} lost: {event.reason}"),
            WorkerFailed: self._worker_failed,
            SpareRehearsed: self._spare_rehearsed,
            SpareFailed: lambda event: self._give_up(f"rehearsal of rank {event.rank} failed: {event.reason}"),
            StopRequested: lambda event: self._stop(event.exit_code, event.reason),
        }
        self._messages: dict[type[Any], Callable[[NodeId, Any], None]] = {
            Report: self._on_report,
            Status: self._on_status,
            Start: self._on_start,
            Rehearse: self._on_rehearse,
            NodeFailed: self._on_node_failed,
            Prepare: lambda sender, message: self._swaps.prepare(sender, message),
            Promise: lambda sender, message: self._swaps.promise(sender, message),
            Propose: lambda sender, message: self._swaps.propose(sender, message),
            Accepted: lambda sender, message: self._swaps.accepted(sender, message),
            Refused: lambda sender, message: self._swaps.refused(message),
            Decided: self._on_decided,
            Verdict: self._on_verdict,
            Goodbye: lambda sender, message: None,
        }

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
    def ended(self) -> bool:
        return self._ctx.ended

    # -- one input ---------------------------------------------------------------------------------------------

    def step(self, event: Input, now: float) -> list[Action]:
        """Take in `event` at time `now` and say what to do about it, in order."""
        ctx = self._ctx
        if ctx.ended:
            return []
        ctx.watch.excuse_pause(now - ctx.now, ctx.timing)
        ctx.now = now
        self._inputs[type(event)](event)
        self._settle()
        actions, ctx.actions = ctx.actions, []
        return actions

    def _settle(self) -> None:
        """Handle what this node says to itself, act on evidence and report changes, until nothing is left to do."""
        ctx = self._ctx
        while ctx.formed and not ctx.ended:
            if ctx.loopback:
                message = ctx.loopback.popleft()
                self._messages[type(message)](ctx.node, message)
                continue
            self._swaps.react()
            self._watch_the_right_ones()
            if self._changed and not ctx.ended:
                self._report()
            if not ctx.loopback:
                return

    def _watch_the_right_ones(self) -> None:
        """Others report to a new coordinator only from now on, so their silence counts from now on."""
        watching = (self.generation, self._ctx.coordinator)
        if watching != self._watching:
            self._watching = watching
            self._ctx.watch.begin(self._ctx.world.members, self._ctx.now)
            self._changed = True

    def _note(self, changed: bool) -> None:
        self._changed = self._changed or changed

    def _report(self) -> None:
        """Tell the coordinator; while fenced only that this node lives (its holdings of this generation are frozen)."""
        ctx = self._ctx
        self._changed = False
        self._reported_at = ctx.now
        if ctx.swapping:
            ctx.send(ctx.coordinator, Report(self.generation, ctx.node))
        else:
            ctx.send(ctx.coordinator, self._inventory.report(self.generation, ctx.node))

    # -- inputs of this node -----------------------------------------------------------------------------------

    def _world_formed(self, event: WorldFormed) -> None:
        ctx = self._ctx
        ctx.world = event.world
        self._coordination = Coordination(ctx)
        self._changed = True
        if ctx.leads:
            ctx.emit("WorldFormed", node_of=event.world.node_of, spares=event.world.spares)
        early, self._early = self._early, []
        for received in early:
            if not ctx.ended:
                self._received(received)

    def _ticked(self) -> None:
        ctx = self._ctx
        if not ctx.formed:
            return
        watched = ctx.living if ctx.leads else (ctx.coordinator,)
        for node, reason in suspects_at(ctx.now, ctx.watch, watched, ctx.timing).items():
            if node != ctx.node:
                ctx.watch.accuse(node, reason)
        self._swaps.tick()
        if not ctx.ended:
            self._coordination.tick()
        if ctx.now - self._reported_at >= ctx.timing.heartbeat_interval_s:
            self._changed = True

    def _store_offered(self, event: StoreOffered) -> None:
        if self._inventory.offer(event.address):
            self._changed = True
            if self._ctx.swapping:
                self._swaps.answer()

    def _worker_ready(self, event: WorkerReady) -> None:
        if self.generation == 0:
            self._note(self._inventory.ready(event.rank))

    def _worker_restored(self, event: WorkerRestored) -> None:
        if event.generation == self.generation and not self._ctx.swapping:
            self._note(self._inventory.ready(event.rank))

    def _snapshot_held(self, event: SnapshotHeld) -> None:
        self._note(self._inventory.held(event.holding, event.generation, self.generation))

    def _spare_rehearsed(self, event: SpareRehearsed) -> None:
        ctx = self._ctx
        if not self._inventory.rehearse(event.local_slot, event.rank):
            return
        self._changed = True
        wanted = {slot: task.rank for slot, task in self._tasks.items()}
        if ctx.node in ctx.world.spares and wanted and self._inventory.rehearsed == wanted:
            ctx.emit("SpareReady", spare=ctx.node, ranks=tuple(wanted[slot] for slot in sorted(wanted)))

    def _give_up(self, reason: str) -> None:
        """This node cannot go on: the others shall replace it, at once."""
        ctx = self._ctx
        others = [node for node in ctx.living if node != ctx.node]
        if ctx.formed and not others:
            cause = Unrecoverable(reason, tuple(range(len(ctx.world.node_of))), ctx.newest_committed)
            ctx.conclude(Verdict(self.generation, EXIT_UNRECOVERABLE, f"the only node is lost: {reason}", cause))
            return
        for node in others:
            ctx.send(node, NodeFailed(self.generation, ctx.node, reason))
        ctx.fence(reason)

    def _worker_failed(self, event: WorkerFailed) -> None:
        """The script's own error: it would fail on any node, so the job ends and no spare is spent."""
        self._stop(event.exit_code, f"script of rank {event.rank} ended with {event.exit_code}: {event.reason}")

    def _stop(self, exit_code: int, reason: str) -> None:
        ctx = self._ctx
        ctx.conclude(Verdict(self.generation, exit_code, reason, Unrecoverable(reason, (), ctx.newest_committed)))

    # -- messages ----------------------------------------------------------------------------------------------

    def _received(self, event: Received) -> None:
        ctx = self._ctx
        if not ctx.formed:
            self._early.append(event)
            return
        ctx.watch.hear(event.sender, ctx.now)
        if event.sender in ctx.world.members:
            self._messages[type(event.message)](event.sender, event.message)
        elif _generation_of(event.message) < self.generation:
            self._swaps.bring_up_to_date(event.sender)

    def _on_report(self, sender: NodeId, message: Report) -> None:
        if message.generation < self.generation:
            self._swaps.bring_up_to_date(sender)
        elif message.generation == self.generation and not self._ctx.swapping:
            self._coordination.absorb(sender, message)

    def _on_status(self, sender: NodeId, message: Status) -> None:
        ctx = self._ctx
        if message.generation < self.generation:
            self._swaps.bring_up_to_date(sender)
        elif message.generation == self.generation and not ctx.swapping and sender not in ctx.watch.evidence:
            ctx.training = ctx.training or message.training
            if message.committed > ctx.committed:
                ctx.committed = message.committed
                ctx.newest_committed = max(ctx.newest_committed, message.committed)
                ctx.act(Commit(message.committed))

    def _on_start(self, sender: NodeId, message: Start) -> None:
        if self.generation == 0 and not self._started:
            self._started = True
            if self._inventory.store == message.store:
                self._inventory.offer("")
            self._ctx.act(StartWorkers(message.world, message.store))

    def _on_rehearse(self, sender: NodeId, message: Rehearse) -> None:
        ctx = self._ctx
        if message.generation != self.generation or ctx.swapping or ctx.node not in ctx.world.spares:
            return
        slot, known = message.local_slot, self._tasks.get(message.local_slot)
        done = self._inventory.rehearsed.get(slot) == message.rank
        if done or (known is not None and (known.rank, known.source) == (message.rank, message.source)):
            return
        self._tasks[slot] = message
        self._inventory.rehearsed.pop(slot, None)
        ctx.act(StartRehearsal(slot, message.rank, message.source))

    def _on_node_failed(self, sender: NodeId, message: NodeFailed) -> None:
        ctx = self._ctx
        suspects = ctx.suspects
        if message.node == ctx.node:
            ctx.fence(message.reason)
        elif sender in suspects and message.node != sender:
            ctx.send(sender, NodeFailed(self.generation, sender, suspects[sender]))
        elif message.node in ctx.world.members:
            ctx.watch.accuse(message.node, message.reason)

    def _on_verdict(self, sender: NodeId, message: Verdict) -> None:
        if sender not in self._ctx.suspects:
            self._ctx.conclude(message)

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
        ctx.world, ctx.plan, ctx.hearsay = plan.world, plan, (ctx.node, {})
        ctx.committed, ctx.training = NO_STEP, False
        ctx.newest_committed = max(ctx.newest_committed, plan.restore_step)
        self._inventory.begin_generation(plan.restore_step, plan.store)
        if ctx.node not in plan.world.spares:
            self._tasks.clear()
            self._inventory.rehearsed.clear()
        self._coordination = Coordination(ctx)
        self._swaps = Swaps(ctx, self._inventory)
        self._changed = True
        ctx.act(Reconfigure(plan))


def _generation_of(message: AnyMessage) -> Generation:
    """The generation `message` was sent in."""
    if isinstance(message, Decided):
        return message.plan.world.generation
    if isinstance(message, (Prepare, Promise, Propose, Accepted, Refused)):
        return message.ballot.generation - 1
    return message.world.generation if isinstance(message, Start) else message.generation
