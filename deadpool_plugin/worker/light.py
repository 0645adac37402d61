"""Tensors of checkpoints that a process does not read in start-up, because its restore overwrites them.

A process that rehearses a rank loads what the rank itself has loaded. Of a large tensor it gets the memory only. What
the script does with that memory decides whether the file is read after all:

    copies it (copy_, clone, to, cat)    the copy is put off, and its target is unread from there on
    takes a view of it, asks its shape   nothing
    anything else                        it is read now, with all that it was made of

At the first forward, `finish` drops what lies in memory that the restore overwrites, and reads what is left: a script
may keep a teacher, a table or a buffer computed from parameters. So what is there then is what the rank itself has.
Rules of this file: the main thread only, where a dispatch mode of torch's sees every operation. Not seen: memory that C
extensions, other threads and shared memory get at past torch's operations before the first forward.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import mmap
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _len_torch_dispatch_stack,
)

from ..comm.record import user_frame
from ..errors import Divergence, present
from .loaded_files import KEEP, SMALL_BYTES, RecordedFile, Span
from .patching import Function, PatchSet, when_imported

_ATEN = torch.ops.aten
_COPIES = frozenset({_ATEN.clone.default, _ATEN._to_copy.default, _ATEN.cat.default})
_OF_FORM = frozenset({
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_empty_strided",
    "new_zeros", "new_ones", "new_full", "is_pinned", "is_same_size",
})  # fmt: skip
"""Operations that read a tensor's shape and type only."""
_PAST_OPERATIONS = "numpy", "tolist", "__reduce_ex__", "__dlpack__", "share_memory_"
"""Methods of a tensor that get at its memory without an operation."""
Fill = Callable[[torch.Tensor], object]


@dataclasses.dataclass(frozen=True)
class _Form:
    """The place of a tensor in its storage: offset and strides in elements."""

    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        return cls(int(tensor.storage_offset()), tensor.size(), tensor.stride(), tensor.dtype)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        whole = torch.empty(0, dtype=self.dtype, device=storage.device)
        return whole.set_(storage, self.offset, self.size, self.stride)

    def span(self) -> Span:
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (self.offset + last + 1) * self.dtype.itemsize


@dataclasses.dataclass(eq=False)
class _Part:
    """A part of a storage, and how it gets its content. `is_whole`: it has all bytes of its span."""

    span: Span
    form: _Form
    fill: Fill
    is_whole: bool


