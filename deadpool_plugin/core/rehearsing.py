"""The rehearsals that a spare was told to make, and their progress.

Rules of this file: one task a local slot, the newest counts; a rehearsal that fails is ordered again, at once and then
after pauses that double, within the same budget as a lost process; then the node gives up. What fails for want of a
source that is lost does not count.
"""

from __future__ import annotations

from .api import StartRehearsal
from .context import Context
from .events import SpareReady
from .messages import Rehearse
from .policy import Budget
from .types import NEVER, NodeId, Rank

REASON_MAX = 200  # characters: it goes into every report


class Rehearsing:
    """The tasks of one spare."""

    def __init__(self, context: Context) -> None:
        self._ctx = context
        self.rehearsed: dict[int, Rank] = {}
        self.able = False  # all that this node was told to rehearse is rehearsed, and nothing has failed since
        self.unable = ""  # why it could not take over, "" if nothing speaks against it
        self._tasks: dict[int, tuple[Rank, NodeId]] = {}  # each slot's rank, and the node that ran that then
        self._attempts = Budget(context.policy.restarts_max, context.policy.restarts_window_s)
        self._failed = 0  # attempts that have come to nothing within the window
        self._failed_at = NEVER
        self._retry_at: dict[int, float] = {}
        self._able_at: float | None = None  # who has failed before is able only if it has not failed again until then
        self._doubted = False  # the current rehearsal is of no use

    def ordered(self, message: Rehearse) -> None:
        ctx, slot = self._ctx, message.local_slot
        if message.generation != ctx.world.generation or ctx.swapping or ctx.node not in ctx.world.spares:
            return
        task = (message.rank, ctx.world.node_of[message.rank])
        if self.rehearsed.get(slot) != message.rank and self._tasks.get(slot) != task:
            self._start(slot, *task)

    def _start(self, slot: int, rank: Rank, source: NodeId) -> None:
        self._tasks[slot] = (rank, source)
        self._doubted = False
        self._retry_at.pop(slot, None)
        self.rehearsed.pop(slot, None)
        self._ctx.act(StartRehearsal(slot, rank, source))

    def done(self, slot: int, rank: Rank) -> None:
        if self.rehearsed.get(slot) != rank:
            self.rehearsed[slot] = rank
            self._retry_at.pop(slot, None)
            if self._is_ready:
                self._able_at = self._ctx.now + self._pause_s
                self.tick()
            self._ctx.note()

    @property
    def _is_ready(self) -> bool:
        """Return whether all that this node was told to rehearse is rehearsed."""
        wanted = {slot: rank for slot, (rank, _) in self._tasks.items()}
        return self._ctx.node in self._ctx.world.spares and bool(wanted) and self.rehearsed == wanted

    @property
    def _pause_s(self) -> float:
        """None after the first failure, then twice as much after each."""
        return self._ctx.timing.silent_after_s * 2.0 ** (self._failed - 2) if self._failed > 1 else 0.0

    def tick(self) -> None:
        """Begin what was put off, and believe a spare that has not failed again."""
        ctx = self._ctx
        for slot in [slot for slot, at in self._retry_at.items() if ctx.now >= at]:
            self._start_again(slot)
        if self._able_at is not None and ctx.now >= self._able_at and self._is_ready:
            self._able_at = None
            if not self._doubted:
                self._set_able(True)
                ctx.emit(SpareReady(ctx.node, tuple(self._tasks[slot][0] for slot in sorted(self._tasks))))

    def _set_able(self, able: bool, unable: str = "") -> None:
        self.able, self.unable = able, unable[:REASON_MAX]
        self._ctx.note()

    def doubt(self, reason: str) -> None:
        """Note that the rehearsal is of no use, and that another attempt would be of none either."""
        self._set_able(False, reason)
        self._doubted = True

    def failed(self, slot: int, rank: Rank, reason: str) -> None:
        ctx, task = self._ctx, self._tasks.get(slot)
        if task is not None and task[0] != rank:
            return  # of a task that has been overtaken
        is_fault = task is None or not self._is_lost(task[1])
        if task is None or (is_fault and not self._attempts.spend(slot, ctx.now)):
            ctx.resign(f"rehearsal of rank {rank} failed: {reason}")
            return
        self._able_at = None
        self.rehearsed.pop(slot, None)
        ctx.note()
        if is_fault:
            recent = ctx.now - self._failed_at < ctx.policy.restarts_window_s
            self._failed, self._failed_at = self._failed + 1 if recent else 1, ctx.now
            self._set_able(False, f"rank {rank}: {reason}")
        self._start_again(slot, self._pause_s if is_fault else 0.0)

    def _start_again(self, slot: int, pause_s: float = 0.0) -> None:
        """Order it again; while fenced leave that to the next generation, whose nodes may be other ones."""
        ctx, (rank, before) = self._ctx, self._tasks.pop(slot)
        self._retry_at.pop(slot, None)
        source = ctx.world.node_of[rank]
        if ctx.swapping or self._is_lost(source):
            return
        if pause_s > 0.0:
            self._tasks[slot], self._retry_at[slot] = (rank, before), ctx.now + pause_s
        else:
            self._start(slot, rank, source)

    def _is_lost(self, node: NodeId) -> bool:
        return node in self._ctx.suspects or node not in self._ctx.world.members

    def begin_generation(self) -> None:
        """Drop the rehearsals of a node that runs ranks now, and those of a start that did not happen."""
        ctx = self._ctx
        if ctx.node not in ctx.world.spares or ctx.begins_at_top:
            self._tasks.clear()
            self._retry_at.clear()
            self.rehearsed.clear()
        if ctx.node not in ctx.world.spares:
            self._set_able(False)
