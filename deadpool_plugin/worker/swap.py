"""A rank in training lives through a swap: rejoin, restore, redo.

Rules of this file: everything runs on the main thread, inside an interrupted call or a wait at the end of the script.
A generation that changes again meanwhile starts it over. Ranks go back to one restore step and redo their own calls.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..core import local
from ..errors import GenerationChanged, invariant, present
from ..mirror.arena import SlotPair
from . import codec, copies, rng
from .adapter import MAKES_STEP, CallKind
from .calls import Call, CallLog, forget
from .context import Context
from .link import JobEnded, give_up
from .saving import Flight
from .staging import Layout, Stager


class Swapping:
    """The part of a live rank that a swap needs: its state, its call log, and the way through.

    `step` is the number of updates this rank has made.
    """

    def __init__(self, context: Context, rank: int, layout: Layout, slots: SlotPair, step: int) -> None:
        self._context, self._link, self._groups = context, context.link, context.groups
        self._adapter = context.adapter
        self._rank, self._layout, self._slots = rank, layout, slots
        self._stager = Stager(rank, layout, self._adapter.state.changing, slots, context.link)
        self._groups.calls_area = slots.calls
        self._log = CallLog(step)
        self.step = step
        self._restored = -1
        self.inside = False
        self._results = copies.HostCopies(None)
        """Copies in host memory of what the newest call told."""
        self._swap_began: float | None = None
        self._at_exit: dict[str, Any] | None = None

    def _do(self, call: Call) -> Any:
        self._link.check()
        if call.kind is CallKind.UPDATE:
            self._stager.wait()
        self._results = copies.HostCopies(None)
        with self._inside():
            value = call.run()
            if call.kind is not CallKind.SAVE:
                self._let_it_end(call, value)
        return value

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """An NCCL abort ends kernels without an error, so whatever a call computes afterwards, even an exception, is
        meaningless. Raises: GenerationChanged instead of such an exception."""
        self.inside = True
        try:
            yield
        except Exception:
            self._link.await_abort(self._slots.announced)
            self._link.check()
            raise
        finally:
            self.inside = False

    def _let_it_end(self, call: Call, value: Any) -> None:
        """Wait until the results of a call are sure to be valid. Raises: GenerationChanged.

        A kernel of NCCL's ends well, with garbage, if a neighbour on this host was aborted (prims_simple.h: an aborted
        one posts its steps without their data), and that process may have heard of it before this one.
        The device is waited for where its results can be read: at the latest by the call that makes the step.
        """
        if torch.cuda.is_initialized() and (call.is_read or not codec.is_plain(value)):  # type: ignore[no-untyped-call]
            self._results = copies.HostCopies(call.told(value))
            torch.cuda.current_stream().synchronize()
        self._link.await_abort(self._slots.announced)
        self._link.check()

    # ---- snapshots

    def _report_first_step(self, step: int) -> None:
        if self._swap_began is not None:
            took, generation = time.monotonic() - self._swap_began, self._groups.generation
            self._link.event("FirstStepDone", generation=generation, rank=self._rank, step=step, duration_s=took)
            self._swap_began = None

    def _stage(self, step: int) -> None:
        scalars, data = self._results.of(self._adapter.state.scalars()), self._context.tapes.states()
        state = {"rng": rng.capture(self._adapter), "scalars": scalars, "data": data}
        records = self._log.records(step - 1) if step > 0 else codec.encode([])
        paired = self._groups.cut(step)
        self._stager.stage(step, self._groups.generation, codec.encode(state), records, paired)

    def begin(self) -> None:
        """Stage the state before the first step."""
        self._stage(self.step)

    # ---- a swap

    @torch.inference_mode(False)  # the script may be in it now; calls that were in it are redone without
    def _swap(self) -> None:
        """From an interrupted call to the state at that call's entry, in the newest generation."""
        cancelled: list[Flight] = []
        gone: list[Flight] = []
        while True:
            try:
                cancelled += self._context.saves.cancel()
                _let_device_rest()
                self._swap_began = self._link.aborted_at
                self._link.event(
                    "WorkerUnblocked", rank=self._rank, duration_s=time.monotonic() - self._link.aborted_at
                )
                join = self._link.wait_for_join()
                self._check_reach(join.restore_step)
                self._context.saves.report_cancelled(cancelled, join.restore_step)
                gone += cancelled
                cancelled.clear()
                self.enter(join.generation, join.store, join.restore_step)
                self._context.saves.sweep(gone, join.restore_step)
                for call in self._log.after_cut(join.restore_step):
                    self._redo(call)
                return
            except GenerationChanged as change:
                forget(change)

    def _check_reach(self, restore_step: int) -> None:
        """The calls before step `oldest` are gone, so redoing the kept ones from `restore_step` would skip some:
        another process must take the rank over. Blocks: for ever in that case; the agent ends this process."""
        if restore_step >= self._log.oldest:
            return
        reason = (
            f"its process was told to go back to step {restore_step}; expected step {self._log.oldest} or later, after "
            f"which it has kept its calls (it is at step {self.step}); another process takes the rank over at that step"
        )
        self._link.send(local.OutOfReach(reason))
        raise SystemExit(self._context.wait_for_end())

    def enter(self, generation: int, store: str, restore_step: int) -> None:
        """Become part of `generation` with the state of `restore_step`. Raises: GenerationChanged."""
        began = time.monotonic()
        self._stager.drop()
        self._groups.rebuild(generation, store)
        _let_device_rest()  # until `rebuild` had let them rest gloo's threads copied results to the device
        self._quietly(self._adapter.state.clean)  # after `rebuild`, which lets operations in flight write their last
        self._link.event(
            "GroupsRebuilt", rank=self._rank, groups=len(self._groups.handles), duration_s=time.monotonic() - began
        )
        restoring = time.monotonic()
        self._restore(restore_step)
        now = time.monotonic()
        self._link.event("StateRestored", rank=self._rank, step=restore_step, duration_s=now - restoring)
        self._link.event("WorkerResumed", rank=self._rank, step=restore_step, duration_s=now - began)
        self._link.send(local.Restored(self._rank, generation))

    def newcomer(self, generation: int, store: str, restore_step: int) -> None:
        """Enter as the replacement of a lost rank, through as many further swaps as come."""
        self._swap_began = time.monotonic()
        try:
            self.enter(generation, store, restore_step)
        except GenerationChanged as change:
            forget(change)
            self._swap()
        self._context.tapes.load(self._state_of(self._restored)["data"])
        self._at_exit = rng.capture(self._adapter)

    def _restore(self, step: int) -> None:
        if self._slots.open(step + 1) is not None:
            self._slots.invalidate(step + 1)
        state = self._state_of(step)
        self._layout.load(self._slots.payload(step))
        self._adapter.state.load(state["scalars"])
        self._quietly(self._adapter.state.after_restore)
        rng.restore(self._adapter, state["rng"])
        self._restored = step

    def _state_of(self, step: int) -> Any:
        """All of a snapshot but its shard."""
        lacking = f"rank {self._rank} was told to restore step {step}, which its arena lacks"
        header = present(self._slots.open(step), lacking)
        invariant(header.layout_hash == self._layout.digest, "the snapshot was laid out for another rank or model")
        return codec.decode(header.scalars)

    def _quietly(self, function: Callable[[], None]) -> None:
        """Calls and collectives of ours, not the script's: neither logged nor redone."""
        with self._inside():
            function()

    def _redo(self, call: Call) -> None:
        call.rewind()
        try:
            self._do(call)
        except (GenerationChanged, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's CheckpointException is no Exception
            if call.kind is not CallKind.SAVE:
                raise
            what = f"{call.name} after step {call.segment}, done again on rank {self._rank} in a swap"
            why = f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}"
            self._link.event("Note", text=f"{what}, failed ({why}); the script has had its answer, training goes on")
        if call.kind in MAKES_STEP:
            self._stage(call.segment + 1)
            self._report_first_step(call.segment + 1)

    # ---- the end

    def finish(self) -> int:
        """The script has ended; serve swaps until everyone's has. Returns the exit code."""
        self._link.send(local.Finished(self._rank))
        while True:
            try:
                exit_code = self._link.wait_for_end()
                self._restored = self.step  # nothing goes back behind it any more: a save that comes now need not wait
                return exit_code
            except GenerationChanged as change:
                forget(change)
            with contextlib.suppress(JobEnded):
                self._swap()
                self._link.send(local.Finished(self._rank))


def _let_device_rest() -> None:
    """Kernels of the interrupted call, on whatever stream, write before the state is restored, not into it.

    Blocks: a device that never rests keeps this process from saying that it has unwound, and its agent ends it then.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            give_up(f"its CUDA context is dead: {error}")
