"""What a spare has been told to rehearse, and how far that is.

Rules of this file: one task a local slot, the newest counts; a rehearsal that fails is ordered again, as often within
the same time as a lost process is replaced, then the node gives up. What fails for want of a source that is lost does
not count. May import everything of core but the controller's other parts.
"""

from __future__ import annotations

from typing import NamedTuple

from .budget import Budget
from .context import Context
from .failures import Failures
from .inventory import Inventory
from .io import SpareFailed, SpareRehearsed, StartRehearsal
from .messages import Rehearse
from .types import NodeId, Rank


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

    def ordered(self, sender: NodeId, message: Rehearse) -> None:
        ctx = self._ctx
        if message.generation != ctx.world.generation or ctx.swapping or ctx.node not in ctx.world.spares:
            return
        slot, task = message.local_slot, _Task(message.rank, ctx.world.node_of[message.rank])
        if self._inventory.rehearsed.get(slot) != message.rank and self._tasks.get(slot) != task:
            self._start(slot, task)

    def _start(self, slot: int, task: _Task) -> None:
        self._tasks[slot] = task
        self._inventory.rehearsed.pop(slot, None)
        self._ctx.act(StartRehearsal(slot, task.rank, task.source))

    def done(self, event: SpareRehearsed) -> bool:
        ctx = self._ctx
        if not self._inventory.rehearse(event.local_slot, event.rank):
            return False
        wanted = {slot: task.rank for slot, task in self._tasks.items()}
        if ctx.node in ctx.world.spares and wanted and self._inventory.rehearsed == wanted:
            ctx.emit("SpareReady", spare=ctx.node, ranks=tuple(wanted[slot] for slot in sorted(wanted)))
        return True

    def failed(self, event: SpareFailed) -> bool:
        """Order it again; while fenced leave that to the next generation, whose nodes may be other ones."""
        ctx, slot = self._ctx, event.local_slot
        task = self._tasks.get(slot)
        if task is not None and task.rank != event.rank:
            return False  # of a task that has been overtaken
        if task is None or not (self._is_lost(task.source) or self._attempts.spend(slot, ctx.now)):
            self._failures.give_up(f"rehearsal of rank {event.rank} failed: {event.reason}")
            return False
        source = ctx.world.node_of[task.rank]
        if ctx.swapping or self._is_lost(source):
            self._inventory.rehearsed.pop(slot, None)
            del self._tasks[slot]
        else:
            self._start(slot, _Task(task.rank, source))
        return True

    def _is_lost(self, node: NodeId) -> bool:
        return node in self._ctx.suspects or node not in self._ctx.world.members

    def begin_generation(self) -> None:
        """Whoever runs ranks rehearses no more, and what was recorded of a start that did not happen is void."""
        ctx = self._ctx
        if ctx.node not in ctx.world.spares or ctx.begins_at_top:
            self._tasks.clear()
            self._inventory.rehearsed.clear()