class _Content:
    """How the content of a storage comes about, and who is to get a copy before that changes.

    The storage itself is held weakly. Once it is gone, the others have what they need made again.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak, self._bytes, self._device = StorageWeakRef(storage), storage.nbytes(), storage.device
        self._again: torch.UntypedStorage | None = None
        self.parts: list[_Part] = []  # in order: later ones may be written over earlier ones
        self.readers: list[tuple[Span, _Content, Span]] = []  # the span of this, and of which storage it is to go to

    def storage(self) -> torch.UntypedStorage | None:
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return self._again if found is None else found

    def make_again(self) -> torch.UntypedStorage:
        self._again = torch.UntypedStorage(self._bytes, device=self._device)
        return self._again

    def forget(self) -> None:
        self._again = None

    def is_wanted(self, *seen: _Content) -> bool:
        """Return whether the storage is in use, or one that is to get a copy of it."""
        if self.storage() is not None:
            return True
        return any(one.is_wanted(self, *seen) for _, one, _ in self.readers if one is not self and one not in seen)

    def has(self, span: Span) -> bool:
        """Return whether all of `span` has a part of its own here."""
        return _lies_in(span, _merged([part.span for part in self.parts if part.is_whole]))

    def take(self, span: Span) -> tuple[list[_Part], list[tuple[_Content, Span]]]:
        """Remove what makes up `span`. Returns: these parts, and who is to get a copy of anything in them."""
        spans, parts = [span], list[_Part]()
        for part in reversed(self.parts):
            if _meets(part.span, spans):
                spans.append(part.span)
                parts.insert(0, part)
        self.parts = [part for part in self.parts if part not in parts]
        readers = [reader for reader in self.readers if _meets(reader[0], spans)]
        self.readers = [reader for reader in self.readers if reader not in readers]
        return parts, [(one, its) for _, one, its in readers]


class Unread(TorchDispatchMode):
    """All that this process has not read, from the top of its script to the first forward.

    `say`: what to call when something has to be read, with the reason.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports torch's compiler, which takes seconds

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left_bytes = self.read_bytes = 0
        """Bytes of tensors in files: left out, and read later because they were needed."""
        self._say, self._said = say, False
        self._unread: dict[int, _Content] = {}  # by the storage's address, which stays its own as long as this holds it
        self._made: list[_Content] = []  # again, for as long as something is being read
        self._filling = self._entered = self._finished = False
        self._depth, self._guards = 0, PatchSet()  # of blocks of inference mode
        self._guards.wrap(self._enter_inference, torch.inference_mode, "__enter__")
        self._guards.wrap(self._leave_inference, torch.inference_mode, "__exit__")
        self._patches = PatchSet()
        self._patches.wrap(self._open, torch.serialization, "_open_zipfile_reader")
        self._patches.wrap(self._load, torch, "load")
        self._patches.wrap(self._load, torch.serialization, "load")
        for name in _PAST_OPERATIONS:
            self._patches.wrap(self._get_at, torch.Tensor, name)
        when_imported("torch.distributed.checkpoint.filesystem", self._watch_reader)

    # ---- what is not read

    def can_leave(self) -> bool:
        """Return whether operations on what is left unread now are seen."""
        if self._finished or threading.current_thread() is not threading.main_thread():
            return False
        if not self._entered:
            if _len_torch_dispatch_stack():  # a mode of the script's own, which ends before this one
                return False
            self._entered = True
            self.__enter__()  # type: ignore[no-untyped-call]
        return True

    def leave(self, target: torch.Tensor, fill: Fill) -> None:
        """Leave `target` without its content. `fill` reads that into a tensor of its form. Raises: Divergence then."""

        def counted(tensor: torch.Tensor) -> None:
            self.read_bytes += tensor.nbytes
            if not self._said:
                self._said = True
                where = "at its first forward the script keeps" if self._finished else f"{user_frame()} uses"
                self._say(f"{where} tensors of a checkpoint that no restore overwrites: newcomers read these, keep it")
            fill(tensor)

        self._give(target)
        self.left_bytes += target.nbytes
        self._put_off(target, counted)

    def _put_off(self, target: torch.Tensor, fill: Fill) -> None:
        if target.numel():
            form = _Form.of(target)
            self._content(target).parts.append(_Part(form.span(), form, fill, target.is_contiguous()))

    def _content(self, tensor: torch.Tensor) -> _Content:
        return self._unread.setdefault(_address(tensor), _Content(tensor.untyped_storage()))

    def _load(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        # A file that is mapped is read where it is copied; left unread it takes as little memory.
        return original(*args, **{**kwargs, "mmap": False})

    def _open(self, original: Function, file: Any) -> Any:
        """Open a file for `torch.load`."""
        is_file = isinstance(file, (io.BufferedReader, RecordedFile)) and isinstance(file.name, str)
        is_whole = is_file and file.tell() == 0
        opened = original(file)
        if is_whole and self.can_leave() and _is_of_this_order(opened.file_like):
            opened.file_like = _Reader(self, opened.file_like, os.path.abspath(file.name))
        return opened

    def _watch_reader(self, filesystem: ModuleType) -> None:
        if not self._finished:
            self._patches.wrap(self._read_data, filesystem.FileSystemReader, "read_data")

    def _read_data(self, original: Function, reader: Any, plan: Any, planner: Any) -> Any:
        """Read what a plan of torch.distributed.checkpoint asks of its files."""
        if not self.can_leave():
            return original(reader, plan, planner)
        read, reader_then = [], copy.copy(reader)  # which the script may use for another checkpoint later

        def leave(item: Any, target: torch.Tensor) -> None:
            def fill(tensor: torch.Tensor) -> None:
                original(reader_then, dataclasses.replace(plan, items=[item]), _Into(tensor))

            self.leave(target, fill)
            planner.commit_tensor(item, target)

        for item in plan.items:
            target = None if item.type.name == "BYTE_IO" else planner.resolve_tensor(item).detach()
            if target is None or target.nbytes <= SMALL_BYTES or type(target) is not torch.Tensor:
                read.append(item)
            else:
                leave(item, target)
        return original(reader, dataclasses.replace(plan, items=read), planner)

    # ---- what the script does with it

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._filling or not self._unread:
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):  # made of others
            return NotImplemented
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(_address(one) in self._unread for one in tensors):
            return func(*args, **kwargs)
        if func is _ATEN._foreach_copy_.default:
            for target, source in zip(*args[:2], strict=True):
                self._copy(target, source)
            return None
        if func is _ATEN.copy_.default:
            return self._copy(*args, **kwargs)
        if func in _COPIES and all(map(self._is_left, tensors)) and not kwargs.get("pin_memory"):
            return self._copied(func, args, kwargs, tensors)
        if not _is_view(func) and func.__name__.partition(".")[0] not in _OF_FORM:
            self._read(*tensors)
        return func(*args, **kwargs)

    def _is_left(self, tensor: torch.Tensor) -> bool:
        """Return whether all of `tensor` is unread."""
        content = self._unread.get(_address(tensor))
        return content is not None and bool(tensor.numel()) and content.has(_Form.of(tensor).span())

    def _copy(self, target: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_same_storage = _address(target) == _address(source)
        if is_same_storage and _Form.of(target) == _Form.of(source):
            return target
        if (content := self._unread.get(_address(target))) is not None and target.numel():
            if is_same_storage:
                self._read(target)
            elif not self._give(target) and target.is_contiguous():  # what is overwritten need not be read
                span = _Form.of(target).span()
                content.parts = [part for part in content.parts if not _lies_in(part.span, [span])]
        if self._is_left(source):
            content_of = self._later(source, target)
            self._put_off(target, lambda tensor: tensor.copy_(content_of()))
            return target
        self._read(source, target)
        return target.copy_(source, *args, **kwargs)

    def _give(self, target: torch.Tensor) -> bool:
        """Before `target` changes, read it if somebody is to get a copy of what it has. Returns: whether it was."""
        content = self._unread.get(_address(target))
        if content is None or not target.numel():
            return False
        span = _Form.of(target).span()
        is_wanted = any(one.is_wanted() for its, one, _ in content.readers if _meets(its, [span]))
        if is_wanted:
            self._read(target)
        return is_wanted

    def _copied(self, func: Any, args: Any, kwargs: Any, sources: list[torch.Tensor]) -> torch.Tensor:
        """Return the memory for a copy."""

        def on_meta(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
            return torch.device("meta") if isinstance(leaf, torch.device) else leaf

        form = func(*pytree.tree_map(on_meta, args), **pytree.tree_map(on_meta, kwargs))
        device = kwargs.get("device") or sources[0].device
        made = torch.empty_strided(form.size(), form.stride(), dtype=form.dtype, device=device).zero_()
        leaves, spec = pytree.tree_flatten((args, kwargs))
        later = [self._later(leaf, made) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

        def fill(tensor: torch.Tensor) -> None:
            args, kwargs = pytree.tree_unflatten([one() if isinstance(one, _Later) else one for one in later], spec)
            tensor.copy_(func(*args, **kwargs))

        self._put_off(made, fill)
        return made

    def _later(self, source: torch.Tensor, reader: torch.Tensor) -> _Later:
        """Have `reader` filled before `source`, which is unread, changes."""
        content, form = self._content(source), _Form.of(source)
        content.readers.append((form.span(), self._content(reader), _Form.of(reader).span()))
        return _Later(self, content, form)

    def _get_at(self, original: Function, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._entered and not self._finished and not self._filling:
            self._read(tensor)
        return original(tensor, *args, **kwargs)

    def _read(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.numel() and (content := self._unread.get(_address(tensor))) is not None:
                self.read(content, _Form.of(tensor).span())
                if not content.parts:
                    self._unread.pop(_address(tensor), None)

    def read(self, content: _Content, span: Span) -> None:
        """Make what `span` is to have, and give it to all that are to get a copy: it may change or go after that."""
        outer, self._filling = self._filling, True
        try:
            with torch.no_grad():
                parts, readers = content.take(span)
                storage = content.storage()
                if storage is None and parts:
                    self._made.append(content)
                    storage = content.make_again()
                for part in parts:
                    part.fill(part.form.on(present(storage, "a part of no storage")))
                for reader, its in readers:
                    if reader.is_wanted():
                        self.read(reader, its)
        finally:
            self._filling = outer
            while self._made and not outer:
                self._made.pop().forget()

    # ---- the end of start-up

    def finish(self, restored: Iterable[torch.Tensor]) -> None:
        """End with start-up: read what is in use and lies outside of `restored`. Raises: Divergence if it is gone."""
        self._finished = True
        self._patches.undo()
        if not self._entered:
            return self._guards.undo()
        spans: defaultdict[int, list[Span]] = defaultdict(list)
        for tensor in restored:
            if tensor.numel():
                spans[_address(tensor)].append(_Form.of(tensor).span())
        covered = {address: _merged(found) for address, found in spans.items()}

        def needed() -> list[tuple[_Content, Span]]:
            return [
                (content, part.span)
                for address, content in self._unread.items()
                for part in content.parts
                if content.storage() is not None and not _lies_in(part.span, covered.get(address, ()))
            ]

        if needed():
            gc.collect()  # what is in a cycle is in nobody's use
        for content, span in needed():
            self.read(content, span)
        self._unread.clear()
        self._switch()
        if not self._depth:
            self._guards.undo()

    def _switch(self) -> None:
        """Make torch ask this mode, or no more once start-up has ended."""
        if self._finished and _get_current_dispatch_mode() is None:
            self.__enter__()  # type: ignore[no-untyped-call]
        if _get_current_dispatch_mode() is self:  # else the script is within one of its own; this one does nothing more
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if not self._finished:
                self.__enter__()  # type: ignore[no-untyped-call]

    # A block of inference mode ends as it began, with or without a mode: what came meanwhile has to be said again.

    def _enter_inference(self, original: Function, *args: Any) -> Any:
        self._depth += threading.current_thread() is threading.main_thread()
        return original(*args)

    def _leave_inference(self, original: Function, *args: Any) -> Any:
        left = original(*args)
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._entered:
                self._switch()
            if self._finished and not self._depth:
                self._guards.undo()
        return left


@dataclasses.dataclass(frozen=True)
class _Later:
    """A tensor that is unread yet. Calling it reads it."""

    unread: Unread
    content: _Content
    form: _Form

    def __call__(self) -> torch.Tensor:
        self.unread.read(self.content, self.form.span())
        return self.form.on(present(self.content.storage(), "what is to be copied was not made again"))


class _Reader:
    """A file of `torch.save` whose large tensors come without content. Otherwise torch's own reader."""

    def __init__(self, unread: Unread, inner: Any, path: str) -> None:
        self._unread, self._inner, self._path = unread, inner, path
        self._was = os.stat(path).st_mtime_ns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_storage_from_record(self, name: str, size: int, dtype: Any) -> Any:
        if size <= SMALL_BYTES:
            return self._inner.get_storage_from_record(name, size, dtype)
        path, was = self._path, self._was

        def fill(tensor: torch.Tensor) -> None:
            if os.stat(path).st_mtime_ns != was:  # where it was recorded, all of it is as it was then
                raise Divergence(f"{path} was changed while its tensors were still needed", "a file that stays", KEEP)
            with open(path, "rb") as file:
                if isinstance(file, RecordedFile):
                    file.real()  # torch would hide an error of its own
                read = torch._C.PyTorchFileReader(file).get_storage_from_record(name, size, dtype)
            tensor.copy_(_Form.of(tensor).on(read.untyped_storage()))

        # Zeros that take no memory until somebody writes: a script that looks at a parameter later finds no garbage.
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        made = torch.frombuffer(pages, dtype=torch.uint8)
        self._unread.leave(made, fill)
        return made


class _Into:
    """A planner of torch.distributed.checkpoint that has one tensor read into `target`."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def resolve_tensor(self, item: Any) -> torch.Tensor:
        return self._target

    def commit_tensor(self, item: Any, tensor: torch.Tensor) -> None: ...


def _is_of_this_order(reader: Any) -> bool:
    """Return whether the bytes of numbers in the file have this machine's order."""
    return not reader.has_record("byteorder") or bool(reader.get_record("byteorder").decode() == sys.byteorder)


def _address(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # one that has no storage, as a sparse one
        return 0


def _is_view(func: Any) -> bool:
    """Return whether an operation gives another view of its argument's memory, and does nothing else."""
    schema = func._schema
    return not schema.is_mutable and any(argument.alias_info is not None for argument in schema.arguments)


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for first, end in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((first, end))
    return merged


def _lies_in(span: Span, spans: Iterable[Span]) -> bool:
    return any(first <= span[0] and span[1] <= end for first, end in spans)


def _meets(span: Span, spans: Iterable[Span]) -> bool:
    return any(first < span[1] and span[0] < end for first, end in spans)
