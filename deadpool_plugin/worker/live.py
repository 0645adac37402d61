"""A rank in training: calls are logged, steps are cut and staged, and a swap is lived through inside a call.

Rules of this file: the user's script sees one thing only, each call returning its value once. Everything here
runs on the main thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..comm import collective
from ..comm.handle import Handle
from ..core import local
from ..errors import WHOLE_STEP, Unsupported
from ..mirror.arena import SlotPair
from . import copies, rng, switches
from .calls import LoggedCall
from .context import Context
from .functions import MAKES_STEP, Call, CallKind
from .iterators import RewindIterator
from .output import flush
from .staging import Layout
from .swap import Recovery

PROGRESS_EVERY_S = 1.0
"""Shortest time between two Progress messages; `stall_timeout_s` is always several times this."""


class Live:
    """One rank's life between its first forward and its end."""

    def __init__(self, context: Context, rank: int, layout: Layout, slots: SlotPair, step: int) -> None:
        self._context, self._rank, self._layout = context, rank, layout
        self._link, self._groups, self._adapter = context.link, context.groups, context.adapter
        self._recovery = Recovery(context, rank, layout, slots, step)
        self._log = self._recovery.log
        self._updated = False
        """Whether the call under way has made an update."""
        self._loss: float | None = None
        self._cannot_be_followed = False
        self._at_entry: dict[str, Any] = {}
        self._at_exit: dict[str, Any] | None = None
        """Random states when the newest call began, and when it was done."""
        self._told_at = 0.0
        self._versions_at_cut: int | None = None
        """`Layout.versions` at the newest cut, until the next call or collective."""
        self._has_noted_edit = False

    @property
    def inside(self) -> bool:
        return self._recovery.inside

    def begin(self) -> None:
        """Stage the state before the first step."""
        self._recovery.stage(self._log.step)

    def newcomer(self, generation: int, store: str, restore_step: int) -> None:
        """Enter as the replacement of a lost rank."""
        self._recovery.newcomer(generation, store, restore_step)
        self._at_exit = rng.capture(self._adapter)

    def finish(self) -> int:
        return self._recovery.finish()

    # ---- calls

    def call(self, call: Call) -> Any:
        """Make a call of the framework; the adapter puts this around each."""
        if self.inside:
            if call.kind is CallKind.UPDATE:
                self._updated = True
                self._recovery.stager.wait()
            return call()
        self._refuse_after_error()
        self._note_edit()
        found: Sequence[RewindIterator] = ()
        if "data_iterator" in call.kwargs:
            call.kwargs["data_iterator"], found = self._log.iterators.wrap(call.kwargs["data_iterator"])
        logged = LoggedCall(call, self._log.step, self._entry(), self._places(found))
        read = self._context.reads.take()
        self._updated = False
        try:
            value = self._recovery.run(logged)
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
        if call.kind is CallKind.SAVE:
            return value
        loss = call.loss(value, self._recovery.results.of)
        self._loss = loss if loss is not None else self._loss
        if call.kind in MAKES_STEP:
            self._cut()
        self._recovery.results = copies.HostCopies(None)  # which keep the script's tensors, and their graph
        return value

    def collective(self, handle: Handle, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A collective the script issues outside any call: a call of its own, done to the end before it returns.

        Its tensors are kept as they were at entry, so that it can be issued again on them.
        """
        inside = self._recovery.inside
        if not inside:
            self._refuse_after_error()
        now = time.monotonic()
        if now - self._told_at >= PROGRESS_EVERY_S:  # even a very long step is seen to make some
            self._told_at = now
            self._link.send(local.Progress(self._rank))
        if inside:
            return self._groups.issue(handle, name, args, kwargs)
        self._note_edit()
        given, written = collective.tensors((args, kwargs)), collective.outputs(name, args, kwargs)
        kept = [copies.copied(tensor) for tensor in given]  # those of a device in host memory once the call has ended
        arguments = _replaced((args, kwargs), iter(kept))
        restore_entry = self._entry()

        def restore_tensors() -> None:
            restore_entry()
            for mine, before in zip(given, kept, strict=True):
                mine.detach().copy_(before)

        def first_time() -> list[Any]:
            work = self._groups.issue(handle, name, args, kwargs)
            work.wait()
            return [written, int(work.source_rank())]

        def again() -> None:
            self._groups.issue(handle, name, *_replaced(arguments, map(copies.copied_back, kept))).wait()

        call = Call(name, CallKind.PLAIN, first_time)
        logged = LoggedCall(call, self._log.step, restore_tensors, self._places())
        outcome = self._recovery.run(logged)
        if not any(map(self._adapter.state.owns, written)):  # else the calls before it bring its entry back
            call.function = again
        logged.restore_entry = restore_entry
        self._done(logged, outcome)
        self._recovery.results = copies.HostCopies(None)
        return collective.CompletedWork(*outcome)

    def _refuse_after_error(self) -> None:
        if self._recovery.error:
            raise Unsupported(
                f"{self._recovery.error}; the script went on",
                "training calls that return",
                "let the error end the script: neither a redo nor a spare could repeat what it did",
            )

    def _note_edit(self) -> None:
        """Say once that the script has written into the shard since the cut: a snapshot may be under way, and no redo
        repeats what the script does outside of calls."""
        before, self._versions_at_cut = self._versions_at_cut, None
        if before is None or self._has_noted_edit or self._layout.versions() == before:
            return
        self._has_noted_edit = True
        text = (
            f"the script changed weights or optimizer state of rank {self._rank} after step {self._log.step}, outside "
            f"of any training call: a swap may lose this change; to do: {WHOLE_STEP}, this change included"
        )
        self._link.event("Note", text=text)

    def _places(self, given: Sequence[RewindIterator] = ()) -> list[tuple[RewindIterator, int]]:
        """List the place in each iterator that a call or the script reads: a redo must return there, too."""
        return [(iterator, iterator.position) for iterator in (*given, *self._context.tapes)]

    def _entry(self) -> Callable[[], None]:
        framework = self._adapter.state.entry_state()
        random_states = rng.capture(self._adapter)
        if self._at_exit is not None:
            if rng.equal(random_states, self._at_exit):
                random_states = self._at_exit  # some 30 KB a call, which the log keeps
            else:
                self._log.drew(self._at_exit)
        self._at_entry = random_states
        kernels = switches.capture()

        def restore() -> None:
            torch.clear_autocast_cache()
            switches.restore(kernels)
            framework()
            rng.restore(self._adapter, random_states)

        return restore

    def _done(self, call: LoggedCall, outcome: Any, read: int = 0) -> None:
        """Record `call`: the script gets its value now, and what it draws from here on is its own."""
        large = self._log.add(call, self._recovery.results.of(outcome), read)
        if large and not self._cannot_be_followed:
            self._cannot_be_followed = True
            place = f"{call.call.name} in the loop of step {self._log.step + 1}"
            text = (
                f"{place} gave rank {self._rank} {large.description}: no other process can take this rank over any "
                f"more; keep large results out of the loop, or {WHOLE_STEP}"
            )
            self._link.event("Note", text=text)
        states = rng.capture(self._adapter)
        self._at_exit = self._at_entry if rng.equal(states, self._at_entry) else states
        self._adapter.state.left()

    def _cut(self) -> None:
        step = self._log.step + 1
        self._recovery.stage(step)
        self._log.prune(step)
        flush()
        # The agent may have gone on to the next generation before it hears of this step.
        generation = self._groups.generation
        self._link.event("StepDone", generation=generation, rank=self._rank, step=step, loss=self._loss)
        self._recovery.report_first_step(step)
        self._versions_at_cut = self._layout.versions()


def _replaced(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """`value` in plain containers, its tensors replaced by `tensors` one after the other; all else goes by reference.

    Not a pytree's map: that leaves alone what is of a class below list or dict, tensors and all.
    """
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _replaced(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_replaced(item, tensors) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
