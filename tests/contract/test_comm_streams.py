"""A backend like NCCL on a CPU: synchronous operations return no Work, and the Works of others know no sender."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comm import TIMEOUT
from torch._C._distributed_c10d import FakeProcessGroup

from deadpool_plugin.comm.collective import BATCH
from deadpool_plugin.comm.groups import Groups
from deadpool_plugin.comm.handle import Handle
from deadpool_plugin.comm.record import Recorder, Replay


class Streams:
    """Adds 1 at once where NCCL would enqueue; torch's own Work without a sender is what an asynchronous one gives."""

    supports_coalescing = True

    def __init__(self) -> None:
        self._work = FakeProcessGroup._create_internal(0, 2)
        self.open_batches = 0

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        tensors[0].add_(1)
        return None if options is None or not options.asyncOp else self._work.allreduce(tensors)

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> Any:
        tensors[0].add_(srcRank)
        return self._work.recv(tensors, srcRank, tag)

    def barrier(self, options: Any = None) -> None:
        return None

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self.open_batches += 1

    def _end_coalescing(self, device: torch.device) -> None:
        self.open_batches -= 1


def over(inner: Any) -> tuple[Groups, Handle]:
    groups = Groups(patience_s=0.0)
    handle = Handle(groups, index=0, key="", rank=0, ranks=(0, 1), backends={"cpu": "nccl"}, timeout=TIMEOUT)
    fabric = types.SimpleNamespace(wait_style=lambda operation: "direct")
    handle.inner, groups._network = inner, types.SimpleNamespace(fabric=lambda name: fabric)  # type: ignore[assignment]
    return groups, handle


def asynchronous() -> Any:
    options = dist.AllreduceOptions()
    options.asyncOp = True
    return options


@pytest.mark.parametrize("named", [False, True])
def test_a_plain_receive_ends_and_knows_its_sender(named: bool) -> None:
    _, handle = over(Streams())
    tensor = torch.zeros(2)
    work = handle.recv([tensor], srcRank=1, tag=0) if named else handle.recv([tensor], 1, 0)
    assert work.wait() and work.source_rank() == 1 and tensor.tolist() == [1.0, 1.0]


def test_synchronous_operations_are_recorded_and_replayed() -> None:
    def script(handle: Handle) -> list[list[float]]:
        alone, together = torch.zeros(2), [torch.zeros(3), torch.zeros(3)]
        handle.allreduce([alone]).wait()
        handle.issue(BATCH, ([("allreduce", ([tensor],), {}) for tensor in together],)).wait()
        handle.barrier().wait()
        return [tensor.tolist() for tensor in (alone, *together)]

    groups, handle = over(Streams())
    groups._recorder = Recorder(1 << 10)
    expected = script(handle)
    recording = groups.stop_recording()
    groups, handle = over(None)
    groups._replay = Replay(recording)
    assert script(handle) == expected == [[1.0] * 2, [1.0] * 3, [1.0] * 3]
    groups.finish_rehearsal()


def test_what_is_never_waited_for_is_not_kept() -> None:
    groups, handle = over(Streams())
    for options in (None, asynchronous()):
        handle.allreduce([torch.zeros(2)], options)
    assert not groups._unfinished
