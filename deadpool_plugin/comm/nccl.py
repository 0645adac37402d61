"""NCCL: communicators of one generation, each aborted from a thread of its own with one deadline, and never destroyed.

Rules of this file: on a card, little more of it has run than tests/contract/test_comm_nccl.py covers (one H100).
- The watchdog must neither kill the process (`stall_timeout_s` stands in for its time-out) nor hold an abort up.
- An abort frees what a thread in the middle of issuing an operation still uses (NCCL's guide: "make sure no thread is
  calling any NCCL operations"): those threads leave first.
- An aborted group may be dropped: torch's destructor joins its own threads, and tells NCCL nothing more.
- A communicator, of a group or of a pair, connects at its first operation. NCCL hands it out only when all members have
  come, and no abort ends that: it is done in a thread that can be left behind. Such a thread keeps its group, and may
  use up a core, until the process ends, for NCCL accepts connections in a loop.
- A pair connects in its first operation itself. One that is left behind may still be carried out, into its own tensors,
  if the peer comes later. All other first operations are issued once there is a communicator, which an abort reaches.
- An operation that fails leaves nothing open in its thread, neither NCCL's groups nor torch's count of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, DebugLevel, Store, get_debug_level

from ..errors import DeadpoolError, Unsupported
from .collective import BATCH, COALESCED, POINT_TO_POINT, Operation
from .fabric import Fabric, HandleWork, SwapWork
from .generations import Generations
from .handle import Handle

ABORT_DEADLINE_S = 10.0
LEAVE_S = 0.3
"""For threads in the middle of issuing an operation, before it is aborted under them."""
_INVALID_USAGE = 5

ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # turns the former on
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # else a wait ends at the group's time-out, as an error of the script's
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",  # else an abort waits for whoever waits for the communicator
    "TORCH_FR_BUFFER_SIZE": "0",  # else the watchdog looks up the source lines of whatever an error ends
    "NCCL_NVLS_ENABLE": "0",  # else it gets in the way of an abort
}
"""Variables that NCCL and its watchdog read when a communicator is made."""


def _prepare_environment() -> None:
    if get_debug_level() == DebugLevel.DETAIL:  # which turns the watchdog's error handling on whatever is set
        raise Unsupported(
            "NCCL with TORCH_DISTRIBUTED_DEBUG=DETAIL, whose watchdog ends the process at the first error",
            "INFO or OFF",
            "unset TORCH_DISTRIBUTED_DEBUG, or run this job without deadpool_plugin",
        )
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" in os.environ:  # the former name of a variable counts more than the latter
        os.environ["TORCH_FR_BUFFER_SIZE"] = os.environ.pop("TORCH_NCCL_TRACE_BUFFER_SIZE")
    for name, value in ENVIRONMENT.items():
        theirs = os.environ.get(name, value)
        if theirs != value:
            print(f"[deadpool] {name}={theirs} is replaced by {value}: a swap needs it", file=sys.stderr, flush=True)
        os.environ[name] = value


class NcclFabric(Fabric):
    """All NCCL groups of one generation."""

    def __init__(self, generations: Generations) -> None:
        _prepare_environment()
        self._nccl, self.generations = _library(), generations
        self._backends: list[Any] = []
        self._connected: set[tuple[Any, int | None]] = set()
        """Groups that have a communicator, and pairs in them that have one (the other member's rank)."""
        self._issuing: set[int] = set()  # threads that may be in the library just now
        self._over = False

    def build(self, handle: Handle, store: Store) -> Backend:
        options: Any = dist.ProcessGroupNCCL.Options()
        if handle.options is not None:
            options.is_high_priority_stream = handle.options.is_high_priority_stream
        if hasattr(options, "config"):
            if handle.options is not None:
                options.config = handle.options.config
            options.config.blocking = 1
        options._timeout = handle.timeout
        options.global_ranks_in_group, options.group_name = list(handle.ranks), handle.key
        backend = dist.ProcessGroupNCCL(store, handle.rank(), handle.size(), options)
        backend._set_sequence_number_for_group()
        self._backends.append(backend)
        return backend

    def begin(self, handle: Handle, operation: Operation) -> HandleWork:
        group: Any = handle.inner
        thread = threading.get_ident()
        self._issuing.add(thread)
        try:
            self.generations.check()  # after the line before: who passes here is waited for
            generation = self.generations.current
            peer = int(operation.argument(1, "dstRank", "srcRank")) if operation.name in POINT_TO_POINT else None
            if operation.name == "barrier":
                _name_device(operation)
            if (group, peer) in self._connected:
                work = self._issue(group, operation)
            else:
                work = self._connect(group, peer, operation)
                self._connected.add((group, peer))
        finally:
            self._issuing.discard(thread)
        if work is not None:
            return StreamWork(work, self, handle, operation)
        # A synchronous operation: whatever comes on the stream comes after it. An abort ends it without an error, a
        # barrier although nobody came.
        self.generations.check(generation)
        return HandleWork(operation)

    def _connect(self, group: Any, peer: int | None, operation: Operation) -> Any:
        """Issue the first `operation` of a communicator. Blocks: until the other members do, or an announcement."""
        device = _device(operation)
        backend, stream = group._get_backend(device), torch.cuda.current_stream(device)

        def connect() -> Any:
            own = torch.cuda.current_stream(device)  # of this thread, which other functions use after this one
            thread = threading.get_ident()
            self._issuing.add(thread)
            try:
                torch.cuda.set_stream(stream)  # no context manager: going back to device 0 would make a context there
                if peer is not None:
                    return self._issue(group, operation)
                # NCCL drops an empty operation once the communicator is there
                backend.broadcast([torch.empty(0, dtype=torch.uint8, device=device)])
            finally:
                torch.cuda.set_stream(own)
                if self._over:  # too late for `unblock`
                    with contextlib.suppress(BaseException):
                        backend.abort()
                self._issuing.discard(thread)

        work = self.generations.run(connect, self.generations.current)
        return work if peer is not None else self._issue(group, operation)

    def _issue(self, group: Any, operation: Operation) -> Any:
        parts = _parts(operation)
        if parts is None:
            try:
                return getattr(group, operation.name)(*operation.args, **operation.kwargs)
            except RuntimeError:
                self._close_groups()
                raise
        # Several parts as one. torch's own coalesced collectives end the process when one part fails: their guard
        # throws while it unwinds (AutoNcclGroup).
        device = _device(operation)
        group._start_coalescing(device)
        try:
            for part, args, kwargs in parts:
                getattr(group, part)(*args, **kwargs)
            return group._end_coalescing(device)
        except Exception:
            self._close_groups()
            # torch counts its own groups beside NCCL's (ncclActiveGroupCounter_), until one ends well
            with contextlib.suppress(RuntimeError):
                self._nccl.ncclGroupStart()
                group._end_coalescing(device)
            raise

    def _close_groups(self) -> None:
        # A failure leaves NCCL's groups open in the thread: communicators made in one are never connected.
        while self._nccl.ncclGroupEnd() != _INVALID_USAGE:
            pass

    def wait_for(self, work: SwapWork, timeout: timedelta | None) -> None:
        work.inner.wait() if timeout is None else work.inner.wait(timeout)
        self.generations.check(work.generation)  # an abort ends a wait for a barrier without an error

    def unblock(self) -> None:
        """Abort all at once: one may not end before another has (torch issue 119797)."""
        deadline = time.monotonic() + LEAVE_S
        while self._issuing and time.monotonic() < deadline:  # nobody comes in any more
            time.sleep(0.001)
        self._over = True
        backends, self._backends = self._backends, []
        self._connected.clear()  # a thread that is left behind holds this object, and must not hold the groups
        failed: list[BaseException] = []

        def abort(backend: Any) -> None:
            try:
                backend.abort()
            except BaseException as error:  # reported below
                failed.append(error)

        threads = []
        for backend in backends:
            threads.append(threading.Thread(target=abort, args=(backend,), name="deadpool-nccl-abort", daemon=True))
            threads[-1].start()
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


class StreamWork(SwapWork):
    """A Work whose wait only orders streams."""

    def get_future(self) -> torch.futures.Future[Any]:
        """torch's own, which streams wait for; a completed one after the wait."""
        if self.inner is None:
            return super().get_future()
        self._check()
        future: torch.futures.Future[Any] = self.inner.get_future()
        if self.operation.name in COALESCED:  # issued as a batch, whose future has no value
            return future.then(lambda _: self.operation.outputs())
        return future


def _name_device(barrier: Operation) -> None:
    # torch would guess it from the global rank: on a host with other devices than the lost one's, another process's
    options = barrier.argument(0, "opts")
    if options is not None and not options.device_ids:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        options.device_ids = [torch.cuda.current_device()]


def _device(operation: Operation) -> torch.device:
    if operation.name == "barrier":
        named = getattr(operation.argument(0, "opts"), "device_ids", None)
        return torch.device("cuda", named[0] if named else torch.cuda.current_device())
    return operation.tensors()[0].device


def _parts(operation: Operation) -> list[Operation] | None:
    """The operations that a coalesced one is made of; None for any other."""
    name, args, kwargs = operation
    if name == BATCH:
        return [piece for part in args[0] for piece in _parts(part) or [part]]
    if name not in COALESCED:
        return None
    if name == "allreduce_coalesced":
        given, options = operation.argument(1, "opts"), dist.AllreduceOptions()
        options.reduceOp, options.timeout, options.asyncOp = given.reduceOp, given.timeout, given.asyncOp
        return [Operation("allreduce", ([_flat(tensor)], options)) for tensor in args[0]]
    written, inputs, *rest = args
    return [
        Operation(COALESCED[name], (_flat(output), _flat(given), *rest), kwargs)
        for output, given in zip(written, inputs, strict=True)
    ]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as a contiguous one, as operations ask that are not coalesced. One with gaps stays: torch
    refuses it."""
    if tensor.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,))


@functools.cache
def _library() -> Any:
    """Load the C functions of the NCCL that torch was linked with. Raises: Unsupported if torch hides them."""
    library = ctypes.CDLL(torch._C.__file__)
    if dist.is_nccl_available() and not (hasattr(library, "ncclGroupStart") and hasattr(library, "ncclGroupEnd")):
        raise Unsupported(
            f"torch {torch.__version__} has NCCL inside and hides its functions",
            "torch as pip installs it, with NCCL as a library of its own",
            "install that on every host",
        )
    return library
