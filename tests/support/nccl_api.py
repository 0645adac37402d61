"""NCCL's C API by ctypes, for what torch hides; the faults and counts of the stand-in (tests/fakecuda/nccl.cpp); and
ranks that share a communicator.

Rules of this file: the ranks are forked before CUDA is used, and share one device.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from .forked import Cell, Fleet

SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = range(7)
SUM, PROD, MAX, MIN, AVG = range(5)
TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
NO_COLOR = -1
DEADLINE_S = 120.0
_LIBRARY = ctypes.CDLL(None)  # the stand-in, if it is there, is preloaded


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


def is_stand_in() -> bool:
    return hasattr(_LIBRARY, "fakenccl_order")


def order(fault: str, value: int) -> None:
    """Order a fault of the stand-in, or take it back with 0."""
    assert _LIBRARY.fakenccl_order(fault.encode(), value) == 0, fault


def count(name: str) -> int:
    """Return how often a fault struck, or one of the stand-in's counts."""
    counter = _LIBRARY.fakenccl_count
    counter.restype = ctypes.c_long
    found = int(counter(name.encode()))
    assert found >= 0, name
    return found


def call(name: str, *arguments: Any) -> int:
    """Return NCCL's result code. Blocks: as NCCL does, without Python's lock."""
    return int(getattr(_LIBRARY, name)(*arguments))


def checked(name: str, *arguments: Any) -> None:
    result = call(name, *arguments)
    assert result == SUCCESS, f"{name} gave {result}: {last_error()}"


def last_error() -> str:
    reader = _LIBRARY.ncclGetLastError
    reader.restype = ctypes.c_char_p
    return bytes(reader(None)).decode()


def unique_id() -> bytes:
    made = UniqueId()
    checked("ncclGetUniqueId", ctypes.byref(made))
    return bytes(made)


def init(identity: bytes, ranks: int, rank: int) -> tuple[int, Communicator]:
    """Return the result code, and the communicator that came of it."""
    handle = ctypes.c_void_p()
    result = call("ncclCommInitRank", ctypes.byref(handle), ranks, UniqueId.from_buffer_copy(identity), rank)
    return result, Communicator(handle)


class Communicator:
    """A handle of NCCL's, and a stream of its own."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self.handle = handle
        self.stream = torch.cuda.Stream()

    def issue(self, name: str, *arguments: Any) -> int:
        """Call an operation on tensors that the current stream has made. Returns the result code."""
        self.stream.wait_stream(torch.cuda.current_stream())
        return self.issue_at_once(name, *arguments)

    def issue_at_once(self, name: str, *arguments: Any) -> int:
        passed = [_pointer(value) if isinstance(value, torch.Tensor) else value for value in arguments]
        return call(name, *passed, self.handle, ctypes.c_void_p(self.stream.cuda_stream))

    def all_reduce(self, tensor: torch.Tensor, op: int = SUM) -> int:
        return self.issue("ncclAllReduce", tensor, tensor, size(tensor), TYPES[tensor.dtype], op)

    def send(self, tensor: torch.Tensor, peer: int) -> int:
        return self.issue("ncclSend", tensor, size(tensor), TYPES[tensor.dtype], peer)

    def receive(self, tensor: torch.Tensor, peer: int) -> int:
        return self.issue("ncclRecv", tensor, size(tensor), TYPES[tensor.dtype], peer)

    def abort(self) -> int:
        return call("ncclCommAbort", self.handle)

    def error(self) -> int:
        """Return the asynchronous error."""
        found = ctypes.c_int(-1)
        checked("ncclCommGetAsyncError", self.handle, ctypes.byref(found))
        return found.value

    def premultiplier(self, factor: torch.Tensor, on_device: bool) -> int:
        """Return a reduction operator that multiplies by `factor` before it adds."""
        made = ctypes.c_int()
        where = 0 if on_device else 1
        checked(
            "ncclRedOpCreatePreMulSum", ctypes.byref(made), _pointer(factor), TYPES[factor.dtype], where, self.handle
        )
        return made.value


def size(tensor: torch.Tensor) -> ctypes.c_size_t:
    return ctypes.c_size_t(tensor.numel())


def group(*calls: Callable[[], int]) -> tuple[list[int], int]:
    """Make the calls between ncclGroupStart and ncclGroupEnd; return what they and the end gave."""
    checked("ncclGroupStart")
    inside = [made() for made in calls]
    return inside, call("ncclGroupEnd")


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def join(identity: Cell, rank: int, ranks: int) -> Communicator:
    """Return a communicator of all ranks; the first one makes its id. Blocks: until all are here."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    torch.cuda.set_device(0)
    if rank == 0:
        identity.set(unique_id())
    result, communicator = init(identity.get(), ranks, rank)
    assert result == SUCCESS, last_error()
    return communicator


def together(function: Callable[..., Any], ranks: int = 2, *more: Any) -> list[Any]:
    """Return what `function(communicator, rank, ranks, *more)` returns on each rank."""
    with Fleet(DEADLINE_S) as fleet:
        identity = Cell(4096)
        return fleet.values([fleet.fork(_rank, function, identity, rank, ranks, more) for rank in range(ranks)])


def _rank(function: Callable[..., Any], identity: Cell, rank: int, ranks: int, more: tuple[Any, ...]) -> Any:
    return function(join(identity, rank, ranks), rank, ranks, *more)


def until(condition: Callable[[], bool]) -> None:
    """Blocks: until it holds; the deadline is the fleet's."""
    while not condition():
        os.sched_yield()


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Return a thread that has started, and the list that will have its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    return thread, results
