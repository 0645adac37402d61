"""What each collective of torch's ProcessGroup reads and writes, and a Work that is already done.

Rules of this file: every method name of ProcessGroup that moves data appears in `OPERATIONS`; a name a torch
version lacks is simply never called. No state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# (writes its first argument, reads its first argument, reads its second argument)
_IN_PLACE, _OUT_OF_PLACE, _SOURCE, _SINK, _NOTHING = (1, 1, 0), (1, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0)

BATCH = "batch"
"""Our own operation: `args[0]` is a list of (name, args, kwargs) issued as one, coalesced where the backend can."""

OPERATIONS: dict[str, tuple[int, int, int]] = {
    "allreduce": _IN_PLACE,
    "allreduce_coalesced": _IN_PLACE,
    "broadcast": _IN_PLACE,
    "reduce": _IN_PLACE,
    "allgather": _OUT_OF_PLACE,
    "allgather_coalesced": _OUT_OF_PLACE,
    "_allgather_base": _OUT_OF_PLACE,
    "allgather_into_tensor_coalesced": _OUT_OF_PLACE,
    "all_gather_single": _OUT_OF_PLACE,
    "all_gather_single_coalesced": _OUT_OF_PLACE,
    "gather": _OUT_OF_PLACE,
    "scatter": _OUT_OF_PLACE,
    "reduce_scatter": _OUT_OF_PLACE,
    "_reduce_scatter_base": _OUT_OF_PLACE,
    "reduce_scatter_single": _OUT_OF_PLACE,
    "reduce_scatter_single_coalesced": _OUT_OF_PLACE,
    "reduce_scatter_tensor_coalesced": _OUT_OF_PLACE,
    "alltoall": _OUT_OF_PLACE,
    "alltoall_base": _OUT_OF_PLACE,
    "all_to_all_single": _OUT_OF_PLACE,
    "send": _SOURCE,
    "recv": _SINK,
    "recv_anysource": _SINK,
    "barrier": _NOTHING,
    "monitored_barrier": _NOTHING,
}

POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})
RECEIVES = frozenset({"recv", "recv_anysource"})
BLOCKING = frozenset({"monitored_barrier"})
"""Operations whose call itself blocks, and which return no Work."""


def available() -> list[str]:
    """The operations this torch's ProcessGroup has."""
    return [name for name in OPERATIONS if hasattr(dist.ProcessGroup, name)]


def outputs(name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> list[torch.Tensor]:
    """The tensors the operation `name` writes, in argument order."""
    if name == BATCH:
        return [tensor for part in args[0] for tensor in outputs(*part)]
    return tensors(_argument(0, args, kwargs)) if OPERATIONS[name][0] else []


def inputs(name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> list[torch.Tensor]:
    """The tensors the operation `name` reads, in argument order."""
    if name == BATCH:
        return [tensor for part in args[0] for tensor in inputs(*part)]
    _, first, second = OPERATIONS[name]
    found = tensors(_argument(0, args, kwargs)) if first else []
    return found + (tensors(_argument(1, args, kwargs)) if second else [])


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`, a tensor or lists, tuples and dicts of them, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def _argument(position: int, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    values = [*args, *(kwargs or {}).values()]
    return values[position] if position < len(values) else None


class CompletedWork(dist.Work):
    """A Work that is done. `results` is what `result` and the future give; `source` the sender, where there is one."""

    def __init__(self, results: Iterable[torch.Tensor] = (), source: int = -1) -> None:
        super().__init__()
        self._results, self._source = list(results), source

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def block_current_stream(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._results

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        return completed_future(self._results)


def completed_future(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future
