"""Collectives that pair are said to, whatever may legally differ by rank; those that do not are named.

Rules of this file: every collective the frameworks call is issued over real groups by three ranks; the numbers are read
as an agent reads them, from the memory that it shares with the rank.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comm import battery, live
from support.forked import Cell, Fleet
from support.zygote import in_zygote

from deadpool_plugin.comm.collective import Operation, code_of
from deadpool_plugin.comm.groups import host_store
from deadpool_plugin.core.messages import RankCalls
from deadpool_plugin.core.signatures import differences
from deadpool_plugin.core.types import MASK
from deadpool_plugin.transport.flight_recorder import AREA_BYTES, read_calls

SIZE = 3
NAMED = {
    "": "",
    "int32": "collective 1 of rank 0 was all_reduce float32 x 1 sum, of rank 1 all_reduce int32 x 1 sum",
    "float32": "rank 0 had issued 1 collectives by step 2, rank 1 2; the newest was all_reduce float32 x 1 sum",
}
"""An operation that rank 1 calls once more than the others, and what is said of it."""


def _uneven(group: Any) -> None:
    """Call operations that only some ranks name, or name with sizes of their own."""
    rank, size = dist.get_rank(), SIZE
    dist.all_to_all_single(torch.empty(size * (rank + 1)), torch.ones(6), [rank + 1] * size, [1, 2, 3], group=group)
    dist.reduce(torch.ones(4), 1, op=dist.ReduceOp.MAX, group=group)
    dist.broadcast(torch.ones(2).view(torch.uint8) if rank else torch.ones(2), 0, group=group)


def _aside(group: Any) -> None:
    """A thread of the script's issues when it likes: here on one side of the cut, there on the other."""
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(2), group=group))
    thread.start()
    thread.join()


def _member(rank: int, stores: list[Cell], odd: str) -> Any:
    keep = []
    for cell in stores if rank == 0 else ():
        server, text = host_store("127.0.0.1")
        keep.append(server)
        cell.set(text)
    groups = live(rank, SIZE, stores[0].get())
    made = [dist.new_group(list(range(SIZE))), dist.new_group([0, 2]), dist.new_group([rank])]
    aside = dist.new_group(list(range(SIZE)))
    groups.stop_recording()
    dist.barrier()
    assert groups.cut(1) == 0, "before the first swap nothing is compared"
    area = groups.calls_area = memoryview(bytearray(AREA_BYTES))
    groups.rebuild(1, stores[1].get())
    sums = [groups.cut(0)]
    battery(made[0])
    _uneven(made[0])
    if rank == 1:
        _aside(aside)
    sums.append(groups.cut(1))
    if rank != 1:
        _aside(aside)
    if rank != 1:
        dist.all_reduce(torch.ones(3), group=made[1])
    dist.all_reduce(torch.ones(3), group=made[2])
    works = [dist.all_reduce(torch.ones(1, dtype=getattr(torch, odd)), async_op=True)] if odd and rank == 1 else []
    works.append(dist.all_reduce(torch.ones(1), async_op=True))
    works[0].wait()  # the others answer it with their next one, and nobody the last
    sums.append(groups.cut(2))
    assert read_calls(area, 2) == ()
    return sums, RankCalls(rank, read_calls(area, 1))


@pytest.mark.parametrize("odd", NAMED)
@in_zygote
def test_what_is_legal_pairs_and_what_is_not_is_named(odd: str) -> None:
    with Fleet() as fleet:
        stores = [Cell(4096), Cell(4096)]
        values = fleet.values([fleet.fork(_member, rank, stores, odd) for rank in range(SIZE)])
    sums = [sum(column) & MASK for column in zip(*(value[0] for value in values), strict=True)]
    found = differences([value[1] for value in values], {1})
    assert sums[:2] == [0, 0], "every legal collective"
    assert (sums[2] == 0) is not bool(odd)
    assert {one.what.partition(": ")[2] for one in found} == ({NAMED[odd]} if odd else set())


@pytest.mark.parametrize(
    ("name", "one", "other", "pairs"),
    [
        ("allreduce", [[torch.ones(4)]], [[torch.ones(4, dtype=torch.int32)]], False),
        ("allreduce", [[torch.ones(4)]], [[torch.ones(5)]], False),
        ("allreduce", [[torch.ones(4)]], [[torch.ones(2, 2)]], True),
        ("broadcast", [[torch.ones(4)], 0], [[torch.ones(4)], 1], False),
        ("broadcast", [[torch.ones(4)], 0], [[torch.ones(16, dtype=torch.uint8)], 0], True),
        ("gather", [[[torch.ones(4)]], [torch.ones(4)]], [[], [torch.ones(9)]], True),
        ("alltoall_base", [torch.ones(4), torch.ones(6), [], []], [torch.ones(2), torch.ones(6), [], []], True),
        ("allgather", [[[torch.ones(4), torch.ones(2)]], [torch.ones(4)]],
         [[[torch.ones(4), torch.ones(2)]], [torch.ones(2)]], True),
    ],
)  # fmt: skip
def test_what_may_differ_by_rank(name: str, one: list[Any], other: list[Any], pairs: bool) -> None:
    assert (code_of(Operation(name, tuple(one))) == code_of(Operation(name, tuple(other)))) is pairs
