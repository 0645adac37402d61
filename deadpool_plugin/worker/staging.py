"""From live tensors to a slot of the node's arena, behind the training step's back.

Rules of this file: one thread copies; the shard does not change between the cut of a step and the next update, and the
next update waits for the copy, and until the next snapshot is known. The gate, which the copy waits for: a slot is used
again only once the snapshot in the other one is committed. A step that is no snapshot may become one until its next
update begins (a save waits for it).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ..core import local
from ..core.types import NO_STEP
from ..errors import Unsupported, invariant, present
from ..mirror.arena import SlotPair
from ..transport import linux
from . import codec, copies
from .link import AgentLink

PIECE_BYTES = 8 << 20  # 0.2 ms of PCIe
COPY_BYTES = 64 << 10  # a smaller copy counts as this much: it has a cost of its own
# All tensors of a shard are looked at in every step, with caches that training has filled: without a function for each.
_FORM, _VERSION = operator.attrgetter("shape", "dtype"), operator.attrgetter("_version")
SLOW_S, SLOW_STEPS = 1.0, 5  # reported: snapshots in a row, each waited for longer, and more than half the time


class Layout:
    """The place of each tensor of a shard in a slot's payload (64-byte aligned, in order)."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._forms = [*map(_FORM, tensors)]
        self._counting = [tensor for tensor in tensors if not tensor.is_inference()]  # whose writes torch counts
        *self._offsets, end = itertools.accumulate((-(-tensor.nbytes // 64) * 64 for tensor in tensors), initial=0)
        self.payload_bytes = max(end, 64)
        described = [(list(t.shape), str(t.dtype), offset) for t, offset in zip(tensors, self._offsets, strict=True)]
        self.digest = hashlib.sha256(repr(described).encode()).hexdigest()[:16]

    def check(self) -> None:
        """Raises: Unsupported if a tensor was given another shape or dtype since: its place would not hold it."""
        forms = [*map(_FORM, self.tensors)]
        if forms != self._forms:
            number = [*map(operator.ne, forms, self._forms)].index(True)
            (shape, dtype), (first_shape, first_dtype) = forms[number], self._forms[number]
            raise Unsupported(
                f"tensor {number} of the training state became {dtype} {list(shape)} in training",
                f"{first_dtype} {list(first_shape)}, as before the first step",
                "convert parameters and buffers before training, or run this job without deadpool_plugin",
            )

    def versions(self) -> int:
        """Return a number that each write into the shard raises, unless it goes through `.data`."""
        return sum(map(_VERSION, self._counting))

    def views(self, payload: memoryview) -> list[torch.Tensor]:
        """Return each tensor's place in `payload` as a tensor of its shape and dtype (shares the memory)."""
        whole = torch.frombuffer(payload, dtype=torch.uint8)
        places = zip(self.tensors, self._offsets, strict=True)
        return [whole[offset : offset + t.nbytes].view(t.dtype).view(t.shape) for t, offset in places]

    @torch.no_grad()
    def load(self, payload: memoryview) -> None:
        """Copy `payload` into the live tensors."""
        for tensor, view in zip(self.tensors, self.views(payload), strict=True):
            tensor.copy_(view)


def give_back(tensors: Iterable[torch.Tensor]) -> None:
    """Give back the memory of tensors that a restore will fill: they read as zeros. A device's stays."""
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_pinned():
            linux.forget_pages(tensor.data_ptr(), tensor.nbytes)


def _pieces(tensor: torch.Tensor, view: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Split both into parts of PIECE_BYTES, if they are larger: of elements, or of rows where those are apart."""
    if tensor.nbytes <= PIECE_BYTES:
        return [(tensor, view)]
    if tensor.is_contiguous():
        tensor, view = tensor.view(-1), view.view(-1)
    count = max(1, len(tensor) * PIECE_BYTES // tensor.nbytes)
    return zip(tensor.split(count), view.split(count), strict=True)


class Stager:
    """Stages one step at a time on a thread of its own. Thread: main; what is heard is the link's, with its lock."""

    def __init__(self, layout: Layout, changing: Sequence[torch.Tensor], slots: SlotPair, link: AgentLink) -> None:
        self._layout, self._slots, self._link = layout, slots, link
        self._views = [layout.views(slots.payload_in(slot)) for slot in (0, 1)]
        own = {id(tensor): torch.empty_like(tensor) for tensor in changing}
        self._sources = [own.get(id(tensor), tensor) for tensor in layout.tensors]
        # Where the sources lie; for each slot what `memmove` is given, a size of 0 for those that are no whole piece.
        self._moves: tuple[list[int], list[list[tuple[int, int, int]]]] = [], [[], []]
        self._cancel, self._staged, self._copies = threading.Event(), Future[None](), False
        self._staged.set_result(None)
        self._step, self._is_snapshot = NO_STEP, True  # of the newest cut
        self._taken = deque[tuple[int, float]](maxlen=2)  # the snapshots in the slots, and when each was begun
        # The cut that may become a snapshot yet; and the newest step that cannot any more. Both with the link's lock.
        self._offered: tuple[int, Callable[[], None]] | None = None
        self._gone_on = NO_STEP
        self.most = 0  # how many steps snapshots may be apart for this rank; 0: as many as for others
        self._begun = set[int]()  # the newest steps that have become one
        link.on_snapshots = self._heard
        self._waited_at, self._slow_steps = time.monotonic(), 0
        self._worked_at, self._worked_s, self._worked_steps = self._waited_at, 0.0, 0  # since the snapshot before
        self._side_stream: torch.cuda.Stream | None = None
        enter: Callable[[], None] | None = None
        if any(tensor.is_cuda for tensor in layout.tensors):
            self._side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._marks = [torch.cuda.Event(blocking=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._pin()
            # a new thread's current device is GPU 0, on which every rank would then allocate memory
            enter = functools.partial(torch.cuda.set_device, self._side_stream.device)
        self._thread = ThreadPoolExecutor(1, "deadpool-stager", enter)

    @property
    def newest(self) -> int:
        """The newest step whose snapshot is taken, -1 before the first."""
        return self._taken[-1][0] if self._taken else NO_STEP

    @property
    def begun(self) -> int:
        """The newest step whose snapshot is taken or under way."""
        return self._step if self._is_snapshot else self.newest

    @property
    def oldest(self) -> int:
        """The oldest step that a slot holds, or is yet to be overwritten: no swap goes back behind it."""
        return self._taken[0][0] if self._taken else NO_STEP

    def stage(self, step: int, generation: int, state: Any, records: list[bytes], paired: int = 0) -> None:
        """Copy the shard as it is now into a slot once the gate is open, if `step` is a snapshot or becomes one.

        Args: state: the rest of the snapshot; paired: see `SnapshotHeader`.
        """
        self._layout.check()
        for tensor, source in zip(self._layout.tensors, self._sources, strict=True):
            if source is not tensor:
                source.copy_(tensor)
        if self._side_stream is not None:
            self._side_stream.wait_stream(torch.cuda.current_stream())
        is_cancelled, step_s = self._cancel.is_set, 0.0
        with self._link.locked():
            is_snapshot = step in self._link.chain
        if is_snapshot:
            state = codec.encode(state)
            step_s = self._worked_s / max(1, self._worked_steps)
            self._worked_s, self._worked_steps = 0.0, 0
        else:  # it is encoded later if at all, while the script goes on (a schedule changes its list of rates)
            state = copies.structure(state)

        def write() -> None:
            before = self._link.wait_for_gate(step, is_cancelled)
            if before is not None:
                took_steps = self._took_s(before) / step_s if step_s else 0.0
                if self._taken and self._taken[-1][0] != before:  # that is void, and its slot is written over
                    self._taken.pop()
                self._taken.append((step, time.monotonic()))
                self._copy(step, before)
                scalars = state if is_snapshot else codec.encode(state)
                self._slots.seal(step, generation, self._layout.digest, scalars, paired)
                self._link.send(local.Staged(self._slots.rank, step, generation, records, took_steps, self.most))

        def begin() -> None:
            self._copies = False
            self._begun.add(step)
            self._staged = self._thread.submit(write)
            self._staged.add_done_callback(lambda _: self._link.wake())

        with self._link.locked():
            self._step, self._is_snapshot = step, is_snapshot
            self._offered = (step, begin)
            self._heard()

    def _heard(self) -> None:
        """Begin the snapshot of the newest cut if it is to be one; say which it is too late for. With the lock."""
        chain, committed = self._link.chain, self._link.committed
        if self._offered is not None and self._offered[0] in chain:
            begin, self._offered = self._offered[1], None
            begin()
        if self._gone_on > committed:
            self._begun = {step for step in self._begun if step > committed}
            for step in chain.announced(committed):
                if step <= self._gone_on and step not in self._begun:
                    self._begun.add(step)  # it is said once
                    self._link.send(local.Passed(self._slots.rank, step, self._link.generation))

    def _took_s(self, before: int) -> float:
        """Return how long the mirroring of the snapshot `before` took, 0 if that is not known."""
        taken_at = next((at for step, at in self._taken if step == before), 0.0)
        return max(0.0, self._link.committed_at - taken_at) if taken_at else 0.0

    def wait(self) -> None:
        """Block until nothing is staged, and the next snapshot is known: the shard may change then.

        Raises: GenerationChanged; the thread's error.
        """
        began = time.monotonic()
        with self._link.locked():
            self._offered, self._gone_on = None, self._step
        self._link.wait_until(lambda: self._staged.done() and self._link.chain.after(self._step) != NO_STEP)
        self._staged.result()
        now = time.monotonic()
        self._worked_s += began - self._worked_at
        self._worked_at, self._worked_steps = now, self._worked_steps + 1
        if not self._is_snapshot:
            return
        waited_s, step_s = now - began, now - self._waited_at
        self._waited_at = now
        self._slow_steps = self._slow_steps + 1 if waited_s > SLOW_S and 2 * waited_s > step_s else 0
        if self._slow_steps == SLOW_STEPS:  # its network, or the buddy's, is too slow for it
            text = (
                f"training waits for mirroring: {waited_s:.1f} of {step_s:.1f} s from one snapshot to the next; the "
                "buddy must get the changes of one before the next (is it the right network? see interface_address; "
                "mirror_every: auto, or more steps, leaves more time)"
            )
            self._link.event("Note", text=text)

    def settle(self) -> None:
        """Block until no snapshot is being copied; one may still wait at the gate."""
        self._link.wait_until(lambda: not self._copies or self._staged.done(), interruptible=False)

    def drop(self) -> None:
        """Give up a snapshot that still waits at the gate; let one that is being copied finish."""
        self._cancel.set()
        self._cancel = threading.Event()
        with self._link.locked():
            self._offered, self._gone_on = None, NO_STEP
        self._link.wake()
        self._link.wait_until(self._staged.done, interruptible=False)
        self._staged.result()

    def load(self, step: int) -> Any:
        """Put the shard of the snapshot of `step` back into the live tensors; returns the rest of it."""
        self._slots.drop_newer(step)
        lacking = f"rank {self._slots.rank} was told to restore step {step}, which its arena lacks"
        header = present(self._slots.open(step), lacking)
        invariant(header.layout_hash == self._layout.digest, "the snapshot was laid out for another rank or model")
        self._layout.load(self._slots.payload(step))
        with self._link.locked():
            self._step = self._gone_on = step
            self._begun = {step}
        self._taken.clear()
        self._taken.append((step, 0.0))
        return codec.decode(header.scalars)

    @torch.no_grad()
    def _copy(self, step: int, before: int) -> None:
        self._copies = True
        self._slots.invalidate(step, before)
        slot = self._slots.slot_of(step)
        pairs = zip(self._sources, self._views[slot], strict=True)
        if self._side_stream is not None:
            with torch.cuda.stream(self._side_stream):
                return self._copy_from_device(pairs, self._side_stream)
        addresses = [*map(torch.Tensor.data_ptr, self._sources)]
        if addresses != self._moves[0]:
            sizes = [tensor.nbytes if tensor.is_contiguous() else 0 for tensor in self._sources]
            targets = ([view.data_ptr() for view in views] for views in self._views)
            self._moves = addresses, [[*zip(places, addresses, sizes, strict=True)] for places in targets]
        for (tensor, view), move in zip(pairs, self._moves[1][slot], strict=True):
            if move[2]:  # a tenth less than `copy_`, which reads what it is about to overwrite
                ctypes.memmove(*move)
            else:
                view.copy_(tensor)

    def _copy_from_device(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], stream: torch.cuda.Stream) -> None:
        """Copy in pieces of PIECE_BYTES, two under way at most; sleep until one is done.

        A device does its copies to the host in turn. A script that reads its loss behind a whole shard waits for all of
        it (+7.6 % of a step, 604 MB on an H100). A thread that spins refills the queue at once, which is no better.
        """
        marks, piece, nbytes = self._marks, 0, 0
        for tensor, view in pairs:
            for source, place in _pieces(tensor, view):
                place.copy_(source, non_blocking=True)
                nbytes += max(source.nbytes, COPY_BYTES)
                if nbytes >= PIECE_BYTES:
                    marks[piece % 2].record(stream)
                    piece, nbytes = piece + 1, 0
                    marks[piece % 2].synchronize()
        marks[piece % 2].record(stream)
        marks[piece % 2].synchronize()

    def _pin(self) -> None:
        """Page-lock the arena, for the life of the process; else copies from the device are slower.

        It is never unmapped: memory unmapped while it is page-locked breaks a later cudaMalloc (error 208, an H100).
        """
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        try:
            for slot in (0, 1):
                memory = torch.frombuffer(self._slots.payload_in(slot), dtype=torch.uint8)
                torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        except RuntimeError as error:
            text = f"snapshots are copied through memory that could not be page-locked: {error}"
            self._link.event("Note", text=text)
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # the next kernel, whoever launches it, is told of that error again
