"""The calls of a rank in training, executed through as many swaps as come: rejoin, restore, redo.

Rules of this file: everything runs on the main thread. A generation change surfaces as GenerationChanged at a wait or
in a collective. It unwinds an interrupted call, or the wait at the end of the script, and gets no further than here. A
generation that changes again meanwhile starts the swap over. Ranks go back to one restore step and redo their own
calls.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from ..core import local
from ..errors import GenerationChanged
from ..mirror.arena import SlotPair
from . import codec, copies, rng
from .calls import CallLog, LoggedCall, forget
from .context import Context
from .functions import MAKES_STEP, CallKind
from .link import JobEnded, give_up
from .saving import Flight, SaveCall
from .staging import Layout, Stager


class Recovery:
    """The part of a live rank that a swap needs: its call log, its snapshots, and the way through."""

    def __init__(self, context: Context, rank: int, layout: Layout, slots: SlotPair, step: int) -> None:
        self._context, self._link, self._groups = context, context.link, context.groups
        self._adapter, self._rank, self._slots = context.adapter, rank, slots
        self._groups.calls_area = slots.calls
        self.stager = Stager(rank, layout, self._adapter.state.changing, slots, context.link)
        self.log = CallLog(step)
        self.restored = -1
        """The step that the newest swap went back to."""
        self.error = ""
        """The error that a failed call gave the script, which must not go on after it."""
        self.inside = False
        """Whether a call is being executed."""
        self.results = copies.HostCopies(None)
        """Copies in host memory of what the newest call told."""
        self._swap_began: float | None = None

    # ---- calls

    def run(self, logged: LoggedCall) -> Any:
        """Execute it, through as many swaps as come."""
        while True:
            try:
                return self._execute(logged)
            except GenerationChanged as change:
                forget(change)
            except Exception as error:
                call = logged.call
                if call.kind is not CallKind.SAVE:  # which is redone, and told to who follows, as failed
                    self.error = f"{call.name} raised {type(error).__name__}: {error}"
                raise
            self.swap()
            logged.rewind()

    def _execute(self, logged: LoggedCall) -> Any:
        call = logged.call
        self._groups.generations.check()
        if call.kind is CallKind.UPDATE:
            self.stager.wait()
        self.results = copies.HostCopies(None)
        with self._executing():
            value = self._save(call, logged.segment) if isinstance(call, SaveCall) else call()
            if call.kind is not CallKind.SAVE:
                # Wait until the results are sure to be valid. A kernel of NCCL's ends well, with garbage, if a
                # neighbour on this host was aborted (prims_simple.h: an aborted one posts its steps without their
                # data), and that process may have heard of it before this one. The device is waited for where its
                # results can be read: at the latest by the call that makes the step.
                is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
                if is_used and (call.is_read or not codec.is_plain(value)):
                    self.results = copies.HostCopies(call.told(value))
                    torch.cuda.current_stream().synchronize()
                self._groups.generations.check_heard(self._slots.announced)
        return value

    def _save(self, save: SaveCall, step: int) -> Any:
        """Begin when the step is committed, so that no swap goes back behind what is written."""
        self._context.saves.step = step
        if save.gated:
            self._link.wait_until(lambda: max(self.restored, self._link.committed) >= step)
        with self._context.saves.under_way():
            return save()

    @contextlib.contextmanager
    def _executing(self) -> Iterator[None]:
        """An NCCL abort ends kernels without an error, so whatever a call computes afterwards, even an exception, is
        meaningless. Raises: GenerationChanged instead of such an exception."""
        self.inside = True
        try:
            yield
        except Exception:
            self._groups.generations.check_heard(self._slots.announced)
            raise
        finally:
            self.inside = False

    # ---- snapshots

    def stage(self, step: int) -> None:
        """Stage the state at the cut of `step`, at which this rank is now."""
        scalars, data = self.results.of(self._adapter.state.scalars()), self._context.tapes.states()
        state = codec.encode({"rng": rng.capture(self._adapter), "scalars": scalars, "data": data})
        records = self.log.records(step - 1) if step > 0 else codec.encode([])
        self.stager.stage(step, self._groups.generation, state, records, self._groups.cut(step))

    def report_first_step(self, step: int) -> None:
        """Report `step` if it is the first one since a swap."""
        if self._swap_began is not None:
            took, generation = time.monotonic() - self._swap_began, self._groups.generation
            self._link.event("FirstStepDone", generation=generation, rank=self._rank, step=step, duration_s=took)
            self._swap_began = None

    # ---- a swap

    @torch.inference_mode(False)  # the script may be in it now; calls that were in it are redone without
    def swap(self) -> None:
        """Go from an interrupted call to the state at the entry of that call, in the newest generation."""
        saves = self._context.saves
        cancelled: list[Flight] = []
        gone: list[Flight] = []
        while True:
            try:
                cancelled += saves.cancel()
                _let_device_rest()
                self._swap_began = began = self._groups.generations.announced_at
                self._link.event("WorkerUnblocked", rank=self._rank, duration_s=time.monotonic() - began)
                join = self._link.wait_for_join()
                self._check_reach(join.restore_step)
                saves.report_cancelled(cancelled, join.restore_step)
                gone += cancelled
                cancelled.clear()
                self._enter(join.generation, join.store, join.restore_step)
                saves.sweep(gone, join.restore_step)
                for call in self.log.after_cut(join.restore_step):
                    self.redo(call)
                return
            except GenerationChanged as change:
                forget(change)

    def newcomer(self, generation: int, store: str, restore_step: int) -> None:
        """Enter as the replacement of a lost rank, through as many further swaps as come."""
        self._swap_began = time.monotonic()
        try:
            self._enter(generation, store, restore_step)
        except GenerationChanged as change:
            forget(change)
            self.swap()
        self._context.tapes.load(self.stager.state_of(self.restored)["data"])

    def _check_reach(self, restore_step: int) -> None:
        """Have another process take the rank over if calls since `restore_step` are gone, which a redo would skip.

        Blocks: for ever in that case; the agent ends this process.
        """
        if restore_step >= self.log.oldest:
            return
        reason = (
            f"its process was told to go back to step {restore_step}; expected step {self.log.oldest} or later, after "
            f"which it has kept its calls (it is at step {self.log.step}); another process takes the rank over at that "
            "step"
        )
        self._link.send(local.OutOfReach(reason))
        raise SystemExit(self._context.wait_for_end())

    def _enter(self, generation: int, store: str, restore_step: int) -> None:
        """Become part of `generation` with the state of `restore_step`. Raises: GenerationChanged."""
        began = time.monotonic()
        self.stager.drop()
        self._groups.rebuild(generation, store)
        _let_device_rest()  # until `rebuild` had let them rest gloo's threads copied results to the device
        # calls and collectives of ours, not the script's, are neither logged nor redone
        with self._executing():
            self._adapter.state.clean()  # after `rebuild`, which lets operations in flight write their last
        took, groups = time.monotonic() - began, len(self._groups.handles)
        self._link.event("GroupsRebuilt", rank=self._rank, groups=groups, duration_s=took)
        restoring = time.monotonic()
        state = self.stager.load(restore_step)
        self._adapter.state.load(state["scalars"])
        with self._executing():
            self._adapter.state.after_restore()
        rng.restore(self._adapter, state["rng"])
        self.restored = restore_step
        now = time.monotonic()
        self._link.event("StateRestored", rank=self._rank, step=restore_step, duration_s=now - restoring)
        self._link.event("WorkerResumed", rank=self._rank, step=restore_step, duration_s=now - began)
        self._link.send(local.Restored(self._rank, generation))

    def redo(self, logged: LoggedCall) -> None:
        """Execute a call again, after the step that was restored."""
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
        if call.kind in MAKES_STEP:
            self.stage(segment + 1)
            self.report_first_step(segment + 1)

    # ---- the end

    def finish(self) -> int:
        """Serve swaps until everyone's script has ended, as this one has. Returns the exit code."""
        self._link.send(local.Finished(self._rank))
        while True:
            try:
                exit_code = self._link.wait_for_end()
                self.restored = self.log.step  # nothing goes back behind it any more: a save now need not wait
                return exit_code
            except GenerationChanged as change:
                forget(change)
            with contextlib.suppress(JobEnded):
                self.swap()
                self._link.send(local.Finished(self._rank))


def _let_device_rest() -> None:
    """Let kernels of the interrupted call, on whatever stream, write before the state is restored, not into it.

    Blocks: a device that never rests keeps this process from saying that it has unwound, and its agent ends it then.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            give_up(f"its CUDA context is dead: {error}")
