"""The operations of torch's ProcessGroup, what each of them writes, and the Work of one that is done.

Rules of this file: every method name of ProcessGroup that moves data appears in `OPERATIONS`; a name a torch
version lacks is simply never called. No state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Operation = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name, positional and named arguments of one operation."""
BATCH = "batch"
"""Our own operation: `args[0]` is a list of (name, args, kwargs) issued as one, coalesced where the backend can."""

OPERATIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "gather": "gather",
    "gather_single": "gather",
    "gather_into_tensor": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
}
"""Names of methods, and the operation that each is a variant of."""
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
"""Operations of gloo's alone whose call itself blocks, and which return no Work."""


def outputs(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors the operation `name` writes, in argument order."""
    if name == BATCH:
        return [tensor for part in args[0] for tensor in outputs(*part)]
    return [] if name in READ_ONLY else tensors(next(iter([*args, *kwargs.values()]), None))


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`, a tensor or lists, tuples and dicts of them, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


class HandleWork(dist.Work):
    """The Work of an operation on a handle; done, unless it is waited for in a way of a class below.

    Args: results: what `result` and the future give; source: the sender, where there is one; inner: torch's own Work,
        as long as the operation is not done.
    """

    def __init__(self, results: Iterable[torch.Tensor] = (), source: int = -1, inner: Any = None) -> None:
        super().__init__()
        self._results, self._source, self._inner = list(results), source, inner

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def when_done(self, call: Callable[[], None]) -> None:
        """Call `call` once the operation has ended well: now, or in the wait for it."""
        call()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self._inner is None or self._inner.is_success()

    def exception(self) -> Any:
        return None if self._inner is None else self._inner.exception()

    def synchronize(self) -> None:
        if self._inner is not None:
            self._inner.synchronize()

    def block_current_stream(self) -> None:
        if self._inner is not None:
            self._inner.block_current_stream()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._results

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        value = self.result()
        devices = {tensor.device for tensor in value if tensor.is_cuda}
        future: torch.futures.Future[Any] = torch.futures.Future(devices=list(devices))
        future.set_result(value)
        return future


class CompletedWork(HandleWork):
    """A Work that is done."""
