"""A rank in training: calls are logged, steps are cut and staged, and a swap is lived through inside a call.

Rules of this file: the user's script sees one thing only, each call returning its value once. Everything here
runs on the main thread. A generation change surfaces as GenerationChanged at a wait or in a collective, unwinds
to `_run`, and no further.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..comm import collective
from ..errors import GenerationChanged, Unsupported, invariant
from ..mirror.arena import SlotPair
from ..transport import local
from . import codec, rng
from .adapter import CallKind
from .calls import Call, CallLog, forget
from .context import Context
from .staging import Layout, Stager


class Live:
    """One rank's life between its first forward and its end.

    `step` is the number of updates this rank has made.
    """

    def __init__(self, context: Context, rank: int, layout: Layout, slots: SlotPair, step: int) -> None:
        self._context, self._link, self._groups = context, context.link, context.groups
        self._adapter = context.adapter
        self._rank, self._layout, self._slots = rank, layout, slots
        self._stager = Stager(rank, layout, self._adapter.changing(), slots, context.link)
        self._log = CallLog()
        self.step = self._entered = step
        self._inside = False
        self._swap_began: float | None = None
        self._loss: float | None = None
        self._at_exit: dict[str, Any] | None = None

    # ---- calls

    def call(
        self, name: str, kind: CallKind, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the adapter puts around every call of the framework."""
        if self._inside:
            return function(*args, **kwargs)
        if "data_iterator" in kwargs:
            kwargs["data_iterator"], found = self._log.iterators.wrap(kwargs["data_iterator"])
        else:
            found = []
        call = Call(
            name, kind, self.step, lambda: function(*args, **kwargs), self._entry(args, kwargs),
            [(iterator, iterator.position) for iterator in found],
        )  # fmt: skip
        value = self._run(call)
        self._done(call, value)
        loss = self._adapter.loss_of(value)
        self._loss = loss if loss is not None else self._loss
        if kind is CallKind.UPDATE:
            self._cut()
        return value

    def collective(self, handle: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A collective the script issues outside any call: a call of its own, done to the end before it returns.

        Its tensors are kept as they were at entry, so that it can be issued again on them.
        """
        if self._inside:
            return handle.issue(name, args, kwargs)
        kept, written = _cloned((args, kwargs)), collective.outputs(name, args, kwargs)
        restore_entry = self._entry((), {})

        def restore_tensors() -> None:
            restore_entry()
            for mine, before in zip(collective.tensors((args, kwargs)), collective.tensors(kept), strict=True):
                mine.detach().copy_(before)

        def again() -> None:
            copied_args, copied_kwargs = _cloned(kept)
            handle.issue(name, copied_args, copied_kwargs).wait()

        def first_time() -> int:
            work = handle.issue(name, args, kwargs)
            work.wait()
            return int(work.source_rank())

        call = Call(name, CallKind.PLAIN, self.step, first_time, restore_tensors)
        source = self._run(call)
        if not any(self._adapter.owns(tensor) for tensor in written):  # else the calls before it bring its entry back
            call.run = again
        call.restore_entry = restore_entry
        self._done(call, written)
        return collective.CompletedWork(written, source)

    def _entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
        framework = self._adapter.entry_state(args, kwargs)
        random_states, grad_enabled = rng.capture(self._adapter), torch.is_grad_enabled()
        if self._at_exit is not None and not rng.equal(random_states, self._at_exit):
            self._log.drew(self.step, self._at_exit)

        autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]

        def restore() -> None:
            torch.set_grad_enabled(grad_enabled)
            torch.clear_autocast_cache()
            for kind, enabled, dtype in autocast:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
            framework()
            rng.restore(self._adapter, random_states)

        return restore

    def _done(self, call: Call, outcome: Any) -> None:
        """The script gets its value now; what it draws until its next call is seen by comparison with this moment."""
        self._log.add(call, outcome)
        self._at_exit = rng.capture(self._adapter)

    def _run(self, call: Call) -> Any:
        """Do `call`, through as many swaps as come."""
        while True:
            try:
                return self._do(call)
            except GenerationChanged as change:
                forget(change)
            self._swap()
            call.rewind()

    def _do(self, call: Call) -> Any:
        self._link.check()
        if call.kind is CallKind.UPDATE:
            self._stager.wait()
        self._inside = True
        try:
            return call.run()
        finally:
            self._inside = False

    # ---- the cut

    def _cut(self) -> None:
        self.step += 1
        self._stage(self.step)
        self._log.prune(self.step)
        self._link.event("StepDone", rank=self._rank, step=self.step, loss=self._loss)
        self._report_first_step(self.step)

    def _report_first_step(self, step: int) -> None:
        if self._swap_began is not None:
            took = time.monotonic() - self._swap_began
            self._link.event("FirstStepDone", rank=self._rank, step=step, duration_s=took)
            self._swap_began = None

    def _stage(self, step: int) -> None:
        state = {"rng": rng.capture(self._adapter), "scalars": self._adapter.scalars()}
        records = self._log.records(step - 1) if step > 0 else codec.encode([])
        self._stager.stage(step, self._groups.generation, codec.encode(state), records)

    def begin(self) -> None:
        """Stage the state before the first step."""
        self._stage(self.step)

    # ---- a swap

    @torch.inference_mode(False)  # the script may be in it now, the calls to be redone were not
    def _swap(self) -> None:
        """From an interrupted call to the state at that call's entry, in the newest generation."""
        while True:
            try:
                self._swap_began = self._link.aborted_at
                self._link.event(
                    "WorkerUnblocked", rank=self._rank, duration_s=time.monotonic() - self._link.aborted_at
                )
                join = self._link.wait_for_join()
                self._check_reach(join.restore_step)
                self.enter(join.generation, join.store, join.restore_step)
                for call in self._log.after_cut(join.restore_step):
                    self._redo(call)
                return
            except GenerationChanged as change:
                forget(change)

    def _check_reach(self, restore_step: int) -> None:
        """Raises: Unsupported if this process never made the calls that follow the cut of `restore_step`."""
        if restore_step < self._entered:
            raise Unsupported(
                f"rank {self._rank} was told to go back to step {restore_step}, but this process took the rank over "
                f"at step {self._entered} and has no calls from before it",
                remedy="start from the newest checkpoint",
            )

    def enter(self, generation: int, store: str, restore_step: int) -> None:
        """Become part of `generation` with the state of `restore_step`. Raises: GenerationChanged."""
        began = time.monotonic()
        self._stager.drop()
        self._groups.rebuild(generation, store)
        self._quietly(self._adapter.clean)  # after `rebuild`, which lets operations in flight write their last
        self._link.event(
            "GroupsRebuilt", rank=self._rank, groups=len(self._groups.handles), duration_s=time.monotonic() - began
        )
        restoring = time.monotonic()
        self._restore(restore_step)
        now = time.monotonic()
        self._link.event("StateRestored", rank=self._rank, step=restore_step, duration_s=now - restoring)
        self._link.event("WorkerResumed", rank=self._rank, step=restore_step, duration_s=now - began)
        self._link.send(local.Restored(self._rank, generation))
        self._context.offer_store()

    def newcomer(self, generation: int, store: str, restore_step: int) -> None:
        """Enter as the replacement of a lost rank, through as many further swaps as come."""
        self._swap_began = time.monotonic()
        try:
            self.enter(generation, store, restore_step)
        except GenerationChanged as change:
            forget(change)
            self._swap()
        self._at_exit = rng.capture(self._adapter)

    def _restore(self, step: int) -> None:
        newer = self._slots.open(step + 1)
        if newer is not None:
            self._slots.invalidate(step + 1)
        header = self._slots.open(step)
        invariant(header is not None, f"rank {self._rank} was told to restore step {step}, which its arena lacks")
        assert header is not None
        invariant(header.layout_hash == self._layout.digest, "the snapshot was laid out for another rank or model")
        state = codec.decode(header.scalars)
        self._layout.load(self._slots.payload(step))
        self._adapter.load(state["scalars"])
        self._quietly(self._adapter.after_restore)
        rng.restore(self._adapter, state["rng"])

    def _quietly(self, function: Callable[[], None]) -> None:
        """Calls and collectives of ours, not the script's: neither logged nor redone."""
        self._inside = True
        try:
            function()
        finally:
            self._inside = False

    def _redo(self, call: Call) -> None:
        call.rewind()
        self._do(call)
        if call.kind is CallKind.UPDATE:
            self._stage(call.segment + 1)
            self._report_first_step(call.segment + 1)

    # ---- the end

    def finish(self) -> int:
        """The script has ended; serve swaps until everyone's has. Returns the exit code."""
        self._link.send(local.Finished(self._rank))
        while True:
            try:
                self._link.check()
                return self._link.wait_for_end()
            except GenerationChanged as change:
                forget(change)
            self._swap()
            self._link.send(local.Finished(self._rank))


def _cloned(value: Any) -> Any:
    """`value` with every tensor replaced by a copy; anything that is no tensor or container goes by reference."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cloned(item) for item in value)
    return value
