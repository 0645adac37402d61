"""A rank in training: calls are logged, steps are cut and staged, and a swap is lived through inside a call.

Rules of this file: the user's script sees one thing only, each call returning its value once. Everything here
runs on the main thread. A generation change surfaces as GenerationChanged at a wait or in a collective, unwinds
to `_run`, and no further.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..comm import collective
from ..core import local
from ..errors import WHOLE_STEP, GenerationChanged, Unsupported
from ..mirror.arena import SlotPair
from . import copies, rng, switches
from .adapter import MAKES_STEP, RUNS_MODEL, Bare, CallKind, Followed
from .calls import Call, forget
from .context import Context
from .iterators import RewindIterator
from .output import flush
from .saving import SaveCall
from .staging import Layout
from .swap import Swapping

PROGRESS_EVERY_S = 1.0
"""Shortest time between two Progress messages; `stall_timeout_s` is always several times this."""


class Live(Swapping):
    """One rank's life between its first forward and its end."""

    def __init__(self, context: Context, rank: int, layout: Layout, slots: SlotPair, step: int) -> None:
        super().__init__(context, rank, layout, slots, step)
        self._updated = False
        """Whether the call under way has made an update."""
        self._loss: float | None = None
        self._error = ""
        """The error that a failed call gave the script, which must not go on after it."""
        self._cannot_be_followed = False
        self._at_entry: dict[str, Any] = {}
        """Random states when the newest call began; `_at_exit`: when it was done."""
        self._told_at = 0.0
        self._versions_at_cut: int | None = None
        """`Layout.versions` at the newest cut, until the next call or collective."""
        self._has_noted_edit = False

    # ---- calls

    def call(
        self, name: str, kind: CallKind, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make a call of the framework; the adapter puts this around each."""
        if self.inside:
            if kind is CallKind.UPDATE:
                self._updated = True
                self._stager.wait()
            return function(*args, **kwargs)
        self._refuse_after_error()
        self._note_edit()
        followed = Followed.of(function)
        if "data_iterator" in kwargs:
            kwargs["data_iterator"], found = self._log.iterators.wrap(kwargs["data_iterator"])
        else:
            found = []
        run: Callable[[], Any] = (
            functools.partial(self._save, followed, self.step)
            if isinstance(followed, SaveCall)
            else lambda: followed(*args, **kwargs)
        )
        entry, places = self._entry(), self._places(found)
        is_read = kind in MAKES_STEP or kind in RUNS_MODEL or not isinstance(followed, Bare)
        call = Call(
            name, kind, self.step, run, entry, places, check_inputs=followed.check, is_read=is_read, told=followed.told
        )
        read = self._context.reads.take()
        self._updated = False
        try:
            value = self._run(call)
        except BaseException as error:  # torch's CheckpointException is no Exception
            if (outcome := followed.failed(error)) is not None:
                self._done(call, outcome, read)
            raise
        if kind is CallKind.STEP and not self._updated:
            raise Unsupported(
                f"{name} ended without an optimizer step",
                "a whole iteration: all micro-batches that are accumulated, and the update",
                "let one call of the function do all of it",
            )
        self._done(call, followed.outcome(value), read)
        if kind is CallKind.SAVE:
            return value
        loss = followed.loss(value, self._adapter, self._results.of)
        self._loss = loss if loss is not None else self._loss
        if kind in MAKES_STEP:
            self._cut()
        self._results = copies.HostCopies(None)  # which keep the script's tensors, and their graph
        return value

    def collective(self, handle: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A collective the script issues outside any call: a call of its own, done to the end before it returns.

        Its tensors are kept as they were at entry, so that it can be issued again on them.
        """
        if not self.inside:
            self._refuse_after_error()
        self._tell_progress()
        if self.inside:
            return handle.issue(name, args, kwargs)
        self._note_edit()
        kept, written = _kept((args, kwargs)), collective.outputs(name, args, kwargs)
        restore_entry = self._entry()

        def restore_tensors() -> None:
            restore_entry()
            for mine, before in zip(collective.tensors((args, kwargs)), collective.tensors(kept), strict=True):
                mine.detach().copy_(before)

        def again() -> None:
            copied_args, copied_kwargs = _copied(kept)
            handle.issue(name, copied_args, copied_kwargs).wait()

        def first_time() -> list[Any]:
            work = handle.issue(name, args, kwargs)
            work.wait()
            return [written, int(work.source_rank())]

        call = Call(name, CallKind.PLAIN, self.step, first_time, restore_tensors, self._places())
        outcome = self._run(call)
        if not any(
            self._adapter.state.owns(tensor) for tensor in written
        ):  # else the calls before it bring its entry back
            call.run = again
        call.restore_entry = restore_entry
        self._done(call, outcome)
        self._results = copies.HostCopies(None)
        return collective.CompletedWork(*outcome)

    def _note_edit(self) -> None:
        """Say once that the script has written into the shard since the cut: a snapshot may be under way, and no redo
        repeats what the script does outside of calls."""
        before, self._versions_at_cut = self._versions_at_cut, None
        if before is None or self._has_noted_edit or self._layout.versions() == before:
            return
        self._has_noted_edit = True
        text = (
            f"the script changed weights or optimizer state of rank {self._rank} after step {self.step}, outside of "
            f"any training call: a swap may lose this change; to do: {WHOLE_STEP}, this change included"
        )
        self._link.event("Note", text=text)

    def _tell_progress(self) -> None:
        """Report progress, so that even a very long step is seen to make some."""
        now = time.monotonic()
        if now - self._told_at >= PROGRESS_EVERY_S:
            self._told_at = now
            self._link.send(local.Progress(self._rank))

    def _places(self, given: Sequence[RewindIterator] = ()) -> list[tuple[RewindIterator, int]]:
        """List the place in each iterator that a call or the script reads: a redo must return there, too."""
        return [(iterator, iterator.position) for iterator in (*given, *self._context.tapes)]

    def _entry(self) -> Callable[[], None]:
        framework = self._adapter.state.entry_state()
        random_states, grad_enabled = rng.capture(self._adapter), torch.is_grad_enabled()
        if self._at_exit is not None:
            if rng.equal(random_states, self._at_exit):
                random_states = self._at_exit  # some 30 KB a call, which the log keeps
            else:
                self._log.drew(self.step, self._at_exit)
        self._at_entry = random_states

        kernels = switches.capture()
        autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]

        def restore() -> None:
            torch.set_grad_enabled(grad_enabled)
            torch.clear_autocast_cache()
            switches.restore(kernels)
            for kind, enabled, dtype in autocast:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
            framework()
            rng.restore(self._adapter, random_states)

        return restore

    def _done(self, call: Call, outcome: Any, read: int = 0) -> None:
        """The script gets its value now; what it draws until its next call is seen by comparison with this moment."""
        large = self._log.add(call, self._results.of(outcome), read)
        if large and not self._cannot_be_followed:
            self._cannot_be_followed = True
            self._link.event(
                "Note",
                text=f"{call.name} in the loop of step {self.step + 1} gave rank {self._rank} {large.description}: no "
                f"other process can take this rank over any more; keep large results out of the loop, or {WHOLE_STEP}",
            )
        states = rng.capture(self._adapter)
        self._at_exit = self._at_entry if rng.equal(states, self._at_entry) else states
        self._adapter.state.left()

    def _save(self, save: SaveCall, step: int) -> Any:
        """Within its call: begins when the step is committed, so that no swap goes back behind what is written."""
        self._context.saves.step = step
        if save.gated:
            self._link.wait_until(lambda: max(self._restored, self._link.committed) >= step)
        with self._context.saves.under_way():
            return save()

    def _run(self, call: Call) -> Any:
        """Do `call`, through as many swaps as come."""
        while True:
            try:
                return self._do(call)
            except GenerationChanged as change:
                forget(change)
            except Exception as error:
                if call.kind is not CallKind.SAVE:  # which is redone, and told to who follows, as failed
                    self._error = f"{call.name} raised {type(error).__name__}: {error}"
                raise
            self._swap()
            call.rewind()

    def _refuse_after_error(self) -> None:
        if self._error:
            raise Unsupported(
                f"{self._error}; the script went on",
                "training calls that return",
                "let the error end the script: neither a redo nor a spare could repeat what it did",
            )

    # ---- the cut

    def _cut(self) -> None:
        self.step += 1
        self._stage(self.step)
        self._log.prune(self.step)
        flush()
        # The agent may have gone on to the next generation before it hears of this step.
        generation = self._groups.generation
        self._link.event("StepDone", generation=generation, rank=self._rank, step=self.step, loss=self._loss)
        self._report_first_step(self.step)
        self._versions_at_cut = self._layout.versions()


def _kept(value: Any) -> Any:
    """`value` in plain containers, with every tensor replaced by a copy; all else goes by reference.

    Small ones of a device are kept in host memory, whole once the call has ended. Not a pytree's map: that leaves alone
    what is of a class below list or dict, tensors and all.
    """
    if isinstance(value, torch.Tensor):
        return copies.copied(value)
    return _each(_kept, value)


def _copied(kept: Any) -> Any:
    """Copy what `_kept` has made, each tensor to where it came from."""
    if isinstance(kept, torch.Tensor):
        return copies.copied_back(kept)
    return _each(_copied, kept)


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [function(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
