"""Ranks for the process-group tests: a battery of every collective the frameworks call, and rank start-up.

Rules of this file: results are plain lists, so that plain gloo's and a handle's can be compared for equality.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from deadpool_plugin.comm import patches
from deadpool_plugin.comm.groups import Groups

from . import present

TIMEOUT = timedelta(seconds=120)


def become(rank: int, size: int) -> None:
    """The environment a worker has when its script starts."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)


def plain(rank: int, size: int, address: str, backend: str = "gloo") -> None:
    """A rank with a default group of torch's own, over the store at `address`."""
    become(rank, size)
    host, port = address.rsplit(":", 1)
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def live(rank: int, size: int, store: str, group_timeout: timedelta = TIMEOUT, **options: Any) -> Groups:
    """A live rank of generation 0 with its default group."""
    become(rank, size)
    groups = Groups(**options)
    patches.install(groups)
    groups.start(0, store)
    dist.init_process_group("gloo", timeout=group_timeout)
    return groups


def ramp(rank: int, *shape: int) -> torch.Tensor:
    """Values that tell ranks and positions apart."""
    count = int(torch.tensor(shape).prod())
    return torch.arange(count, dtype=torch.float32).view(*shape) + 100 * rank


def battery(group: Any = None, *names: str) -> dict[str, Any]:
    """Every collective (or those named), on `group`; name -> this rank's result as lists."""
    return {name: _plain(COLLECTIVES[name](group)) for name in names or COLLECTIVES}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _facts(group: Any) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)


def _global(group: Any, rank: int) -> int:
    return dist.get_process_group_ranks(group)[rank]


COLLECTIVES: dict[str, Callable[[Any], Any]] = {}


def _collective(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    COLLECTIVES[function.__name__] = function
    return function


@_collective
def all_reduce(group: Any) -> Any:
    rank, _ = _facts(group)
    tensor = ramp(rank, 5)
    dist.all_reduce(tensor, group=group)
    maximum = ramp(rank, 3)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    half = ramp(rank, 4).bfloat16()
    dist.all_reduce(half, group=group)
    return tensor, maximum, half.float()


@_collective
def all_reduce_async(group: Any) -> Any:
    tensor = ramp(_facts(group)[0], 5)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    again = ramp(_facts(group)[0], 4)
    work = dist.all_reduce(again, group=group, async_op=True)
    while not work.is_completed():
        pass
    work.wait(timedelta(seconds=60))
    return tensor, again


@_collective
def future(group: Any) -> Any:
    tensor = ramp(_facts(group)[0], 5)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().wait()


@_collective
def broadcast(group: Any) -> Any:
    tensor = ramp(_facts(group)[0], 2, 3)
    dist.broadcast(tensor, _global(group, 1), group=group)
    return tensor


@_collective
def reduce(group: Any) -> Any:
    rank, _ = _facts(group)
    tensor = ramp(rank, 4)
    dist.reduce(tensor, _global(group, 0), group=group)
    return tensor if rank == 0 else None


@_collective
def all_gather(group: Any) -> Any:
    rank, size = _facts(group)
    pieces = [torch.empty(3) for _ in range(size)]
    dist.all_gather(pieces, ramp(rank, 3), group=group)
    whole = torch.empty(size * 3)
    dist.all_gather_into_tensor(whole, ramp(rank, 3), group=group)
    return pieces, whole


@_collective
def gather_scatter(group: Any) -> Any:
    rank, size = _facts(group)
    pieces = [torch.empty(3) for _ in range(size)] if rank == 0 else None
    dist.gather(ramp(rank, 3), pieces, dst=_global(group, 0), group=group)
    mine = torch.empty(2)
    dist.scatter(
        mine, [ramp(index, 2) for index in range(size)] if rank == 0 else None, src=_global(group, 0), group=group
    )
    return pieces, mine


@_collective
def reduce_scatter(group: Any) -> Any:
    rank, size = _facts(group)
    whole = torch.empty(3)
    dist.reduce_scatter_tensor(whole, ramp(rank, size * 3), group=group)
    listed = torch.empty(2)
    dist.reduce_scatter(listed, [ramp(rank + index, 2) for index in range(size)], group=group)
    return whole, listed


@_collective
def all_to_all(group: Any) -> Any:
    rank, size = _facts(group)
    even = torch.empty(size * 2)
    dist.all_to_all_single(even, ramp(rank, size * 2), group=group)
    sizes = [index + 1 for index in range(size)]
    uneven = torch.empty(size * (rank + 1))
    dist.all_to_all_single(uneven, ramp(rank, sum(sizes)), [rank + 1] * size, sizes, group=group)
    return even, uneven


@_collective
def point_to_point(group: Any) -> Any:
    rank, size = _facts(group)
    received, anyone = torch.empty(3), torch.empty(2)
    following, previous = _global(group, (rank + 1) % size), _global(group, (rank - 1) % size)
    sent = dist.isend(ramp(rank, 3), following, group=group)
    work = dist.irecv(received, previous, group=group)
    present(work).wait()
    present(sent).wait()
    if rank == 0:
        source = dist.recv(anyone, group=group, tag=7)
        return received, anyone, source
    if rank == 1:
        dist.send(ramp(rank, 2), _global(group, 0), group=group, tag=7)
    return (received,)


@_collective
def batch(group: Any) -> Any:
    rank, size = _facts(group)
    received = torch.empty(3)
    operations = [
        dist.P2POp(dist.irecv, received, _global(group, (rank - 1) % size), group),
        dist.P2POp(dist.isend, ramp(rank, 3), _global(group, (rank + 1) % size), group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


@_collective
def coalesced(group: Any) -> Any:
    rank, size = _facts(group)
    group = group or dist.group.WORLD
    sums = [ramp(rank, 3), ramp(rank, 2)]
    with _coalescing_manager(group, async_ops=True) as manager:
        for tensor in sums:
            dist.all_reduce(tensor, group=group, async_op=True)
    manager.wait()
    scattered = [torch.empty(2), torch.empty(1)]
    with _coalescing_manager(group, async_ops=True) as manager:
        for tensor in scattered:
            dist.reduce_scatter_tensor(tensor, ramp(rank, size * tensor.numel()), group=group, async_op=True)
    manager.wait()
    gathered = [torch.empty(size * 2), torch.empty(size)]
    with _coalescing_manager(group):
        for tensor in gathered:
            dist.all_gather_into_tensor(tensor, ramp(rank, tensor.numel() // size), group=group)
    return sums, scattered, gathered


@_collective
def barriers(group: Any) -> Any:
    dist.barrier(group=group)
    dist.monitored_barrier(group=group, timeout=timedelta(seconds=60))
    dist.barrier(group=group, async_op=True).wait()


@_collective
def objects(group: Any) -> Any:
    rank, size = _facts(group)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (10 + rank)}, group=group)
    listed: list[Any] = [("from", rank), rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(listed, src=_global(group, 0), group=group)
    collected = [None] * size if rank == 0 else None
    dist.gather_object(rank, collected, dst=_global(group, 0), group=group)
    mine: list[Any] = [None]
    dist.scatter_object_list(
        mine, [f"for {index}" for index in range(size)] if rank == 0 else None, src=_global(group, 0), group=group
    )
    return gathered, [list(listed[0]), listed[1]], collected, mine
