"""A worker process of the toy job: one rank in training, or a rehearsal of one.

Rules of this file: what worker/ promises its agent: the cut of a step is staged once the step before is committed and
before the next update; an abort unwinds it some time later, whatever it does; a restore takes the slot of the restore
step and nothing else; its log of calls reaches two steps back, and a process that is told to go back further is
replaced; a process of local rank 0 hosts the stores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.ledger import may_stage
from ..core.types import NO_STEP, Generation, Rank, Step
from ..transport.calls import CallBooks
from .clock import Timeline
from .groups import SUM, Group, Odd
from .store import Pair, sealed
from .tasks import Signal, Task, Work
from .training import State, first_state, gradient, updated

if TYPE_CHECKING:
    from .node import Node

LOG_DEPTH = 2
SAVE_EVERY = 5
PARTS_OF_A_PAST = 3
"""How often in a rehearsal it is told that it gets on."""


class Process:
    """`order` counts what its slot was told to start. `slots`: its arena, once it has one."""

    def __init__(self, node: Node, slot: int, order: int, rank: Rank, rehearses: bool) -> None:
        self.node, self.slot, self.order, self.rank, self.rehearses = node, slot, order, rank, rehearses
        self.alive = True
        self.stuck = self.held = self.hangs = self.is_deaf = False
        self._backlog: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.took_over = self.in_training = self.rehearsed = False
        self.unwound_for: Generation = 0
        self.stores: list[str] = []
        self.state: State | None = None
        self.step: Step = NO_STEP
        self.finished = False
        self._cluster = node.cluster
        self._shard = node.cluster.shard_of[rank]
        self._committed: Step = NO_STEP
        self._saved: Step = 0
        self._aborted: Generation = 0
        self._joined: Generation = 0
        self._join: tuple[Generation, str, Step] | None = None
        self._entered: Step = 0
        self.odd: Odd | None = None
        """Calls that it issues in its first step and its peers do not."""
        self.mispaired = False
        self._books: CallBooks | None = None
        """Calls that it issues in this generation; None before the first swap."""
        self.slots: Pair | None = None
        self._group: Group | None = None
        self._start, self._arena, self._gate = Signal(), Signal(), Signal()
        self._staging: Task | None = None
        self._staged = Signal()
        self._said_at = self._heard_at = 0.0
        self._main = Task(self, self._rehearse() if rehearses else self._begin())

    @property
    def timeline(self) -> Timeline:
        return self.node.timeline

    def do(self, work: Callable[..., object], *arguments: Any) -> None:
        """Where this process's tasks run: nowhere once it has ended or stands still."""
        if self.alive and not self.stuck:
            if self.node.paused:
                self.node.do(self._if_alive, work, *arguments)
            elif self.node.up:
                self._if_alive(work, *arguments)

    def _if_alive(self, work: Callable[..., object], *arguments: Any) -> None:
        if self.held:
            self._backlog.append((work, arguments))
        elif self.alive and not self.stuck:
            work(*arguments)

    def hold(self) -> None:
        """SIGSTOP: it stands still, and what comes for it waits."""
        self.held = True

    def go_on(self) -> None:
        """SIGCONT."""
        self.held = False
        backlog, self._backlog = self._backlog, []
        for work, arguments in backlog:
            self.do(work, *arguments)

    def end(self) -> None:
        """Killed, or gone by itself."""
        self.alive = False
        self._main.cancel()
        if self._staging is not None:
            self._staging.cancel()

    # -- the line to the agent: in order, each message some time on its way ---------------------------------------

    def _tell(self, handle: Callable[..., object], *arguments: Any) -> None:
        self._said_at = max(self._said_at, self.timeline.now + self._cluster.local_s())
        self.timeline.at(self._said_at, self.node.do, self.node.heard, self, handle, *arguments)

    def _hear(self, work: Callable[..., object], *arguments: Any) -> None:
        self._heard_at = max(self._heard_at, self.timeline.now + self._cluster.local_s())
        self.timeline.at(self._heard_at, self.do, work, *arguments)

    def start_groups(self, generation: Generation, store: str) -> None:
        self._hear(self._start.set, (generation, store))

    def hand_over(self, pair: Pair) -> None:
        self._hear(self._arena.set, pair)

    def commit(self, step: Step) -> None:
        self._committed = max(self._committed, step)
        if self.rank == 0 and step >= self._saved + SAVE_EVERY:
            self._saved = step
            self._tell(self.node.saved, step)
        gate, self._gate = self._gate, Signal()
        gate.set()

    def host_store(self) -> None:
        self._hear(self._offer_store)

    def abort(self, generation: Generation) -> None:
        self._hear(self._on_abort, generation)

    def join(self, generation: Generation, store: str, restore_step: Step) -> None:
        self._hear(self._on_join, generation, store, restore_step)

    def take_over(self, pair: Pair, generation: Generation, store: str, restore_step: Step) -> None:
        self._hear(self._on_take_over, pair, generation, store, restore_step)

    # -- from the top --------------------------------------------------------------------------------------------

    def _begin(self) -> Work:
        yield self._cluster.start_s()
        if self.rank == 0:
            self._offer_store()
        generation, store = yield self._start
        self._joined = generation
        yield from self._build(generation, store)
        yield self._cluster.start_s()
        self._tell(self.node.mirroring.rank_ready)
        self.slots = yield self._arena
        self.state, self.step = first_state(self.rank, self._shard), 0
        self._stage()
        self._offer_store()
        yield from self._train()

    def _build(self, generation: Generation, store: str) -> Work:
        self._group = self._cluster.group(generation, store)
        yield self._group.join(self)
        self._cluster.checkers.joined_group(self, generation)

    def _offer_store(self) -> None:
        if self.slot == 0:
            self._tell(self.node.processes.offers, self._cluster.new_store(self))

    # -- steps ---------------------------------------------------------------------------------------------------

    def _train(self) -> Work:
        while self.step < self._cluster.last_step:
            yield self._cluster.compute_s()
            if self.hangs:
                yield Signal()  # until it is interrupted
            assert self.state is not None and self._group is not None
            odd, self.odd = self.odd, None
            if odd is not None:
                self._cluster.blows.mispairs(self, self._group, odd)
                if not odd.instead:
                    yield self._issue(0.0, odd.code)
            total = yield self._issue(gradient(self.state), odd.code if odd is not None and odd.instead else SUM)
            yield self._staged
            self.state, self.step = updated(self.state, total, self._shard, self._group.generation), self.step + 1
            self._cluster.checkers.updated(self)
            self._stage()
        yield self._staged
        self.finished = True
        self._tell(self.node.finished)

    def _issue(self, value: float, code: int) -> Signal:
        assert self._group is not None
        if self._books is not None:
            self._books.books[0].note(code)
        return self._group.all_reduce(self, value, code)

    def _stage(self) -> None:
        self._staged = Signal()
        paired = self._books.cut(self.step) if self._books is not None else 0
        self._staging = Task(self, self._stage_one(self.step, self.state, self._joined, paired))

    def _stage_one(self, step: Step, state: State | None, generation: Generation, paired: int) -> Work:
        assert self.slots is not None and state is not None
        while not may_stage(step, self._committed):
            yield self._gate
        store, pair = self.node.store, self.slots
        store.empty(pair, self.rank, step)
        yield self._cluster.copy_s()
        store.seal(pair, sealed(self.rank, step, generation, state, paired))
        self._tell(self.node.mirroring.staged, step, generation)
        self._staged.set()

    # -- a swap --------------------------------------------------------------------------------------------------

    def _on_abort(self, generation: Generation) -> None:
        self._aborted = max(self._aborted, generation)
        if (self.in_training or self.took_over) and not (self.hangs and self.is_deaf):
            self.timeline.after(self._cluster.unwind_s(), self.do, self._unwound)

    def _unwound(self) -> None:
        """Out of whatever it was in; the newest plan may be here already."""
        if self.unwound_for >= self._aborted or self._joined >= self._aborted:
            return
        self._main.cancel()
        self.hangs = False
        self.unwound_for = self._aborted
        self._tell(self.node.processes.unwound, self._aborted)
        self._follow_plan()

    def _on_join(self, generation: Generation, store: str, restore_step: Step) -> None:
        self._join = (generation, store, restore_step)
        self._follow_plan()

    def _follow_plan(self) -> None:
        if self._join is None or self._join[0] < max(self._aborted, self._joined + 1):
            return
        if self.unwound_for < self._join[0]:
            return
        self._joined = self._join[0]
        self._main.cancel()
        self._main = Task(self, self._rejoin(*self._join))

    def _rejoin(self, generation: Generation, store: str, restore_step: Step) -> Work:
        if restore_step < max(self._entered, self.step - LOG_DEPTH):
            self._tell(self.node.processes.out_of_reach, restore_step)
            return
        self._drop_gated()
        yield self._staged
        self._committed = min(self._committed, restore_step)
        yield from self._enter(generation, store, restore_step)

    def _drop_gated(self) -> None:
        """A snapshot that still waits at the gate is given up; one that is being copied is finished."""
        if self._staging is not None and not may_stage(self.step, self._committed):
            self._staging.cancel()
            self._staged.set()

    def _enter(self, generation: Generation, store: str, restore_step: Step) -> Work:
        yield from self._build(generation, store)
        assert self.slots is not None
        self._books = CallBooks(self.slots.calls, generation, [("all", self.rank, self._cluster.ranks)])
        snapshot = self.slots.get(restore_step)
        self._cluster.checkers.restored(self, restore_step, snapshot)
        assert snapshot is not None
        newer = self.slots.get(restore_step + 1)
        if newer is not None:
            self.node.store.empty(self.slots, self.rank, restore_step + 1)
        self.state, self.step, self.finished = snapshot.state, restore_step, False
        self._tell(self.node.processes.restored, generation)
        yield from self._train()

    # -- a rehearsal ---------------------------------------------------------------------------------------------

    def _rehearse(self) -> Work:
        """All calls up to training; a newcomer that everybody waits for says how far it is, and may take very long."""
        yield self._cluster.start_s()
        self._offer_store()
        whole_s = self._cluster.rehearse_s()
        for _ in range(PARTS_OF_A_PAST):
            yield whole_s / PARTS_OF_A_PAST
            self._tell(self.node.rehearsals.moved)
        self._tell(self.node.rehearsals.rehearsed)

    def _on_take_over(self, pair: Pair, generation: Generation, store: str, restore_step: Step) -> None:
        self.slots, self._entered, self.step = pair, restore_step, restore_step
        self._staged.set()
        self._joined = generation
        self.odd = self._cluster.blows.odd_of(self.rank)
        self._main = Task(self, self._enter(generation, store, restore_step))
