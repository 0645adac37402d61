"""Path B in a simulated node: rehearsals, and what a decided plan asks of this node's processes.

Rules of this file: the contract of agent/spares.py and agent/takeover.py (call histories aside: they are the worker's).
A further plan cancels what is still under way and starts over; an attempt that comes to nothing ends its process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.io import SpareFailed, SpareRehearsed, StartRehearsal, WorkerLost, WorkerMoved
from ..core.slots import LocalSlot, divide
from ..core.types import NO_STEP, NodeId, Rank, Source, SwapPlan
from .bulk import Broken
from .processes import Slot
from .store import Pair, Refused, Snapshot
from .tasks import Signal, Task, Work
from .worker import Process

if TYPE_CHECKING:
    from .node import Node


class Rehearsals:
    """Rehearsals on this node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._finished: dict[Process, Signal] = {}
        self._starting: dict[int, Task] = {}

    def order(self, action: StartRehearsal) -> None:
        slot = self._node.processes.slots[action.local_slot]
        self._run(slot, self._start(slot, action.rank, action.source))

    def _run(self, slot: Slot, work: Work) -> None:
        self.stop_starting(slot)
        self._starting[slot.number] = Task(self._node, work)

    def stop_starting(self, slot: Slot) -> None:
        """Cancel what was ordered for `slot` and has no process yet."""
        if (task := self._starting.pop(slot.number, None)) is not None:
            task.cancel()

    def replace(self, slot: Slot) -> None:
        """The slot's rank has lost its process: another one rehearses it while the others agree."""
        if slot.rank in self._node.store.recordings:
            self._run(slot, self._start(slot, slot.rank, self._node.number))

    def _start(self, slot: Slot, rank: Rank, source: NodeId) -> Work:
        try:
            yield from self.begin(slot, rank, source)
        except (Broken, Refused) as error:
            self.give_up(slot, rank, str(error))

    def begin(self, slot: Slot, rank: Rank, source: NodeId) -> Work:
        """Get the recording and order a process. Raises: Broken, Refused."""
        node = self._node
        if rank not in node.store.recordings:
            if source == node.number:
                raise Refused(f"no recording of rank {rank} is held here")
            yield from node.mirroring.bulk.ask(lambda: node.mirroring.bulk.get_recording(source, rank))
        process = node.processes.rehearse(slot, rank)
        self._finished[process] = Signal()

    def of(self, slot: Slot, rank: Rank) -> Process | None:
        """The rehearsal of `rank` in `slot`, if its process lives."""
        process = slot.living
        return process if process in self._finished and process is not None and process.rank == rank else None

    def seen(self, slot: Slot) -> LocalSlot:
        """The slot as a plan sees it."""
        process = slot.living
        rehearsed = process.rank if process is not None and process in self._finished else -1
        return LocalSlot(slot.rank, slot.serving is not None, rehearsed)

    def finished(self, process: Process) -> Signal:
        return self._finished[process]

    def moved(self, process: Process) -> None:
        if self._node.processes.slots[process.slot].rank == process.rank:
            self._node.feed(WorkerMoved(process.rank))

    def rehearsed(self, process: Process) -> None:
        slot = self._node.processes.slots[process.slot]
        if slot.living is not process:
            return
        process.rehearsed = True
        self._finished[process].set()
        if slot.rank < 0:
            self._node.feed(SpareRehearsed(slot.number, process.rank))

    def done(self, process: Process) -> None:
        self._finished.pop(process, None)

    def give_up(self, slot: Slot, rank: Rank, reason: str) -> None:
        process = self.of(slot, rank)
        if process is not None:
            self._node.processes.kill(slot, process, reason)
        elif slot.rank == rank:
            self._node.feed(WorkerLost(rank, reason))
        else:
            self._node.feed(SpareFailed(slot.number, rank, reason))


