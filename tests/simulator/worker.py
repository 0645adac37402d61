"""A worker process of the toy job: one rank in training, or a rehearsal of one.

Rules of this file: what worker/ promises its agent: the cut of a step is staged, if that is a snapshot, once the
snapshot before is committed and before the next update; or if it becomes one by then; an abort unwinds it some time
later, whatever it does; a restore takes the slot of the restore step and nothing else; its log of calls reaches two
snapshots back, and a process that is told to go back further is replaced; a process of local rank 0 hosts the stores.
The records of a rehearsed rank come in step order from its first step on, whole, before it takes over.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deadpool_plugin.core import local
from deadpool_plugin.core.chain import Chain
from deadpool_plugin.core.signatures import Activity
from deadpool_plugin.core.types import NO_STEP, Generation, Rank, Step
from deadpool_plugin.mirror.arena import SlotPair
from deadpool_plugin.transport.flight_recorder import FlightRecorder, Whereabouts

from .clock import Timeline
from .groups import SUM, Group, Odd
from .tasks import Signal, Task, Work
from .training import State, first_state, gradient, restored, updated
from .violation import Violation

if TYPE_CHECKING:
    from .machine import ToyPair
    from .node import Node

HEADER_BYTES, PAYLOAD_BYTES, LAYOUT = 256, 24, "toy"
SAVE_EVERY = 5
PARTS_OF_A_PAST = 3
"""How often in a rehearsal it is told that it gets on."""


def record_of(rank: Rank, step: Step) -> bytes:
    """Make the call records of one step."""
    return struct.pack("<II", rank, step)


class Process:
    """`order` counts what its slot was told to start. `slots`: its arena, once it has one. `exit_code`: once it has
    ended, negative for a signal."""

    def __init__(self, node: Node, slot: int, order: int, rank: Rank, rehearses: bool, pid: int) -> None:
        self.node, self.slot, self.order, self.rank, self.rehearses, self.pid = node, slot, order, rank, rehearses, pid
        self.alive, self.exit_code = True, 0
        self.stuck = self.held = self.is_deaf = False
        self.hangs = ""  # where: in its next "call", in the "script", or past a collective that it does not "join"
        self.slow_s = 0.0  # that its next call takes longer than usual
        self._line, self._gets_on = 0, False
        self._backlog: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.took_over = self.in_training = False
        self.unwound_for: Generation = 0
        self.state: State | None = None
        self.step: Step = NO_STEP
        self.finished = False
        self._cluster = node.cluster
        self._shard = node.cluster.shard_of[rank]
        self._committed: Step = NO_STEP
        self._committed_at = self._updated_at = self._worked_s = 0.0
        self._worked_steps = 0
        self._chain = Chain()
        self._taken: list[tuple[Step, float]] = []
        self._oldest: Step = 0
        self._is_at_gate = False
        self._may_stage = False  # the newest cut may become a snapshot yet
        self._gone_on: Step = NO_STEP
        self._begun = set[Step]()
        self._saved: Step = 0
        self._aborted: Generation = 0
        self.joined: Generation = 0
        self._join: tuple[Generation, str, Step] | None = None
        self.entered: Step = 0
        self._past: Step = NO_STEP
        """The newest step of which it was told, before it took over."""
        self.odd: Odd | None = None
        """Calls that it issues in its first step and its peers do not."""
        self.mispaired = False
        self._books: FlightRecorder | None = None
        """Calls that it issues in this generation; None before the first swap."""
        self._pairs = False  # since a swap
        self._place, self._step_is, self._has_stepped = Whereabouts(), Activity.FIRST_STEP, False
        self.slots: ToyPair | None = None
        self.group: Group | None = None
        self._start, self._arena, self._gate, self._recording = Signal(), Signal(), Signal(), Signal()
        self._staging: Task | None = None
        self._staged = Signal()
        node.machine.processes.pids[pid] = self
        self.peer = node.new_peer(pid, self._hear)
        self.tell(local.WorkerHello(slot, pid, rank, rehearses, order))
        self.peer.add(local.StackFile(), (0,))
        self._main = Task(self, self._rehearse() if rehearses else self._begin())

    @property
    def timeline(self) -> Timeline:
        return self.node.timeline

    def do(self, work: Callable[..., object], *arguments: Any) -> None:
        """Where this process's tasks run: nowhere once it has ended or stands still."""
        if self.alive and not self.stuck:
            if self.node.paused:
                self.node.do(self._if_alive, work, *arguments)
            elif self.node.runs:
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

    def end(self, exit_code: int = -9) -> None:
        """Killed, or gone by itself."""
        if not self.alive:
            return
        self.alive, self.exit_code = False, exit_code
        self._main.cancel()
        if self._staging is not None:
            self._staging.cancel()
        self.node.machine.processes.ended(self, exit_code)

    def looked_at(self) -> int:
        """Return the line that its main thread is in: another one each time, if it gets on."""
        self._line += self._gets_on
        return self._line

    # -- the line to the agent -----------------------------------------------------------------------------------

    def tell(self, message: local.LocalMessage) -> None:
        self.peer.say(message)

    def _hear(self, message: Any, fds: tuple[int, ...]) -> None:
        self.do(self._heard, message, fds)

    def _heard(self, message: Any, fds: tuple[int, ...]) -> None:
        match message:
            case local.StartGroups(generation=generation, store=store):
                self._start.set((generation, store))
            case local.ArenaHandOver():
                self._chain = Chain(0, message.every, message.fixed)
                self._arena.set(self.node.pair_of(fds[0]))
            case local.Committed(step, snapshots, void):
                self._commit(step)
                self._hear_snapshots(snapshots, void)
            case local.Abort(generation=generation):
                self._on_abort(generation)
            case local.Join():
                self._join = (message.generation, message.store, message.restore_step)
                self._chain = Chain(message.restore_step, message.every, message.fixed)
                self._follow_plan()
            case local.TakeOver():
                self._on_take_over(message, fds[0])
            case local.HostStore():
                self._offer_store()
            case local.Recording():
                self._recording.set()
            case local.History(records=records):
                for record in records:
                    self._past += 1
                    if record != record_of(self.rank, self._past):
                        raise Violation("BIT_EXACT", f"rank {self.rank} is told {record!r} of step {self._past}")
            case local.Park():
                self.timeline.after(self._cluster.local_s(), self.do, self.tell, local.Parked(self.rank, 0, 0, 0))
            case local.End(exit_code=exit_code):
                self.timeline.after(self._cluster.end_s(), self.end, exit_code)

    def _commit(self, step: Step) -> None:
        if step > self._committed:
            self._committed, self._committed_at = step, self.timeline.now
            self._chain.forget_before(step)
        if self.rank == 0 and step >= self._saved + SAVE_EVERY:
            self._saved = step
            self.tell(local.CheckpointSaved(step, f"checkpoints/{step}"))
        gate, self._gate = self._gate, Signal()
        gate.set()

    def _hear_snapshots(self, snapshots: tuple[Step, ...], void: tuple[Step, ...]) -> None:
        if not self._chain.learn(snapshots, void):
            return
        gate, self._gate = self._gate, Signal()
        gate.set()
        if self._aborted <= self.joined:
            self._look_again()

    def _look_again(self) -> None:
        """Begin the snapshot of the newest cut, if it is to be one; say which it is too late for."""
        if self._may_stage and self.step in self._chain:
            self._may_stage = False
            self._stage_now(0.0)
        for step in self._chain.announced(self._committed):
            if step <= self._gone_on and step not in self._begun:
                self._begun.add(step)
                self.tell(local.Passed(self.rank, step, self.joined))

    # -- from the top --------------------------------------------------------------------------------------------

    def _begin(self) -> Work:
        yield self._cluster.start_s()
        if self.rank == 0:
            self._offer_store()
        generation, store = yield self._start
        self.joined = generation
        yield from self._build(generation, store)
        yield self._cluster.start_s()
        replicas = self._cluster.replicas[self.rank]
        self.tell(local.RankReady(self.rank, HEADER_BYTES, PAYLOAD_BYTES, LAYOUT, replicas, b"the start"))
        self.slots = yield self._arena
        self.in_training = True
        self.state, self.step = first_state(self.rank, self._shard), 0
        self._count(generation)
        self._stage()
        self._updated_at = self.timeline.now
        self._offer_store()
        yield from self._train()

    def _build(self, generation: Generation, store: str) -> Work:
        self.group = self._cluster.group(generation, store)
        yield self.group.join(self)
        self._cluster.checkers.joined_group(self, generation)

    def _offer_store(self) -> None:
        if self.slot == 0:
            self.tell(local.StoreOffer(self._cluster.new_store(self)))

    # -- steps ---------------------------------------------------------------------------------------------------

    def _count(self, generation: Generation) -> None:
        """Begin to count collectives, and to say where it is."""
        assert self.slots is not None
        self._books = FlightRecorder(self.slots.calls, generation, [("all", self.rank, self._cluster.ranks)])
        self._place = Whereabouts(self.slots.calls, lambda: int(self.node.loop.time() * 1e9))
        self._step_is = Activity.STEP_AGAIN if self._has_stepped else Activity.FIRST_STEP

    def _train(self) -> Work:
        while self.step < self._cluster.last_step:
            if self.hangs == "script":
                yield self._hang()
            self._place.enter(self._step_is, "train_step")
            yield self._cluster.compute_s()
            if self.slow_s and not self.hangs:
                slow_s, self.slow_s, self._gets_on = self.slow_s, 0.0, True
                yield slow_s
                self._gets_on = False
            if self.hangs == "call":
                yield self._hang()
            if (curse := self._cluster.blows.cursed(self)) is not None:
                self.tell(local.Failing(self.rank, "it is cursed", of_host=curse.of_host))
                self.timeline.after(0.0, self.end, 1)
                yield Signal()
            assert self.state is not None and self.group is not None
            odd, self.odd = self.odd, None
            if odd is not None:
                self._cluster.blows.mispairs(self, self.group, odd)
                if not odd.instead:
                    self._place.wait("allreduce", "all")
                    yield self._issue(0.0, odd.code)
            if self.hangs == "join":
                self._place.wait("the step before to be committed", "")
                yield self._hang()
            self._place.wait("allreduce", "all")
            total = yield self._issue(gradient(self.state), odd.code if odd is not None and odd.instead else SUM)
            self._place.wait("the step before to be committed", "")
            yield from self._wait_for_gate()
            self._place.enter(Activity.SCRIPT, "")
            self.state, self.step = updated(self.state, total, self._shard, self.group.generation), self.step + 1
            self._has_stepped, self._step_is = True, Activity.STEP
            self._place.made(self.step)
            self._cluster.checkers.updated(self)
            self._stage()
            yield from self._save()
        yield self._staged
        self.finished = True
        self.tell(local.WorkerFinished(self.rank))

    def _wait_for_gate(self) -> Work:
        """Until nothing is staged, and the next snapshot is known: the state may change then."""
        began, self._may_stage, self._gone_on = self.timeline.now, False, self.step
        yield self._staged
        while self._chain.after(self.step) == NO_STEP:
            yield self._gate
        self._worked_s += began - self._updated_at
        self._worked_steps += 1
        self._updated_at = self.timeline.now

    def _save(self) -> Work:
        """A save, which begins when its step is committed: now and then, of the ranks that the scenario says."""
        step = self.step
        if not self._cluster.saves(self.rank, step):
            return
        self._place.wait(f"step {step} to be committed", "")
        if step not in self._chain and max(self.entered, self._committed) < step:
            self.tell(local.Wanted(self.rank, step, self.joined))
        while max(self.entered, self._committed) < step and not self._chain.is_void(step):
            yield self._gate
        self._cluster.checkers.saves(self, step)

    def is_void(self, step: Step) -> bool:
        return self._chain.is_void(step)

    def _hang(self) -> float | Signal:
        """Until it is interrupted; in the script's own code until that goes on by itself."""
        slow_s, self.slow_s = self.slow_s, 0.0
        if slow_s:
            self.hangs = ""
            return slow_s
        return Signal()

    def _issue(self, value: float, code: int) -> Signal:
        assert self.group is not None
        if self._books is not None:
            self._books.records[0].note(code)
        return self.group.all_reduce(self, value, code)

    def _stage(self) -> None:
        cut = self._books.cut(self.step) if self._books is not None else 0
        self._paired = cut if self._pairs else 0
        if self._taken:
            self._oldest = max(self._oldest, self._taken[0][0])
        if self.step in self._chain:
            step_s = self._worked_s / max(1, self._worked_steps)
            self._worked_s, self._worked_steps = 0.0, 0
            self._stage_now(step_s)
        else:
            self._may_stage = True
            self._look_again()

    def _stage_now(self, step_s: float) -> None:
        self._staged = Signal()
        self._begun = {step for step in self._begun if step > self._committed} | {self.step}
        self._staging = Task(self, self._stage_one(self.step, self.state, self.joined, self._paired, step_s))

    def _stage_one(self, step: Step, state: State | None, generation: Generation, paired: int, step_s: float) -> Work:
        assert self.slots is not None and state is not None
        self._is_at_gate = True
        while not self._chain.may_stage(step, self._committed):
            yield self._gate
        self._is_at_gate = False
        pair, before = self.slots, self._chain.before(step)
        taken_at = next((at for taken, at in self._taken if taken == before), 0.0)
        took_steps = max(0.0, self._committed_at - taken_at) / step_s if taken_at and step_s else 0.0
        first = self._taken[-1][0] if self._taken else NO_STEP
        self._taken = [*(one for one in self._taken if one[0] == before), (step, self.timeline.now)]
        pair.invalidate(step, before)
        yield self._cluster.copy_s()
        pair.payload(step)[:] = state.payload
        scalars = zlib.crc32(state.payload).to_bytes(4, "little") + state.header
        pair.seal(step, generation, LAYOUT, scalars, paired)
        records = [record_of(self.rank, made) for made in range(first + 1, step + 1)]
        self.tell(local.Staged(self.rank, step, generation, records, took_steps))
        self._staged.set()

    # -- a swap --------------------------------------------------------------------------------------------------

    def _on_abort(self, generation: Generation) -> None:
        self._aborted = max(self._aborted, generation)
        if (self.in_training or self.took_over) and not (self.hangs and self.is_deaf):
            self.timeline.after(self._cluster.unwind_s(self.node), self.do, self._unwound)

    def _unwound(self) -> None:
        """Out of whatever it was in; the newest plan may be here already."""
        if self.unwound_for >= self._aborted or self.joined >= self._aborted:
            return
        self._main.cancel()
        self.hangs, self._gets_on = "", False
        self.unwound_for = self._aborted
        self.tell(local.Unwound(self._aborted))
        self._follow_plan()

    def _follow_plan(self) -> None:
        if self._join is None or self._join[0] < max(self._aborted, self.joined + 1):
            return
        if self.unwound_for < self._join[0]:
            return
        self.joined = self._join[0]
        self._main.cancel()
        self._main = Task(self, self._rejoin(*self._join))

    def _rejoin(self, generation: Generation, store: str, restore_step: Step) -> Work:
        if restore_step < max(self.entered, self._oldest):
            self.tell(local.OutOfReach(f"cannot go back to step {restore_step}"))
            return
        self._drop_gated()
        yield self._staged
        self._committed = min(self._committed, restore_step)
        yield from self._enter(generation, store, restore_step)

    def _drop_gated(self) -> None:
        """A snapshot that still waits at the gate is given up; one that is being copied is finished."""
        self._may_stage, self._gone_on = False, NO_STEP
        if self._staging is not None and self._is_at_gate:
            self._staging.cancel()
            self._staged.set()

    def _enter(self, generation: Generation, store: str, restore_step: Step) -> Work:
        yield from self._build(generation, store)
        assert self.slots is not None
        self._pairs = True
        self._count(generation)
        self.state = state_of(self.slots, restore_step)
        self._cluster.checkers.restored(self, restore_step, self.slots.open(restore_step) is not None, self.state)
        self.slots.drop_newer(restore_step)
        self._taken, self._gone_on, self._begun = [(restore_step, 0.0)], restore_step, {restore_step}
        self._oldest = max(self._oldest, restore_step)
        self.step, self.finished, self.in_training = restore_step, False, True
        self._place.made(restore_step)
        self.tell(local.WorkerRestored(self.rank, generation))
        yield from self._train()

    # -- a rehearsal ---------------------------------------------------------------------------------------------

    def _rehearse(self) -> Work:
        """All calls up to training; a newcomer that everybody waits for says how far it is, and may take very long."""
        yield self._cluster.start_s()
        self._offer_store()
        yield self._recording
        whole_s = self._cluster.rehearse_s()
        for _ in range(PARTS_OF_A_PAST):
            yield whole_s / PARTS_OF_A_PAST
            self.tell(local.Moved(self.rank, max(0, self._past)))
        self.tell(local.Rehearsed(self.rank, whole_s))

    def _on_take_over(self, order: local.TakeOver, fd: int) -> None:
        if self._past != order.restore_step:
            at = f"step {order.restore_step}, and knows the calls up to step {self._past}"
            raise Violation("BIT_EXACT", f"rank {self.rank} on node {self.node.number} takes over from {at}")
        self.slots, self.entered, self.step = self.node.pair_of(fd), order.restore_step, order.restore_step
        self._chain = Chain(order.restore_step, order.every, order.fixed)
        self.took_over = True
        self._staged.set()
        self.joined = order.generation
        self.odd = self._cluster.blows.odd_of(self.rank)
        self._main = Task(self, self._enter(order.generation, order.store, order.restore_step))


def state_of(pair: SlotPair, step: Step) -> State | None:
    """The state in a slot; None if it is not there, or header and payload do not belong together."""
    header = pair.open(step)
    if header is None or not pair.payload_bytes:
        return None
    return restored(bytes(pair.payload(step)), header.scalars[4:])
