"""The rehearsals that a spare was told to make, and their progress.

Rules of this file: one task a local slot, the newest counts; a rehearsal that fails is ordered again, at once and then
after pauses that double, as often within the same time as a lost process is replaced; then the node gives up. What
fails for want of a source that is lost does not count. May import everything of core but the controller's other parts.
"""

from __future__ import annotations

from typing import NamedTuple

from .api import SpareFailed, SpareRehearsed, StartRehearsal
from .context import Context
from .events import SpareReady
from .failures import Failures
from .inventory import Inventory
from .messages import Rehearse
from .policy import Budget
from .types import NEVER, NodeId, Rank

REASON_MAX = 200
"""Characters of a reason that goes into every report."""


class _Task(NamedTuple):
    """The rank, and the node that ran it when that was ordered last."""

    rank: Rank
    source: NodeId


class Rehearsing:
    """The tasks of one spare."""

    def __init__(self, context: Context, inventory: Inventory, failures: Failures) -> None:
        self._ctx, self._inventory, self._failures = context, inventory, failures
        self._tasks: dict[int, _Task] = {}
        self._attempts = Budget(context.policy.restarts_max, context.policy.restarts_window_s)
        self._failed = 0
        """Attempts that have come to nothing within the window."""
        self._failed_at = NEVER
        self._retry_at: dict[int, float] = {}
        self._able_at: float | None = None
        """A spare that has failed before is able only if it has not failed again until then."""
        self._doubted = False
        """The current rehearsal is of no use."""

    def ordered(self, sender: NodeId, message: Rehearse) -> None:
        ctx = self._ctx
        if message.generation != ctx.world.generation or ctx.swapping or ctx.node not in ctx.world.spares:
            return
        slot, task = message.local_slot, _Task(message.rank, ctx.world.node_of[message.rank])
        if self._inventory.rehearsed.get(slot) != message.rank and self._tasks.get(slot) != task:
            self._start(slot, task)

    def _start(self, slot: int, task: _Task) -> None:
        self._tasks[slot] = task
        self._doubted = False
        self._retry_at.pop(slot, None)
        self._inventory.rehearsed.pop(slot, None)
        self._ctx.act(StartRehearsal(slot, task.rank, task.source))

    def done(self, event: SpareRehearsed) -> bool:
        ctx = self._ctx
        if not self._inventory.rehearse(event.local_slot, event.rank):
            return False
        self._retry_at.pop(event.local_slot, None)
        if self._is_ready:
            self._able_at = ctx.now + self._pause_s
            self.tick()
        return True

    @property
    def _is_ready(self) -> bool:
        """Return whether all that this node was told to rehearse is rehearsed."""
        wanted = {slot: task.rank for slot, task in self._tasks.items()}
        return self._ctx.node in self._ctx.world.spares and bool(wanted) and self._inventory.rehearsed == wanted

    @property
    def _pause_s(self) -> float:
        """None after the first failure, then twice as much after each."""
        return self._ctx.timing.silent_after_s * 2.0 ** (self._failed - 2) if self._failed > 1 else 0.0

    def tick(self) -> bool:
        """Begin what was put off, and believe a spare that has not failed again. Returns: whether that is news."""
        ctx, inventory = self._ctx, self._inventory
        for slot in [slot for slot, at in self._retry_at.items() if ctx.now >= at]:
            task = self._tasks.pop(slot)
            del self._retry_at[slot]
            source = ctx.world.node_of[task.rank]
            if not (ctx.swapping or self._is_lost(source)):  # else it is the next generation's
                self._start(slot, _Task(task.rank, source))
        if self._able_at is None or ctx.now < self._able_at or not self._is_ready:
            return False
        self._able_at = None
        if self._doubted:
            return False
        inventory.able, inventory.unable = True, ""
        ctx.emit(SpareReady(ctx.node, tuple(self._tasks[slot].rank for slot in sorted(self._tasks))))
        return True

    def unable(self, reason: str) -> bool:
        """Note that the rehearsal is of no use, and that another attempt would be of none either."""
        self._inventory.able, self._inventory.unable = False, reason[:REASON_MAX]
        self._doubted = True
        return True

    def failed(self, event: SpareFailed) -> bool:
        """Order it again; while fenced leave that to the next generation, whose nodes may be other ones."""
        ctx, slot = self._ctx, event.local_slot
        task = self._tasks.get(slot)
        if task is not None and task.rank != event.rank:
            return False  # of a task that has been overtaken
        is_fault = task is None or not self._is_lost(task.source)
        if is_fault and not (task is not None and self._attempts.spend(slot, ctx.now)):
            self._failures.give_up(f"rehearsal of rank {event.rank} failed: {event.reason}")
            return False
        assert task is not None
        inventory, self._able_at = self._inventory, None
        inventory.rehearsed.pop(slot, None)
        if is_fault:
            self._count()
            inventory.able, inventory.unable = False, f"rank {event.rank}: {event.reason}"[:REASON_MAX]
        source = ctx.world.node_of[task.rank]
        if ctx.swapping or self._is_lost(source):
            self._retry_at.pop(slot, None)
            del self._tasks[slot]
        elif is_fault and self._pause_s > 0.0:
            self._retry_at[slot] = ctx.now + self._pause_s
        else:
            self._start(slot, _Task(task.rank, source))
        return True

    def _count(self) -> None:
        """One more failure within the window."""
        now = self._ctx.now
        self._failed = self._failed + 1 if now - self._failed_at < self._ctx.policy.restarts_window_s else 1
        self._failed_at = now

    def _is_lost(self, node: NodeId) -> bool:
        return node in self._ctx.suspects or node not in self._ctx.world.members

    def begin_generation(self) -> None:
        """Drop the rehearsals of a node that runs ranks now, and those of a start that did not happen."""
        ctx = self._ctx
        if ctx.node not in ctx.world.spares or ctx.begins_at_top:
            self._tasks.clear()
            self._retry_at.clear()
            self._inventory.rehearsed.clear()
        if ctx.node not in ctx.world.spares:
            self._inventory.able, self._inventory.unable = False, ""
