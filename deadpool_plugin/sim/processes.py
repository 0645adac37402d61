"""A simulated node's slots and the processes in them: orders, deaths, deadlines.

Rules of this file: the contract of agent/workers.py, agent/lives.py and agent/unwinding.py. An order replaces the
process of the order before, whose last words mean nothing from then on; a death becomes an input once, when it is
noticed; whoever has not left its call when the phase is over is killed and replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.io import SpareFailed, StoreLost, StoreOffered, WorkerFailed, WorkerLost, WorkerRestored
from ..core.types import NO_STEP, Generation, Rank, Step, World
from .worker import Process

if TYPE_CHECKING:
    from .node import Node


@dataclass(eq=False)
class Slot:
    """One local rank. `rank` is what it runs in this world, -1 on a node that stands by; `known_dead`: the newest
    process whose end has been noticed."""

    number: int
    rank: Rank = -1
    process: Process | None = None
    known_dead: Process | None = None
    forgotten: int = 0

    @property
    def living(self) -> Process | None:
        """The process ordered last, unless it is known to have ended."""
        return self.process if self.process is not self.known_dead else None

    @property
    def serving(self) -> Process | None:
        """The process that runs the slot's rank, as far as the agent knows."""
        process = self.living
        if process is None or process.rank != self.rank or (process.rehearses and not process.took_over):
            return None
        return process


class Processes:
    """All slots of one node."""

    def __init__(self, node: Node, slots: int) -> None:
        self._node = node
        self.slots = [Slot(number) for number in range(slots)]
        self.committed: Step = NO_STEP
        self.ending = False
        self._held: list[Process] | None = None
        self._aborted_held: Generation = 0
        self._orders = 0
        self._start: tuple[Generation, str] | None = None

    def of(self, rank: Rank) -> Process | None:
        """The process that runs `rank` here now."""
        return next((slot.serving for slot in self.slots if slot.rank == rank and slot.serving is not None), None)

    @property
    def alive(self) -> list[Process]:
        return [slot.process for slot in self.slots if slot.process is not None and slot.process.alive]

    # -- orders ------------------------------------------------------------------------------------------------

    def form(self, world: World) -> None:
        """A world whose ranks begin the script."""
        ranks, self._start = world.ranks_of(self._node.number), None
        for slot in self.slots:
            slot.rank = ranks[slot.number] if slot.number < len(ranks) else -1
            if slot.rank >= 0:
                self._order(slot, slot.rank, rehearses=False)

    def rehearse(self, slot: Slot, rank: Rank) -> Process:
        return self._order(slot, rank, rehearses=True)

    def _order(self, slot: Slot, rank: Rank, rehearses: bool) -> Process:
        if slot.process is not None:
            self._forget(slot)
        self._orders += 1
        slot.process = Process(self._node, slot.number, self._orders, rank, rehearses)
        if self._start is not None and not rehearses:
            slot.process.start_groups(*self._start)
        return slot.process

    def _forget(self, slot: Slot) -> None:
        """Another process takes this one's place."""
        assert slot.process is not None
        slot.process.end()
        slot.forgotten = slot.process.order
        self._withdraw(slot.process)

    def is_forgotten(self, process: Process) -> bool:
        return process.order <= self.slots[process.slot].forgotten

    def start_groups(self, generation: Generation, store: str) -> None:
        self._start = (generation, store)
        for slot in self.slots:
            if slot.serving is not None:
                slot.serving.start_groups(generation, store)

    def commit(self, step: Step) -> None:
        self.committed = max(self.committed, step)
        for slot in self.slots:
            if slot.serving is not None:
                slot.serving.commit(step)

    def pause(self) -> None:
        """Whoever runs a rank stands still."""
        self._held = [slot.serving for slot in self.slots if slot.serving is not None]
        for process in self._held:
            process.hold()

    def resume(self) -> None:
        held, self._held = self._held or [], None
        for process in held:
            process.go_on()
        if self._aborted_held:
            self._expire_later(self._aborted_held)
            self._aborted_held = 0

    def abort(self, generation: Generation) -> None:
        """Interrupt everybody; a deadline for those that are in training, from when they can hear of it."""
        for slot in self.slots:
            if slot.serving is not None:
                slot.serving.abort(generation)
        if self._held is None:
            self._expire_later(generation)
        else:
            self._aborted_held = generation

    def _expire_later(self, generation: Generation) -> None:
        asked = []
        for slot in self.slots:
            process = slot.serving
            if process is not None and (process.in_training or process.took_over):
                asked.append((slot, process))
        node = self._node
        node.timeline.after(node.timing.phase_timeout_s, node.do, self._expire, generation, asked)

    def _expire(self, generation: Generation, asked: list[tuple[Slot, Process]]) -> None:
        for slot, process in asked:
            if slot.process is process and process.unwound_for < generation:
                self.kill(slot, process, "had not left its call in time and was killed")

    # -- what processes say ------------------------------------------------------------------------------------

    def offers(self, process: Process, address: str) -> None:
        if self.slots[process.slot].living is not None:
            process.store = address
            self._node.feed(StoreOffered(address))

    def unwound(self, process: Process, generation: Generation) -> None:
        process.unwound_for = max(process.unwound_for, generation)

    def restored(self, process: Process, generation: Generation) -> None:
        self.unwound(process, generation)
        process.in_training = True
        self._node.feed(WorkerRestored(process.rank, generation))

    # -- deaths ------------------------------------------------------------------------------------------------

    def noticed(self, process: Process, exit_code: int) -> None:
        """/proc shows that it has ended; negative for a signal."""
        slot = self.slots[process.slot]
        if slot.process is not process or slot.known_dead is process or self.ending:
            return
        slot.known_dead = process
        self._withdraw(process)
        if exit_code < 0 or slot.rank < 0 or (process.rehearses and not process.in_training):
            self._lost(slot, process, f"ended by signal {-exit_code}")
        else:
            self._node.rehearsals.replace(slot)
            self._node.feed(WorkerFailed(slot.rank, exit_code or 1, "the script raised"))

    def kill(self, slot: Slot, process: Process, reason: str) -> None:
        if slot.known_dead is process or self.ending:
            return
        slot.known_dead = process
        process.end()
        self._withdraw(process)
        self._lost(slot, process, reason)

    def _lost(self, slot: Slot, process: Process, reason: str) -> None:
        if slot.rank < 0:
            self._node.feed(SpareFailed(slot.number, process.rank, reason))
        elif process.rank == slot.rank:
            self._node.rehearsals.replace(slot)
            self._node.feed(WorkerLost(slot.rank, reason))

    def _withdraw(self, process: Process) -> None:
        """A store dies with the process that hosts it."""
        address, process.store = process.store, ""
        if address and not self.ending:
            self._node.feed(StoreLost(address))

    def end(self) -> None:
        """The node leaves: its processes end with it."""
        self.ending = True
        for process in self.alive:
            self._node.timeline.after(self._node.cluster.end_s(), process.end)
