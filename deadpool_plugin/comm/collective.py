"""The operations of torch's ProcessGroup: what each writes, and the part that all members of a group give alike.

No legal program may be told that it pairs wrongly, so `code_of` leaves out what may differ by rank:
- sends and receives pair with one peer, and are not counted;
- sizes in a gather, a scatter and an all_to_all are each member's own;
- who only moves data may call the same bytes by another dtype; who reduces may not;
- the variants of one operation (a list, one tensor) are one operation;
- a thread that the script or a save has started issues when it likes: its collectives are not counted at all.

Rules of this file: `_KINDS` has every method of ProcessGroup that moves data; what a torch version lacks is never
called. Counting takes microseconds, and looks at no tensor's content.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..core.signatures import DTYPES, REDUCTIONS, Signature
from ..transport.flight_recorder import GroupRecord

BATCH = "batch"
"""Our own operation: `args[0]` is a list of operations issued as one, coalesced where the backend can."""
READ_ONLY = frozenset({"send", "barrier", "monitored_barrier"})
"""All others write their first argument."""
POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})
COALESCED = {
    "allreduce_coalesced": "allreduce",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "all_gather_single_coalesced": "all_gather_single",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_single",
}
"""Made of several of the same kind, which NCCL takes as one; and what each of them is."""
BLOCKING = "monitored_barrier"
"""An operation of gloo's alone whose call itself blocks, and which returns no Work."""


class _Kind(NamedTuple):
    """An operation: the methods that are its variants, and where the arguments stand that all members give alike (the
    tensors, and how to reduce or the root)."""

    methods: str
    given: int = -1
    names: tuple[str, ...] = ()
    options: int = -1
    reduces: bool = False
    """Then elements and their dtype are compared, else bytes."""
    has_root: bool = False


_KINDS = {
    "all_reduce": _Kind("allreduce", 0, ("tensors", "input"), options=1, reduces=True),
    "all_reduce_coalesced": _Kind("allreduce_coalesced", 0, ("tensors", "input"), options=1, reduces=True),
    "broadcast": _Kind("broadcast", 0, ("tensors",), options=1, has_root=True),
    "reduce": _Kind("reduce", 0, ("tensors",), options=1, reduces=True, has_root=True),
    "all_gather": _Kind(
        "allgather allgather_coalesced _allgather_base all_gather_single",
        given=0,  # what all have in the end: what each gives may differ
        names=("output_tensors", "output_lists", "output", "outputs", "output_tensor"),
    ),
    "gather": _Kind("gather gather_single gather_into_tensor", options=2, has_root=True),
    "scatter": _Kind("scatter", options=2, has_root=True),
    "reduce_scatter": _Kind(
        "reduce_scatter _reduce_scatter_base reduce_scatter_single", 1, ("inputs", "input"), options=2, reduces=True
    ),
    "all_to_all": _Kind("alltoall alltoall_base all_to_all_single"),
    "send": _Kind("send"),
    "recv": _Kind("recv recv_anysource"),
    "barrier": _Kind("barrier monitored_barrier"),
}
_plain = {method: name for name, kind in _KINDS.items() for method in kind.methods.split()}
OPERATIONS = {many: _plain[one] for many, one in COALESCED.items()} | _plain
"""Methods, and the operation that each is a variant of."""


class Operation(NamedTuple):
    """One call of a method of ProcessGroup."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}

    def argument(self, place: int, *names: str) -> Any:
        """The argument at `place`, or by the first of `names` that is given; None if there is none."""
        if len(self.args) > place:
            return self.args[place]
        return next((self.kwargs[name] for name in names if name in self.kwargs), None)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors among its arguments, in order."""
        return tensors((self.args, self.kwargs))

    def outputs(self) -> list[torch.Tensor]:
        """The tensors it writes, in argument order."""
        if self.name == BATCH:
            return [tensor for part in self.args[0] for tensor in part.outputs()]
        return [] if self.name in READ_ONLY else tensors(next(iter([*self.args, *self.kwargs.values()]), None))


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`, a tensor or lists, tuples and dicts of them, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


_main = threading.main_thread()
_dtypes = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
_reductions = {int(getattr(dist.ReduceOp.RedOpType, name.upper())): name for name in REDUCTIONS if name}


def note(record: GroupRecord, operation: Operation) -> None:
    """Count `operation` in `record`, if this thread issues in the order of the script: the main one, or autograd's."""
    thread = threading.current_thread()
    if thread is _main or isinstance(thread, threading._DummyThread):
        for part in operation.args[0] if operation.name == BATCH else (operation,):
            if part.name not in POINT_TO_POINT:
                record.note(code_of(part))


def code_of(operation: Operation) -> int:
    """The code of a collective (core/signatures.Signature)."""
    name = OPERATIONS[operation.name]
    kind = _KINDS[name]
    dtype, size, reduction, root = "", 0, "", -1
    if kind.given >= 0:
        given = operation.argument(kind.given, *kind.names)
        if type(given) is list and len(given) == 1:  # whether a list is a tensor takes torch a microsecond to say no
            given = given[0]
        found = [given] if isinstance(given, torch.Tensor) else tensors(given)
        if not kind.reduces:
            size = sum(tensor.nbytes for tensor in found)
        elif found:
            dtype, size = _dtypes.get(found[0].dtype, ""), sum(tensor.numel() for tensor in found)
    if kind.options >= 0:
        options = operation.argument(kind.options, "opts")
        if kind.has_root:
            named = getattr(options, "rootRank", operation.kwargs.get("root"))
            root = int(named if named is not None else options if isinstance(options, int) else 0)
        if kind.reduces:
            how = getattr(options, "reduceOp", None)
            if how is None:  # an operation of its own, for `reduce` behind the root
                how = operation.argument(2, "op") if kind.has_root else operation.kwargs.get("op", options)
            reduction = _reductions.get(getattr(getattr(how, "op", how), "value", -1), "")
    return _code(name, dtype, size, reduction, root)


@lru_cache(65536)  # a size that is new each time must not fill the memory
def _code(*fields: Any) -> int:
    return Signature(*fields).encoded()
