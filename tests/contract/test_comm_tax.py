"""What the plugin costs a device in collectives, counted: as many kernels, copies, waits of the host and allocations
over a handle as over plain NCCL, for every operation.

Rules of this file: counts are the stand-in's (fakecuda.h) and torch's allocator's, and exact. What threads of torch's
watchdog do (queries of events) is not counted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import pytest
import torch
import torch.distributed as dist
from clusters import card
from fakecuda import control
from support import present
from support.comm import TIMEOUT, become, plain
from support.forked import Cell, Fleet
from support.zygote import in_zygote
from torch.distributed.distributed_c10d import _coalescing_manager

from deadpool_plugin.comm import patches
from deadpool_plugin.comm.groups import Groups, host_store

pytestmark = [pytest.mark.gpu, control.only_here]

DEADLINE_S = 90.0
TIMES = 3
WAITS = ("stream_waits", "copy_waits", "form_waits", "event_waits", "device_waits")
COUNTS = ("launches", "copies", "sets", "host_functions", "allocations", "host_allocations", *WAITS)
"""Not events: which are recorded and waited for depends on time."""


def _peer() -> int:
    return 1 - dist.get_rank()


def _batch(tensors: list[torch.Tensor]) -> None:
    operations = [dist.P2POp(dist.isend, tensors[0], _peer()), dist.P2POp(dist.irecv, tensors[1], _peer())]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _pair(tensors: list[torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        dist.send(tensors[0], 1)
        present(dist.irecv(tensors[1], 1)).wait()
    else:
        dist.recv(tensors[1], 0)
        present(dist.isend(tensors[0], 0)).wait()


def _coalesced(tensors: list[torch.Tensor]) -> None:
    with _coalescing_manager(dist.group.WORLD, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
    manager.wait()


def _coalesced_gather(tensors: list[torch.Tensor]) -> None:
    with _coalescing_manager(dist.group.WORLD):
        dist.all_gather_into_tensor(tensors[2], tensors[0])
        dist.all_gather_into_tensor(tensors[3], tensors[1])


def _polled(tensors: list[torch.Tensor]) -> None:
    work = present(dist.all_reduce(tensors[0], async_op=True))
    while not work.is_completed():
        pass
    work.wait()


OPERATIONS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "all_reduce": lambda t: dist.all_reduce(t[0]),
    "all_reduce, later": lambda t: present(dist.all_reduce(t[0], async_op=True)).wait(),
    "all_reduce, future": lambda t: present(dist.all_reduce(t[0], async_op=True)).get_future().wait(),
    "all_reduce, polled": _polled,
    "broadcast": lambda t: dist.broadcast(t[0], 0),
    "reduce": lambda t: dist.reduce(t[0], 0),
    "all_gather": lambda t: dist.all_gather([t[0], t[1]], t[0].clone()),
    "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(t[2], t[0]),
    "reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(t[0], t[2]),
    "all_to_all_single": lambda t: dist.all_to_all_single(t[3], t[2]),
    "send and receive": _pair,
    "batch": _batch,
    "coalesced": _coalesced,
    "coalesced all_gather": _coalesced_gather,
    "barrier": lambda t: dist.barrier(),
}


def _counted(rank: int, of_torch: bool, stores: list[Cell]) -> dict[str, dict[str, int]]:
    """Each operation's counts of TIMES calls, after one that connects; over a handle after a swap."""
    keep = []
    for store in stores if rank == 0 else ():
        server, address = host_store("127.0.0.1")
        keep.append(server)
        store.set(address)
    os.environ.update(card.TOGETHER | card.host_id(rank))
    torch.cuda.set_device(0)
    if of_torch:
        os.environ["TORCH_DIST_USE_NCCL2"] = "0"  # from torch 2.15 on: else not the communicators of a handle
        plain(rank, 2, stores[0].get(), "nccl")
    else:
        become(rank, 2)
        groups = Groups()
        patches.install(groups)
        groups.start(0, stores[0].get())
        dist.init_process_group("nccl", timeout=TIMEOUT)
        groups.stop_recording()
        groups.rebuild(1, stores[1].get())
    found = {}
    for name, operation in OPERATIONS.items():
        tensors = [torch.ones(4, device="cuda") for _ in range(2)] + [torch.ones(8, device="cuda") for _ in range(2)]
        operation(tensors)
        torch.cuda.synchronize()
        before = _now()
        for _ in range(TIMES):
            operation(tensors)
        after = _now()
        found[name] = {count: after[count] - before[count] for count in after}
    torch.cuda.synchronize()
    dist.barrier()
    return found


def _now() -> dict[str, int]:
    report, memory = control.report(), torch.cuda.memory_stats()
    return {count: report[count] for count in COUNTS} | {"blocks": memory["allocation.all.allocated"]}


@in_zygote
def test_a_collective_costs_what_plain_nccl_costs() -> None:
    with Fleet(DEADLINE_S) as fleet:
        results = []
        for of_torch in (True, False):
            stores = [Cell(4096), Cell(4096)]
            results.append(fleet.values([fleet.fork(_counted, rank, of_torch, stores) for rank in range(2)]))
    for of_plain, of_handle in zip(*results, strict=True):
        more = {
            f"{name}: {count}": of_handle[name][count] - times
            for name, counts in of_plain.items()
            for count, times in counts.items()
            if of_handle[name][count] != times
        }
        assert not more, more
        waits = {name for name, counts in of_handle.items() if any(counts[wait] for wait in WAITS)}
        assert waits == {"barrier"}, "the host waits for the device in no other operation"
