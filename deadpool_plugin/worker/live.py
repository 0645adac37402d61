"""A rank in training: calls are logged, steps are staged, and a swap is lived through inside a call.

Rules of this file: everything runs on the main thread; the script sees each call return its value once, and no more.
A generation change surfaces as GenerationChanged at a wait or in a collective. It unwinds the interrupted call, or the
wait at the end of the script, and gets no further than here; another one meanwhile starts the swap over.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..comm.collective import Operation
from ..comm.fabric import HandleWork
from ..comm.generations import Generations
from ..comm.handle import Handle
from ..core import local
from ..core.policy import Policy
from ..core.signatures import DEVICE, Activity
from ..errors import WHOLE_STEP, GenerationChanged, Unsupported
from ..mirror.arena import SlotPair, budgets
from ..transport.flight_recorder import Whereabouts
from . import codec, copies, rng, switches
from .adapter import capture_rng, restore_rng
from .calls import Call, CallKind, CallLog, LoggedCall, forget
from .context import Context
from .copies import Kept
from .iterators import RewindIterator
from .link import JobEnded, give_up
from .mute import flush
from .patching import when_imported
from .saving import Flight, SaveCall
from .staging import Layout, Stager

KEPT_AFTER = 2  # steps of a process, when what each of them keeps is known
LOOK_AT_MEMORY_STEPS = 256  # after so many it is looked at again
MEMORY_SHARE = 0.25  # of what is free, for inputs of calls that are kept because snapshots are apart
PROGRESS_EVERY_S = 1.0  # shortest time between two messages of progress; a stall's limit is several times this


class _Inside:
    """Encloses the execution of a call. Raises: GenerationChanged instead of an exception that follows from it."""

    def __init__(self, generations: Generations, slots: SlotPair) -> None:
        self._generations, self._slots, self.is_entered = generations, slots, False

    def __enter__(self) -> None:
        self.is_entered = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.is_entered = False
        if kind is not None and issubclass(kind, Exception):
            # An NCCL abort ends kernels without an error: whatever a call computes afterwards is meaningless.
            self._generations.check_heard(self._slots.announced)


class Live:
    """One rank's life between its first forward and its end."""

    def __init__(self, context: Context, layout: Layout, slots: SlotPair, step: int) -> None:
        self._context, self._layout, self._slots, self._rank = context, layout, slots, slots.rank
        self._link, self._groups, self._adapter = context.link, context.groups, context.adapter
        self._groups.calls_area = slots.calls
        self._place = self._groups.generations.place = Whereabouts(slots.calls)
        self._step_is = Activity.FIRST_STEP  # until one was made by this process, in this generation
        when_imported("torch._dynamo.callback", lambda module: _note_compilations(module.callback_handler, self._place))
        self._stager = Stager(layout, self._adapter.state.changing, slots, context.link)
        self._log, self._first, self._is_limited = CallLog(step), step, False
        self._inside = _Inside(self._groups.generations, slots)
        self._updated = False  # the call being executed has made an update
        self._results = copies.on_host()  # of what the newest call told
        self._loss: float | None = None
        self._error = ""  # that a failed call gave the script, which must not go on after it
        self._at_entry: dict[str, Any] = {}  # random states when the newest call began,
        self._at_exit: dict[str, Any] = {}  # and when it was done
        self._versions_at_cut: int | None = None  # of the shard, until the next call or collective
        self._has_noted_edit = self._cannot_be_followed = False
        self._progress_at = 0.0
        self._restored = -1  # the step that the newest swap went back to,
        self._restored_data: Sequence[bytes | None] = ()  # and the states of its data
        self._swap_began: float | None = None

    @property
    def inside(self) -> bool:
        return self._inside.is_entered

    # ---- what the script asks for

    def call(self, call: Call) -> Any:
        """Make a call of the framework; the adapter puts this around each."""
        if self._inside.is_entered:
            if call.kind is CallKind.UPDATE:
                self._updated = True
                self._wait_for_gate()
            return call()
        self._get_on()
        self._begin()
        if call.kind is CallKind.LIGHT:
            return self._make_light(call)
        data, found = self._log.iterators.wrap(call.kwargs.get("data_iterator"))
        if found:
            call.kwargs["data_iterator"] = data
        logged = LoggedCall(call, self._log.step, self._entry(), self._places(found))
        read = self._context.tapes.take_digest()
        self._updated = False
        try:
            value = self._run(logged)
        except BaseException as error:  # torch's CheckpointException is no Exception
            if (outcome := call.failed(error)) is not None:
                self._done(logged, outcome, read)
            raise
        if call.kind is CallKind.STEP and not self._updated:
            raise Unsupported(
                f"{call.name} ended without an optimizer step",
                "a whole iteration: all micro-batches that are accumulated, and the update",
                "let one call of the function do all of it",
            )
        self._done(logged, call.outcome(value), read)
        loss = call.loss(value, self._results)
        self._loss = loss if loss is not None else self._loss
        if call.makes_step:
            self._cut()
        self._results = copies.on_host()  # the old ones keep the script's tensors, and their graph
        return value

    def _make_light(self, call: Call) -> Any:
        """Make a call that needs nobody: no generation is looked at, so that it cannot be interrupted."""
        read = self._context.tapes.take_digest()
        self._inside.is_entered = True
        try:
            value = call()
        except Exception as error:
            self._failed(call, error)
            raise
        finally:
            self._inside.is_entered = False
        self._log.add(LoggedCall(call, self._log.step, None), value, read)
        return value

    def _get_on(self) -> None:
        """Say now and then that this process gets on: even a very long step is seen to make progress."""
        now = time.monotonic()
        if now - self._progress_at >= PROGRESS_EVERY_S:
            self._progress_at = now
            self._link.send(local.WorkerMoved(self._rank))

    def collective(self, handle: Handle, operation: Operation) -> Any:
        """Issue a collective; outside any call it is a call of its own, done to the end before it returns."""
        self._get_on()
        if self._inside.is_entered:
            return self._groups.issue(handle, operation)
        self._begin()
        given, written = operation.tensors(), operation.outputs()
        kept = Operation(*copies.replaced(operation, copies.copied))  # of a device in host memory after the call
        restore_entry = self._entry()

        def restore_tensors() -> None:
            restore_entry()
            for mine, before in zip(given, kept.tensors(), strict=True):
                mine.detach().copy_(before)

        def first_time() -> list[Any]:
            work = self._groups.issue(handle, operation)
            work.wait()
            return [written, int(work.source_rank())]

        def again() -> None:
            self._groups.issue(handle, Operation(*copies.replaced(kept, copies.copied_back))).wait()

        call = Call(operation.name, CallKind.PLAIN, first_time)
        logged = LoggedCall(call, self._log.step, restore_tensors, self._places())
        outcome = self._run(logged)
        if not any(map(self._adapter.state.owns, written)):  # else the calls before it bring its entry back
            call.function = again
        logged.restore_entry = restore_entry
        self._done(logged, outcome)
        self._results = copies.on_host()
        return HandleWork(operation, outcome[1])

    def finish(self) -> int:
        """Serve swaps until everyone's script has ended, as this one has. Returns the exit code."""
        self._link.send(local.WorkerFinished(self._rank))
        while True:
            try:
                exit_code = self._link.wait_for_end()
                self._restored = self._log.step  # nothing goes back behind it any more: a save now need not wait
                return exit_code
            except GenerationChanged as change:
                forget(change)
            with contextlib.suppress(JobEnded):
                self._swap()
                self._link.send(local.WorkerFinished(self._rank))

    # ---- one call

    def _begin(self) -> None:
        """Refuse to go on after an error; say once that the script has written into the shard since the cut."""
        if self._error:
            raise Unsupported(
                f"{self._error}; the script went on",
                "training calls that return",
                "let the error end the script: neither a redo nor a spare could repeat what it did",
            )
        before, self._versions_at_cut = self._versions_at_cut, None
        if before is None or self._has_noted_edit or self._layout.versions() == before:
            return
        self._has_noted_edit = True  # a snapshot may be under way, and no redo repeats what is done outside of calls
        text = (
            f"the script changed weights or optimizer state of rank {self._rank} after step {self._log.step}, outside "
            f"of any training call: a swap may lose this change; to do: {WHOLE_STEP}, this change included"
        )
        self._link.event("Note", text=text)

    def _places(self, given: Sequence[RewindIterator] = ()) -> list[tuple[RewindIterator, int]]:
        """List the place in each iterator that a call or the script reads: a redo must return there, too."""
        return [(iterator, iterator.position) for iterator in (*given, *self._context.tapes)]

    def _entry(self) -> Callable[[], None]:
        framework, kernels = self._adapter.state.entry_state(), switches.capture()
        random_states = self._at_entry = capture_rng(self._adapter, self._at_exit)
        if self._at_exit and random_states is not self._at_exit:
            self._log.drew(rng.drawn(self._at_exit, random_states))

        def restore() -> None:
            torch.clear_autocast_cache()
            switches.restore(kernels)
            framework()
            restore_rng(self._adapter, random_states)

        return restore

    def _run(self, logged: LoggedCall) -> Any:
        """Execute a call, through as many swaps as come."""
        while True:
            try:
                return self._execute(logged)
            except GenerationChanged as change:
                forget(change)
            except Exception as error:
                if logged.call.kind is not CallKind.SAVE:  # which is redone, and told to who follows, as failed
                    self._failed(logged.call, error)
                raise
            self._swap()
            logged.rewind()

    def _failed(self, call: Call, error: Exception) -> None:
        self._error = f"{call.name} raised {type(error).__name__}: {error}"

    def _wait_for_gate(self) -> None:
        """Block until the shard may change: the newest snapshot is taken, for which all ranks made the step before."""
        self._place.wait("the step before to be committed", "")
        self._stager.wait()
        self._place.go_on()

    def _wait_for_commit(self, step: int) -> None:
        """Block until `step`, at which this rank is, is committed; ask for a snapshot of it if none is to be taken."""
        link = self._link
        with link.locked():
            wants = step not in link.chain and max(self._restored, link.committed) < step
        if wants:
            link.send(local.Wanted(self._rank, step, link.generation))
        link.wait_until(lambda: max(self._restored, link.committed) >= step or link.chain.is_void(step))
        if max(self._restored, link.committed) < step:
            text = (
                f"a save of rank {self._rank} after step {step} begins before that step is mirrored, from which another"
                " rank had gone on: if a host is lost while it is written, it is written again"
            )
            link.event("Note", text=text)

    def _execute(self, logged: LoggedCall) -> Any:
        call, saves = logged.call, self._context.saves
        self._groups.generations.check()
        self._results = copies.on_host()
        activity = Activity.SAVE if call.kind is CallKind.SAVE else self._step_is
        with self._inside, self._place.within(Activity.EVALUATION if call.evaluates else activity, call.name):
            if call.kind is CallKind.UPDATE:
                self._wait_for_gate()
            if isinstance(call, SaveCall):
                saves.step = step = logged.segment
                if call.gated:  # it begins once its step is committed: no swap goes back behind what is written
                    self._place.wait(f"step {step} to be committed", "")
                    self._wait_for_commit(step)
                    self._place.go_on()
                with saves.under_way():
                    return call()
            value = call()
            # Wait until the results are sure to be valid. A kernel of NCCL's ends well, with garbage, if a neighbour on
            # this host was aborted (prims_simple.h: an aborted one posts its steps without their data), and that
            # process may have heard of it before this one. The device is waited for where its results can be read: at
            # the latest by the call that makes the step.
            is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            if is_used and (call.is_read or not codec.is_plain(value)):
                self._results = copies.on_host(call.told(value))
                self._place.wait(DEVICE, "")
                torch.cuda.current_stream().synchronize()
                self._place.go_on()
            self._groups.generations.check_heard(self._slots.announced)
        return value

    def _done(self, logged: LoggedCall, outcome: Any, read: int = 0) -> None:
        """Record a call: the script gets its value now, and what it draws from here on is its own."""
        lacking = self._log.add(logged, self._results(outcome), read)
        if lacking and not self._cannot_be_followed:
            self._cannot_be_followed = True
            text = (
                f"{logged.call.name} in the loop of step {self._log.step + 1} gave rank {self._rank} "
                f"{lacking.description}: no other process can take this rank over any more; keep large results out of "
                f"the loop, or {WHOLE_STEP}"
            )
            self._link.event("Note", text=text)
        self._at_exit = capture_rng(self._adapter, self._at_entry)
        self._adapter.state.left()

    # ---- steps

    def _cut(self) -> None:
        step, self._step_is, oldest = self._log.step + 1, Activity.STEP, self._stager.oldest
        self.stage(step, self._at_exit)
        self._log.prune(step, oldest, self._stager.begun)
        if not self._link.chain.fixed and (step - self._first) % LOOK_AT_MEMORY_STEPS == KEPT_AFTER:
            self._limit_distance()
        flush()
        # The agent may have gone on to the next generation before it hears of this step.
        self._link.event("StepDone", generation=self._groups.generation, rank=self._rank, step=step, loss=self._loss)
        self._report_first_step(step)
        self._versions_at_cut = self._layout.versions()

    def stage(self, step: int, random_states: dict[str, Any] | None = None) -> None:
        """Stage the state at the cut of `step`, at which this rank is now, with `random_states` if they are known."""
        with self._place.within(self._step_is, f"the snapshot of step {step}"):
            scalars, data = self._results(self._adapter.state.scalars()), self._context.tapes.states()
            state = {"rng": random_states or capture_rng(self._adapter), "scalars": scalars, "data": data}
            records = [self._log.records(segment) for segment in range(self._stager.newest, step)]
            self._stager.stage(step, self._groups.generation, state, records, self._groups.cut(step))

    def _limit_distance(self) -> None:
        """Limit how far apart snapshots may be: what the calls of so many steps were given must fit into memory."""
        steps = self._log.step - self._log.oldest
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        rooms = [(budgets()[0].available_bytes // ranks, Kept.nbytes[False])]
        if Kept.nbytes[True]:
            rooms.append((torch.cuda.mem_get_info()[0], Kept.nbytes[True]))
        fit = min(int(MEMORY_SHARE * (free + kept) * steps / max(1, kept)) for free, kept in rooms)
        self._stager.most = most = max(1, (fit - 1) // 2)
        if most < Policy.mirror_every_max and not self._is_limited:
            self._is_limited = True
            each = sum(kept for _, kept in rooms) / steps / (1 << 20)
            text = (
                f"rank {self._rank} keeps what its calls are given, {each:.1f} MiB a step: if mirroring is slow, "
                f"snapshots come to be {most} steps apart at most (mirror_every: auto), so that this takes no more "
                "than a quarter of the free memory"
            )
            self._link.event("Note", text=text)

    def _report_first_step(self, step: int) -> None:
        if self._swap_began is not None:  # the first one since a swap
            took, generation = time.monotonic() - self._swap_began, self._groups.generation
            self._link.event("FirstStepDone", generation=generation, rank=self._rank, step=step, duration_s=took)
            self._swap_began = None

    # ---- a swap

    @torch.inference_mode(False)  # the script may be in it now; calls that were in it are redone without
    def _swap(self) -> None:
        """Go from an interrupted call to the state at the entry of that call, in the newest generation."""
        saves = self._context.saves
        flights: list[Flight] = []
        reported = 0
        while True:
            try:
                flights += saves.cancel()
                # A copy that hangs, or a device that never rests, keeps this process from saying that it has unwound,
                # and its agent ends it then.
                self._stager.settle()
                _let_device_rest()
                self._swap_began = began = self._groups.generations.announced_at
                self._link.event("WorkerUnblocked", rank=self._rank, duration_s=time.monotonic() - began)
                join = self._link.wait_for_join()
                if join.restore_step < self._log.oldest:  # calls that a redo would skip are gone
                    reason = (
                        f"its process was told to go back to step {join.restore_step}; expected step "
                        f"{self._log.oldest} or later, after which it has kept its calls (it is at step "
                        f"{self._log.step}); another process takes the rank over at that step"
                    )
                    self._link.send(local.OutOfReach(reason))
                    raise SystemExit(self._link.wait_for_end(interruptible=False))
                saves.report_cancelled(flights[reported:], join.restore_step)
                reported = len(flights)
                self._enter(join)
                saves.sweep(flights, join.restore_step)
                for logged in self._log.after_cut(join.restore_step):
                    self._redo(logged)
                return
            except GenerationChanged as change:
                forget(change)

    def take_over(self, order: local.TakeOver) -> None:
        """Enter as the replacement of a lost rank, through as many further swaps as come."""
        self._swap_began = time.monotonic()
        try:
            self._enter(order)
        except GenerationChanged as change:
            forget(change)
            self._swap()
        self._context.tapes.load(self._restored_data)
        self._at_exit = capture_rng(self._adapter)

    def _enter(self, order: local.Join | local.TakeOver) -> None:
        """Become part of the generation with the state of the step that are ordered. Raises: GenerationChanged."""
        began, step = time.monotonic(), order.restore_step
        self._stager.drop()
        self._groups.rebuild(order.generation, order.store)
        _let_device_rest()  # until `rebuild` had let them rest gloo's threads copied results to the device
        # calls and collectives of ours, not the script's, are neither logged nor redone
        with self._inside:
            self._adapter.state.clean()  # after `rebuild`, which lets operations in flight write their last
            took, groups = time.monotonic() - began, len(self._groups.handles)
            self._link.event("GroupsRebuilt", rank=self._rank, groups=groups, duration_s=took)
            restoring = time.monotonic()
            state = self._stager.load(step)
            self._adapter.state.load(state["scalars"])
            self._adapter.state.after_restore()
        restore_rng(self._adapter, state["rng"])
        self._restored, self._restored_data = step, state["data"]
        self._place.made(step)
        if self._step_is is Activity.STEP:
            self._step_is = Activity.STEP_AGAIN
        now = time.monotonic()
        self._link.event("StateRestored", rank=self._rank, step=step, duration_s=now - restoring)
        self._link.event("WorkerResumed", rank=self._rank, step=step, duration_s=now - began)
        self._link.send(local.WorkerRestored(self._rank, order.generation))

    def _redo(self, logged: LoggedCall) -> None:
        call, segment = logged.call, logged.segment
        logged.rewind()
        try:
            self._execute(logged)
        except (GenerationChanged, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's CheckpointException is no Exception
            if call.kind is not CallKind.SAVE:
                raise
            what = f"{call.name} after step {segment}, done again on rank {self._rank} in a swap"
            why = f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}"
            self._link.event("Note", text=f"{what}, failed ({why}); the script has had its answer, training goes on")
        if call.makes_step:
            self._step_is = Activity.STEP
            self.stage(segment + 1)
            self._report_first_step(segment + 1)


def _note_compilations(compiler: Any, place: Whereabouts) -> None:
    """Note in `place` when torch compiles: at first, and again whenever shapes are new."""
    under_way: list[contextlib.AbstractContextManager[None]] = []

    def begin(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            under_way.append(place.within(Activity.COMPILATION, "torch.compile"))
            under_way[-1].__enter__()

    def end(*_: Any) -> None:
        if under_way and threading.current_thread() is threading.main_thread():
            under_way.pop().__exit__(None, None, None)

    compiler.register_start_callback(begin)
    compiler.register_end_callback(end)


def _let_device_rest() -> None:
    """Let kernels of the interrupted call, on whatever stream, write before the state is restored, not into it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            give_up(f"its CUDA context is dead: {error}")
