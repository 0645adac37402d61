"""NCCL: communicators of one generation, each aborted from a thread of its own with one deadline, and never destroyed.

Rules of this file: nothing here ran on more than what tests/contract/test_comm_nccl.py covers. The watchdog must
neither kill the process (`stall_timeout_s` stands in for its time-out) nor hold an abort up, and NVLS is off, because
it gets in the way of one. An abort frees what a thread in the middle of issuing an operation still uses (NCCL's guide:
"make sure no thread is calling any NCCL operations"): Groups lets those leave first. Communicators connect at their
first operation, in every generation as in the first: those that are used, and a pair's own for its sends and receives.
An aborted group may be dropped: torch's destructor joins its own threads, and tells NCCL nothing more.
A process whose abort does not return by the deadline, or whose thread is caught in connecting, must be killed and
replaced: `unblock` raises in the first case, the agent sees that it does not unwind in the second. So is a process that
issues a coalesced collective after NCCL has met the dead peer: torch's guard throws while it unwinds, which ends it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, DebugLevel, Store, get_debug_level

from ..errors import DeadpoolError, Unsupported
from .fabric import GroupSpec

ABORT_DEADLINE_S = 10.0

ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # turns the former on
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # else a wait ends at the group's time-out, as an error of the script's
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",  # else an abort waits for whoever waits for the communicator
    "NCCL_NVLS_ENABLE": "0",
}
"""Variables that NCCL and its watchdog read when a communicator is made."""


def prepare_environment() -> None:
    """Set `ENVIRONMENT`; what the user had set otherwise is said.

    Raises: Unsupported at torch's debug level DETAIL, which turns the watchdog's error handling on whatever is set.
    """
    if get_debug_level() == DebugLevel.DETAIL:
        raise Unsupported(
            "NCCL with TORCH_DISTRIBUTED_DEBUG=DETAIL, whose watchdog ends the process at the first error",
            "INFO or OFF",
            "unset TORCH_DISTRIBUTED_DEBUG, or run this job without deadpool_plugin",
        )
    for name, value in ENVIRONMENT.items():
        theirs = os.environ.get(name, value)
        if theirs != value:
            print(f"[deadpool] {name}={theirs} is replaced by {value}: a swap needs it", file=sys.stderr, flush=True)
        os.environ[name] = value


class NcclFabric:
    """All NCCL groups of one generation."""

    def __init__(self) -> None:
        prepare_environment()
        self._backends: list[Any] = []

    def build(self, spec: GroupSpec, store: Store) -> Backend:
        options = _options(spec)
        backend = dist.ProcessGroupNCCL(store, spec.rank, len(spec.ranks), options)
        backend._set_sequence_number_for_group()
        self._backends.append(backend)
        return backend

    def unblock(self) -> None:
        """Abort all at once: one may not end before another has (torch issue 119797)."""
        failed: list[BaseException] = []
        threads = [
            threading.Thread(target=_abort, args=(backend, failed), name="deadpool-nccl-abort", daemon=True)
            for backend in self._backends
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + ABORT_DEADLINE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = sum(thread.is_alive() for thread in threads)
        if stuck or failed:
            raise DeadpoolError(
                f"aborting {len(threads)} NCCL communicators failed: {failed or f'{stuck} of them did not return'}",
                f"an end within {ABORT_DEADLINE_S} s",
                "this process must be killed and its rank replaced",
            ) from (failed[0] if failed else None)

    def ranks_named(self, text: str) -> tuple[int, ...]:
        """NCCL says in its log only which peer it was."""
        return ()

    def failed(self, group: dist.ProcessGroup) -> None:
        """Sends, receives and what is made of them open a group of NCCL's in the thread, and an error leaves it open:
        communicators made there from then on are never connected (ProcessGroupNCCL.cpp, pointToPoint; nccl.cpp,
        all2all_single_*). Where none is open NCCL says so."""
        with contextlib.suppress(RuntimeError):
            group._get_backend(torch.device("cuda"))._group_end()  # type: ignore[attr-defined]

    def await_rest(self, stop: Callable[[], bool]) -> bool:
        """An abort returns once its kernels have ended."""
        return True

    def wait_style(self, operation: str) -> str:
        return "direct"


def name_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A barrier without tensors, of a group that is bound to no device, would guess one from the global rank, which on
    a host with other devices than the lost one's may be another process's."""
    options = kwargs.get("opts", args[0] if args else None)
    if options is not None and not options.device_ids and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        options.device_ids = [torch.cuda.current_device()]


def _abort(backend: Any, failed: list[BaseException]) -> None:
    try:
        backend.abort()
    except BaseException as error:  # reported by the waiting thread
        failed.append(error)


def _options(spec: GroupSpec) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    if spec.options is not None:
        options.is_high_priority_stream = spec.options.is_high_priority_stream
        if hasattr(options, "config"):
            options.config = spec.options.config
    if hasattr(options, "config"):
        options.config.blocking = 1
    options._timeout = spec.timeout
    if hasattr(options, "global_ranks_in_group"):
        options.global_ranks_in_group, options.group_name = list(spec.ranks), spec.key
    return options
