"""The outputs of each collective of torch's ProcessGroup, and a Work that is already done.

Rules of this file: every method name of ProcessGroup that moves data appears in `OPERATIONS`; a name a torch
version lacks is simply never called. No state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Operation = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name, positional and named arguments of one operation."""
BATCH = "batch"
"""Our own operation: `args[0]` is a list of (name, args, kwargs) issued as one, coalesced where the backend can."""

OPERATIONS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "gather_single",
    "gather_into_tensor",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
    "monitored_barrier",
)
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
BLOCKING = frozenset({"monitored_barrier"})
"""Operations whose call itself blocks, and which return no Work."""


def available() -> list[str]:
    """The operations this torch's ProcessGroup has."""
    return [name for name in OPERATIONS if hasattr(dist.ProcessGroup, name)]


def outputs(name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> list[torch.Tensor]:
    """The tensors the operation `name` writes, in argument order."""
    if name == BATCH:
        return [tensor for part in args[0] for tensor in outputs(*part)]
    return [] if name in READ_ONLY else tensors(_first(args, kwargs))


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`, a tensor or lists, tuples and dicts of them, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def named_source(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """The sender that the operation `name` itself names; -1 if it names none."""
    if name != "recv":
        return -1
    return int(kwargs["srcRank"] if "srcRank" in kwargs else args[1])


def _first(args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    return next(iter([*args, *(kwargs or {}).values()]), None)


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
    devices = {tensor.device for tensor in tensors(value) if tensor.is_cuda}
    future: torch.futures.Future[Any] = torch.futures.Future(devices=list(devices))
    future.set_result(value)
    return future