class TakeOvers:
    """Work that is under way for the newest plan."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._tasks: list[Task] = []

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    def act(self, plan: SwapPlan) -> None:
        """Join to who runs already, a take-over for every rank that is new here."""
        self.cancel()
        node, world, step = self._node, plan.world, plan.restore_step
        if step == NO_STEP:
            node.mirroring.start_over(world)
            node.processes.form(world)
            return
        node.processes.enter(step)
        node.mirroring.enter(world, step)
        sources = {source.rank: source for source in plan.sources}
        slots, ranks = node.processes.slots, world.ranks_of(node.number)
        staying, placed = divide(ranks, [node.rehearsals.seen(slot) for slot in slots])
        if left := set(ranks) - staying.keys() - placed.keys():
            raise AssertionError(f"no slot for rank(s) {sorted(left)}, which are new on node {node.number}")
        for rank, number in staying.items():
            if rank in sources:
                self._tasks.append(Task(node, self._refill(plan, slots[number], sources[rank])))
            else:
                self._join(plan, slots[number])
        for rank, number in placed.items():
            slots[number].rank = rank
            node.rehearsals.stop_starting(slots[number])
            self._tasks.append(Task(node, self._take_over(plan, slots[number], sources.get(rank))))
        node.processes.replace_store(plan.store)

    def _join(self, plan: SwapPlan, slot: Slot) -> None:
        assert slot.serving is not None
        slot.serving.join(plan.world.generation, plan.store, plan.restore_step)
        self._node.mirroring.mirror_again(slot.rank, plan.restore_step, plan.world.generation)

    def _refill(self, plan: SwapPlan, slot: Slot, source: Source) -> Work:
        """A survivor whose own arena lacks the restore step gets it back first."""
        node, step, generation = self._node, plan.restore_step, plan.world.generation
        pair, bulk = node.store.own[source.rank], node.mirroring.bulk

        def arrived(snapshot: Snapshot) -> None:
            node.store.empty(pair, source.rank, step)
            node.store.seal(pair, snapshot)

        try:
            yield from bulk.ask(lambda: bulk.fetch(source, step, arrived))
            node.store.staged(source.rank, step, generation, node.cluster.replicas[source.rank])
        except (Broken, Refused) as error:
            node.feed(WorkerLost(source.rank, f"its restore step cannot be had: {error}"))
            return
        self._join(plan, slot)

    def _take_over(self, plan: SwapPlan, slot: Slot, source: Source | None) -> Work:
        """Bring what the rank needs here, and make it safe again, before its process is ready (that may take long)."""
        node, rank, step, generation = self._node, slot.rank, plan.restore_step, plan.world.generation
        process = node.rehearsals.of(slot, rank)
        try:
            if process is None:
                yield from node.rehearsals.begin(slot, rank, source.header_node if source else node.number)
                process = slot.process
            assert process is not None
            yield from self._bring(plan, source, rank)
            node.mirroring.mirror_again(rank, step, generation)
            yield node.rehearsals.finished(process)
            if slot.living is not process:
                return
        except (Broken, Refused) as error:
            node.rehearsals.give_up(slot, rank, f"could not be taken over: {error}")
            return
        process.took_over = True
        node.rehearsals.done(process)
        if node.processes.paused:
            process.hold()
        process.take_over(node.store.own[rank], generation, plan.store, step)
        process.commit(node.processes.committed)

    def _bring(self, plan: SwapPlan, source: Source | None, rank: Rank) -> Work:
        """The snapshot comes here and is this node's to serve. Raises: Broken, Refused."""
        node, step, generation = self._node, plan.restore_step, plan.world.generation
        replicas, bulk = node.cluster.replicas[rank], node.mirroring.bulk
        if source is None and not (rank in node.store.own and (rank, step) in node.store.listed):
            source = Source(rank, node.number, node.number, rank)  # cut off before: it is here as a mirror still
        if source is not None:
            fetched = Pair()
            wanted, fence = source, node.store.fence

            def arrived(snapshot: Snapshot) -> None:
                fetched.slots[step % 2] = snapshot
                node.store.adopt_own(fetched, rank, step, fence, replicas)

            yield from bulk.ask(lambda: bulk.fetch(wanted, step, arrived))
        node.store.recordings.add(rank)
        node.store.staged(rank, step, generation, replicas)
