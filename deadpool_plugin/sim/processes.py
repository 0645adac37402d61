"""A simulated node's slots and the processes in them: orders, deaths, deadlines.

Rules of this file: the contract of agent/workers.py, lives.py, unwinding.py and pausing.py. An order replaces the
process of the order before, whose last words mean nothing from then on; a death becomes an input once, when it is
noticed; whoever has not left its call when the phase is over is killed and replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.io import ConnectionBroke, SpareFailed, StoreLost, StoreOffered, WorkerFailed, WorkerLost, WorkerRestored
from ..core.messages import RankCalls
from ..core.types import NO_STEP, Generation, Rank, Step, World
from ..transport.calls import read
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
        self.ending = self.paused = False
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
        ranks, self._start, self.committed = world.ranks_of(self._node.number), None, NO_STEP
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

    def enter(self, restore_step: Step) -> None:
        """A world that goes on from `restore_step`: what was committed after it has not happened."""
        self.committed = min(self.committed, restore_step)

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

    def abort(self, generation: Generation) -> None:
        """Interrupt everybody."""
        for slot in self.slots:
            if slot.serving is not None:
                slot.serving.abort(generation)
        if not self.paused:
            self._await_unwinding(generation)

    def _await_unwinding(self, generation: Generation) -> None:
        """A deadline for those that are in training."""
        serving = [(slot, slot.serving) for slot in self.slots if slot.serving is not None]
        asked = [(slot, process) for slot, process in serving if process.in_training]
        node = self._node
        node.timeline.after(node.timing.phase_timeout_s, node.do, self._expire, generation, asked)

    def connection_broke(self, process: Process, generation: Generation, peers: tuple[Rank, ...]) -> None:
        """`process` has met an error of the transport that nobody's loss explains."""
        if process.alive and not self.is_forgotten(process) and process.unwound_for <= generation:
            reason = "connection reset by peer"
            self._node.feed(ConnectionBroke(process.rank, generation, peers, reason))

    def pause(self) -> None:
        """Whatever runs a rank stands still."""
        self.paused = True
        for slot in self.slots:
            if slot.serving is not None:
                slot.serving.hold()

    def resume(self, fence: Generation, generation: Generation) -> None:
        """They go on; if `generation` was fenced meanwhile the time to unwind begins now."""
        self.paused = False
        for process in self.alive:
            process.go_on()
        if fence > generation:
            self._await_unwinding(fence)

    def _expire(self, generation: Generation, asked: list[tuple[Slot, Process]]) -> None:
        for slot, process in asked:
            if slot.process is process and process.unwound_for < generation:
                self._node.cluster.blows.blamed.add(self._node.number)  # for a call that takes too long
                self.kill(slot, process, "had not left its call in time and was killed")

    # -- what processes say ------------------------------------------------------------------------------------

    def offers(self, process: Process, address: str) -> None:
        if self.slots[process.slot].living is not None:
            process.stores.append(address)
            stand_in = process.rehearses and not process.took_over
            self._node.feed(StoreOffered(address, process.slot, stand_in))

    def replace_store(self, address: str) -> None:
        """Whoever hosts the store that groups are built over offers another one."""
        for slot in self.slots:
            if slot.living is not None and address in slot.living.stores:
                slot.living.host_store()

    def unwound(self, process: Process, generation: Generation) -> None:
        process.unwound_for = max(process.unwound_for, generation)

    def restored(self, process: Process, generation: Generation) -> None:
        self.unwound(process, generation)
        process.in_training = True
        self._node.feed(WorkerRestored(process.rank, generation))

    def calls(self, generation: Generation) -> tuple[RankCalls, ...]:
        """Read what every rank of this node has issued in `generation`, ended by now or not."""
        own = self._node.store.own
        ranks = sorted(slot.rank for slot in self.slots if slot.rank in own)
        return tuple(RankCalls(rank, read(own[rank].calls, generation)) for rank in ranks)

    def end_rank(self, rank: Rank, reason: str) -> None:
        for slot in self.slots:
            if slot.rank == rank and slot.living is not None:
                self.kill(slot, slot.living, reason)

    def out_of_reach(self, process: Process, restore_step: Step) -> None:
        self.kill(self.slots[process.slot], process, f"cannot go back to step {restore_step}")

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
        """Stores die with the process that hosts them."""
        stores, process.stores = process.stores, []
        for address in stores if not self.ending else ():
            self._node.feed(StoreLost(address))

    def end(self) -> None:
        """The node leaves: its processes end with it."""
        self.ending = True
        for process in self.alive:
            self._node.timeline.after(self._node.cluster.end_s(), process.end)
