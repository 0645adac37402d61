"""NCCL: communicators of one generation, aborted as one group from a thread with a deadline, and never destroyed.

Rules of this file: nothing here ran on more than what tests/contract/test_comm_nccl.py covers. The watchdog must not
kill the process, and NVLS is off, because both get in the way of an abort. A process whose abort does not return
by the deadline, or whose CUDA context is dead, must be killed and replaced; `unblock` then raises.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store

from ..errors import DeadpoolError
from .fabric import GroupSpec

ABORT_DEADLINE_S = 10.0

ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "NCCL_NVLS_ENABLE": "0",
}


def prepare_environment() -> None:
    """Set what NCCL and its watchdog read when the first communicator is made; what the user set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


class NcclFabric:
    """All NCCL groups of one generation."""

    def __init__(self) -> None:
        self._backends: list[Any] = []

    def build(self, spec: GroupSpec, store: Store) -> Backend:
        options = _options(spec)
        backend = dist.ProcessGroupNCCL(store, spec.rank, len(spec.ranks), options)
        backend._set_sequence_number_for_group()
        self._backends.append(backend)
        return backend

    def connect(self, device: torch.device) -> None:
        """Make the communicators now instead of at the first operation. Blocks: until all members do."""
        torch.cuda.set_device(device)
        for backend in self._backends:
            backend.eager_connect_single_device(device)

    def unblock(self) -> int:
        backends = list(reversed(self._backends))
        if not backends:
            return 0
        failed: list[BaseException] = []
        thread = threading.Thread(target=_abort, args=(backends, failed), name="deadpool-nccl-abort", daemon=True)
        thread.start()
        thread.join(ABORT_DEADLINE_S)
        if thread.is_alive() or failed:
            raise DeadpoolError(
                f"aborting {len(backends)} NCCL communicators failed: {failed or 'it did not return'}",
                f"an end within {ABORT_DEADLINE_S} s",
                "this process must be killed and its rank replaced",
            ) from (failed[0] if failed else None)
        return len(backends)

    def wait_style(self, operation: str) -> str:
        return "direct"


def _abort(backends: list[Any], failed: list[BaseException]) -> None:
    """One NCCL group around all aborts, so that they cannot deadlock each other (torch issue 119797)."""
    try:
        first = backends[0]
        grouped = hasattr(first, "_group_start") and hasattr(first, "_group_end")
        if grouped:
            first._group_start()
        for backend in backends:
            backend.abort()
        if grouped:
            first._group_end()
    except BaseException as error:  # reported by the waiting thread
        failed.append(error)


def _options(spec: GroupSpec) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    if spec.options is not None:
        options.is_high_priority_stream = spec.options.is_high_priority_stream
        if hasattr(options, "config"):
            options.config = spec.options.config
    options._timeout = spec.timeout
    if hasattr(options, "global_ranks_in_group"):
        options.global_ranks_in_group, options.group_name = list(spec.ranks), spec.key
    return options
