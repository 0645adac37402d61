"""The part of a collective that must be alike on all members of its group.

No legal program may be told that it pairs wrongly, so whatever may differ by rank is left out:
- sends and receives pair with one peer, and are not counted;
- sizes in a gather, a scatter and an all_to_all are each member's own;
- who only moves data may call the same bytes by another dtype; who reduces may not;
- the variants of one operation (a list, one tensor) are one operation;
- a thread that the script or a save has started issues when it likes: its collectives are not counted at all.

Rules of this file: microseconds a collective; no tensor's content is looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..core.pairing import DTYPES, REDUCTIONS, Call
from ..transport.flight_recorder import GroupRecord
from .collective import BATCH, POINT_TO_POINT, tensors

_main = threading.main_thread()
_dtypes = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
_reductions = {int(getattr(dist.ReduceOp.RedOpType, name.upper())): name for name in REDUCTIONS if name}
_codes: dict[tuple[Any, ...], int] = {}
_CODES_MAX = 65536
"""Different collectives that are remembered: a size that is new each time must not fill the memory."""


def is_inline() -> bool:
    """Return whether this thread issues in the order of the script: it is the main one, or autograd's for a device."""
    thread = threading.current_thread()
    return thread is _main or isinstance(thread, threading._DummyThread)


def note(book: GroupRecord, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Count the operation `name` in `book`."""
    if name in POINT_TO_POINT:
        return
    if name == BATCH:
        for part in args[0]:
            note(book, *part)
        return
    book.note(code_of(name, args, kwargs))


def code_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """The code of a collective (core/pairing.Call)."""
    return _KINDS[name](args, kwargs)


def _code(*fields: Any) -> int:
    """Args: fields: of a Call."""
    code = _codes.get(fields)
    if code is None:
        if len(_codes) >= _CODES_MAX:
            _codes.clear()
        code = _codes[fields] = Call(*fields).encoded()
    return code


def _argument(number: int, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return args[number] if len(args) > number else kwargs.get(name)


def _options(number: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what says how to reduce and where: torch's options, or an operation or root of its own."""
    return args[number] if len(args) > number else kwargs.get("opts")


def _reduction(options: Any, kwargs: dict[str, Any]) -> str:
    operation = getattr(options, "reduceOp", None)
    if operation is None:
        operation = kwargs.get("op", options)
    kind = getattr(operation, "op", operation)
    return _reductions.get(getattr(kind, "value", -1), "")


def _root(options: Any, kwargs: dict[str, Any]) -> int:
    root = getattr(options, "rootRank", None)
    return int(root if root is not None else kwargs.get("root", options if isinstance(options, int) else 0))


def _only(given: Any) -> Any:
    """Unpack a list of one. Whether a list is a tensor takes torch a microsecond to say no."""
    return given[0] if type(given) is list and len(given) == 1 else given


def _size(given: Any) -> tuple[str, int]:
    """Dtype and elements; of an unknown dtype bytes, of no tensor nothing."""
    given = _only(given)
    if isinstance(given, torch.Tensor):
        return _dtypes.get(given.dtype, ""), given.numel()
    found = tensors(given)
    if not found:
        return "", 0
    return _dtypes.get(found[0].dtype, ""), sum(tensor.numel() for tensor in found)


def _bytes(given: Any) -> int:
    given = _only(given)
    if isinstance(given, torch.Tensor):
        return given.numel() * given.element_size()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(given))


def _reducing(operation: str, given: int, options: int) -> Callable[[Sequence[Any], dict[str, Any]], int]:
    """`given`, `options`: where they stand among the arguments."""
    names = ("tensors", "inputs")

    def kind(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        how = _options(options, args, kwargs)
        what = args[given] if len(args) > given else kwargs.get(names[given], kwargs.get("input"))
        return _code(operation, *_size(what), _reduction(how, kwargs))

    return kind


def _reduce(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    how = _options(1, args, kwargs)
    reduction = _reduction(how, kwargs) or _reduction(_argument(2, "op", args, kwargs), kwargs)
    return _code("reduce", *_size(_argument(0, "tensors", args, kwargs)), reduction, _root(how, kwargs))


def _broadcast(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    root = _root(_options(1, args, kwargs), kwargs)
    return _code("broadcast", "", _bytes(_argument(0, "tensors", args, kwargs)), "", root)


def _gathering(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """By what all have in the end: what each gives may differ."""
    given = args[0] if args else next((kwargs[name] for name in _GATHERED if name in kwargs), None)
    return _code("all_gather", "", _bytes(given))


_GATHERED = ("output_tensors", "output_lists", "output", "outputs", "output_tensor")


def _rooted(operation: str) -> Callable[[Sequence[Any], dict[str, Any]], int]:
    def kind(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        return _code(operation, "", 0, "", _root(_options(2, args, kwargs), kwargs))

    return kind


def _plain(operation: str) -> Callable[[Sequence[Any], dict[str, Any]], int]:
    return lambda args, kwargs: _code(operation)


_all_reduce, _reduce_scatter = _reducing("all_reduce", 0, 1), _reducing("reduce_scatter", 1, 2)
_KINDS: dict[str, Callable[[Sequence[Any], dict[str, Any]], int]] = {
    "allreduce": _all_reduce,
    "allreduce_coalesced": _reducing("all_reduce_coalesced", 0, 1),
    "broadcast": _broadcast,
    "reduce": _reduce,
    "allgather": _gathering,
    "allgather_coalesced": _gathering,
    "_allgather_base": _gathering,
    "allgather_into_tensor_coalesced": _gathering,
    "all_gather_single": _gathering,
    "all_gather_single_coalesced": _gathering,
    "gather": _rooted("gather"),
    "gather_single": _rooted("gather"),
    "gather_into_tensor": _rooted("gather"),
    "scatter": _rooted("scatter"),
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "reduce_scatter_single_coalesced": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter,
    "alltoall": _plain("all_to_all"),
    "alltoall_base": _plain("all_to_all"),
    "all_to_all_single": _plain("all_to_all"),
    "barrier": _plain("barrier"),
    "monitored_barrier": _plain("barrier"),
}
