"""Skip mode: a spare that has rehearsed a rank follows the script's loop with recorded results, ready to take over.

Rules of this file: no call is executed; each returns what the rank itself got, and its data iterators move by what
the rank pulled. A call whose record does not exist yet waits for it, or for the order to take over: then the state
of the restore step is loaded at that very call, and the process is `Live` from there.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections import deque
from typing import Any

import torch

from ..comm.collective import Operation
from ..comm.fabric import HandleWork
from ..comm.handle import Handle
from ..comm.record import ALIKE
from ..core import local
from ..errors import WHOLE_STEP, Divergence, present
from ..mirror.arena import SlotPair
from ..mirror.records import unpack
from ..transport import linux
from . import codec, rng
from .adapter import restore_rng
from .calls import RANDOM_STATES, RUNS_MODEL, Call, CallKind
from .context import Context
from .file_view import FileView
from .iterators import IteratorTable, prove
from .light import Unread
from .live import Live
from .loaded_files import KEEP
from .mute import Mute
from .staging import Layout, give_back

_INSTEAD = f"take it after engine.backward(loss), compute the loss inside the model, or {WHOLE_STEP}"
MOVED_EVERY_S = 1.0  # how often a process on its way through past steps says how far it has come, at most


class Follow:
    """A rehearsing process from the top of the script until it takes over."""

    inside = False

    def __init__(
        self, context: Context, rank: int, layout_digest: str, mute: Mute, files: FileView, unread: Unread
    ) -> None:
        self._context, self._rank, self._expected_digest = context, rank, layout_digest
        self._mute, self._files, self._unread = mute, files, unread
        self._layout: Layout | None = None  # known from the first forward on
        # Records of whole steps as they came (all of a long job would not fit into memory); those of the one under way.
        self._segments: deque[bytes] = deque()
        self._records: deque[Any] = deque()
        self._step = 0
        # By iterator: what the newest call that moved it without reading has pulled, its step and name.
        self._passed_over: weakref.WeakKeyDictionary[Any, tuple[Any, int, str]] = weakref.WeakKeyDictionary()
        self._guessed = ""  # where the script took numbers that this process does not know, for messages
        self._began = self._told_at = time.monotonic()

    def call(self, call: Call) -> Any:
        try:
            return self._follow(call)
        except Divergence as error:
            self._explain(error)
            raise

    def _follow(self, call: Call) -> Any:
        if self._layout is None and call.kind not in RUNS_MODEL:
            if call.kind is CallKind.SAVE:
                return call.skipped(None)
            return self._context.groups.fact(call.name, call) if call.kind is CallKind.FACT else call()
        record = self._next_record(call.name)
        if record is None:
            return self._context.mode.call(call)
        _, outcome, pulls, read = record
        place = self._step + 1, call.name
        self._compare(self._context.tapes.take_digest(), read, *place)
        if pulls:
            _, stand_ins = IteratorTable().wrap(call.kwargs.get("data_iterator"))
            for iterator, pulled in zip([*stand_ins, *self._context.tapes], pulls, strict=True):
                mine = iterator.skip(*pulled)
                if mine is not None:
                    self._compare(mine, pulled[2], *place)
                elif pulled[0] and iterator in stand_ins:
                    self._passed_over[iterator.inner] = pulled, *place
        error = codec.decode_error(outcome) if call.kind is CallKind.SAVE else None
        value = call.skipped(outcome) if error is None else None
        if call.makes_step:
            self._step += 1
            self._more()  # the cut: a take-over begins here, before the script goes on
        self._draw_alike()
        if error is not None:
            raise error
        return value

    def collective(self, handle: Handle, operation: Operation) -> Any:
        if self._layout is None:
            try:
                return self._context.groups.issue(handle, operation)
            except Divergence as error:
                self._explain(error)
                raise
        record = self._next_record(operation.name)
        if record is None:
            return self._context.mode.collective(handle, operation)
        results, source = record[1]
        with torch.no_grad():
            for mine, recorded in zip(operation.outputs(), results, strict=True):
                mine.copy_(recorded)
        self._draw_alike()
        return HandleWork(operation, source)

    def finish(self) -> int:
        self._next_record("the end of the script")
        return self._context.mode.finish()

    # ---- what the script does otherwise than the rank itself

    def _explain(self, error: Divergence) -> None:
        """Raises: Divergence from `error`, if files are gone where the script did something else than the rank."""
        if self._files.gone and self._context.mode is self:
            gone = ", ".join(self._files.gone)
            raise Divergence(f"{error.found}, after it missed {gone}, deleted since", error.expected, KEEP) from error

    def _compare(self, mine: int, recorded: int, step: int, name: str) -> None:
        if mine == recorded:
            return
        follower, place = f"the process that follows rank {self._rank}", f"for {name} of step {step}"
        read = f"{follower} read other data than the rank itself {place}"
        if self._guessed:
            raise Divergence(f"{read}, after {self._guessed}", "the batches the rank itself read", _INSTEAD)
        self._context.difference = Divergence(
            f"{read} (digest {mine:08x})",
            f"the same batches, digest {recorded:08x}",
            "seed torch, numpy and random; a data set must give every process the same items: none that depend on the "
            "clock, os.urandom, the host or the order in which a directory is listed",
        )
        raise self._context.difference

    # ---- records

    def _next_record(self, name: str) -> Any:
        """Return the record of the call `name` the script is making now; None once this process has taken over."""
        if self._context.difference is not None:  # which the script has caught
            raise self._context.difference
        if self._layout is None:
            self._rehearsed()
        elif not self._guessed and (place := self._context.adapter.guessed()):
            self._guessed = (
                f"the script took a number at {place} from an output of the engine's model above 64 KiB, which "
                "followers are not told before engine.backward"
            )
            text = f"{self._guessed}: after a takeover, what it makes of that is wrong; to do: {_INSTEAD}"
            self._context.link.event("Note", text=f"rank {self._rank}: {text}")
        if not self._more():
            return None
        record = self._records.popleft()
        if record[0] != name:
            after = f", after {self._guessed}" if self._guessed else ""
            raise Divergence(
                f"in the loop of step {self._step + 1} the script called {name}{after}",
                f"{record[0]}, which rank {self._rank} itself called there",
                _INSTEAD if self._guessed else "a script whose calls depend on the host or the time cannot be followed",
            )
        if isinstance(record[1], codec.TooLarge):
            raise Divergence(
                f"{name} in the loop of step {self._step + 1} gave rank {self._rank} {record[1].description}",
                "results small enough to be recorded",
                f"keep large results out of the loop, or {WHOLE_STEP}: a spare need only know what it returns",
            )
        return record

    def _more(self) -> bool:
        """Block until there is a next record, or until this process has taken over (False)."""
        while not self._records:
            while not self._segments:
                match self._context.link.receive(local.History, local.TakeOver, local.Park):
                    case local.History(records), _:
                        self._segments.extend(records)
                    case local.Park(), _:
                        self._park()
                    case local.TakeOver() as order, (descriptor,):
                        self._take_over(order, descriptor)
                        return False
            segment, *others = unpack(self._segments.popleft())
            self._segments.extendleft(reversed(others))
            self._records.extend(codec.decode(segment))
            now = time.monotonic()
            if now - self._told_at >= MOVED_EVERY_S:  # others may wait for this process as long as it moves
                self._told_at = now
                self._context.link.send(local.Moved(self._rank, self._step))
        return True

    def _park(self) -> None:
        gc.collect()
        give_back((*self._context.adapter.state.shard, *self._context.adapter.state.derived))
        linux.trim_memory()
        free = total = peak = 0
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            with contextlib.suppress(RuntimeError):  # an allocator of the script's need not count
                peak = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
        self._context.link.send(local.Parked(self._rank, free, total, peak))

    def _draw_alike(self) -> None:
        # If the script drew random numbers after this call, it shall draw the same here.
        if self._records and self._records[0][0] == RANDOM_STATES:
            restore_rng(self._context.adapter, self._records.popleft()[1])

    # ---- a rank's life

    @torch.inference_mode(False)  # the script may evaluate first; what is made here is trained
    def _rehearsed(self) -> None:
        """At the first forward: the recording is used up, the model is built; compare it with the rank's own."""
        context = self._context
        context.groups.finish_rehearsal()
        context.adapter.attach()
        self._layout = Layout(context.adapter.state.shard)
        if self._layout.digest != self._expected_digest:
            raise Divergence(
                f"this rehearsal of rank {self._rank} built a shard of layout {self._layout.digest}",
                f"layout {self._expected_digest}, as the rank itself has it",
                ALIKE,
            )
        self._unread.finish([*context.adapter.state.shard, *context.adapter.state.derived])
        context.link.send(local.Rehearsed(self._rank, time.monotonic() - self._began))
        context.saves.folders.made = self._files.own
        self._files.lift()  # before what follows wraps `open`
        self._mute.keep_files()

    @torch.inference_mode(False)  # the script may be in it now, as in a swap
    def _take_over(self, order: local.TakeOver, descriptor: int) -> None:
        if self._step != order.restore_step:
            raise Divergence(
                f"ordered to take over rank {self._rank} at step {order.restore_step} with the records of "
                f"{self._step} steps"
            )
        with rng.preserved():
            for inner, (pulled, step, name) in list(self._passed_over.items()):
                mine = prove(inner, pulled[0])
                if mine is not None:
                    self._compare(mine, pulled[2], step, name)
        layout = present(self._layout, "a take-over before the first forward")
        slots = SlotPair.attach(descriptor, self._rank, order.header_bytes, order.payload_bytes)
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 0)
        self._context.mode = live = Live(self._context, layout, slots, step=order.restore_step)
        self._mute.release_files()
        self._context.saves.folders.take_over()
        live.take_over(order)
        self._mute.lift()
