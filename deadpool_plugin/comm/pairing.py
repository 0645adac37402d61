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
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..core.pairing import DTYPES, REDUCTIONS, Call
from ..transport.flight_recorder import GroupRecord
from .collective import BATCH, OPERATIONS, POINT_TO_POINT, tensors

_main = threading.main_thread()
_dtypes = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
_reductions = {int(getattr(dist.ReduceOp.RedOpType, name.upper())): name for name in REDUCTIONS if name}
_codes: dict[tuple[Any, ...], int] = {}
_CODES_MAX = 65536
"""Different collectives that are remembered: a size that is new each time must not fill the memory."""


class _Alike(NamedTuple):
    """The arguments that the members of a group give alike to an operation.

    `given` and `options`: where among the arguments the tensors stand that are compared, and how to reduce or the root.
    """

    given: int = -1
    names: tuple[str, ...] = ()
    options: int = -1
    reduces: bool = False
    """Then elements and their dtype are compared, else bytes."""
    has_root: bool = False


_ALIKE = {
    "all_reduce": _Alike(0, ("tensors", "input"), options=1, reduces=True),
    "all_reduce_coalesced": _Alike(0, ("tensors", "input"), options=1, reduces=True),
    "reduce_scatter": _Alike(1, ("inputs", "input"), options=2, reduces=True),
    "reduce": _Alike(0, ("tensors",), options=1, reduces=True, has_root=True),
    "broadcast": _Alike(0, ("tensors",), options=1, has_root=True),
    # what all have in the end: what each gives may differ
    "all_gather": _Alike(0, ("output_tensors", "output_lists", "output", "outputs", "output_tensor")),
    "gather": _Alike(options=2, has_root=True),
    "scatter": _Alike(options=2, has_root=True),
    "all_to_all": _Alike(),
    "barrier": _Alike(),
}


def is_inline() -> bool:
    """Return whether this thread issues in the order of the script: it is the main one, or autograd's for a device."""
    thread = threading.current_thread()
    return thread is _main or isinstance(thread, threading._DummyThread)


def note(book: GroupRecord, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Count the operation `name` in `book`."""
    if name == BATCH:
        for part in args[0]:
            note(book, *part)
    elif name not in POINT_TO_POINT:
        book.note(code_of(name, args, kwargs))


def code_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """The code of a collective (core/pairing.Call)."""
    operation = OPERATIONS[name]
    alike = _ALIKE[operation]
    dtype, size, reduction, root = "", 0, "", -1
    if alike.given >= 0:
        there = len(args) > alike.given
        given = args[alike.given] if there else next((kwargs[key] for key in alike.names if key in kwargs), None)
        dtype, size = _size(given, alike.reduces)
    if alike.options >= 0:
        options = args[alike.options] if len(args) > alike.options else kwargs.get("opts")
        if alike.has_root:
            named = getattr(options, "rootRank", None)
            root = int(named if named is not None else kwargs.get("root", options if isinstance(options, int) else 0))
        if alike.reduces:
            how = getattr(options, "reduceOp", None)
            if how is None:  # an operation of its own, for `reduce` behind the root
                how = kwargs.get("op", args[2] if alike.has_root and len(args) > 2 else options)
            reduction = _reductions.get(getattr(getattr(how, "op", how), "value", -1), "")
    fields = (operation, dtype, size, reduction, root)
    code = _codes.get(fields)
    if code is None:
        if len(_codes) >= _CODES_MAX:
            _codes.clear()
        code = _codes[fields] = Call(*fields).encoded()
    return code


def _size(given: Any, reduces: bool) -> tuple[str, int]:
    """Dtype and elements of what is reduced, else bytes; nothing of no tensor."""
    if type(given) is list and len(given) == 1:  # whether a list is a tensor takes torch a microsecond to say no
        given = given[0]
    found = [given] if isinstance(given, torch.Tensor) else tensors(given)
    if reduces:
        return (_dtypes.get(found[0].dtype, ""), sum(tensor.numel() for tensor in found)) if found else ("", 0)
    return "", sum(tensor.numel() * tensor.element_size() for tensor in found)
