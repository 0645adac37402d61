"""The stand-in for NCCL: operations beside plain arithmetic and gloo; the rules of streams, splits and groups."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch
from support import nccl_api as nccl
from support.comm import COLLECTIVES, battery, plain
from support.forked import Cell, Fleet
from support.zygote import in_zygote

from deadpool_plugin.comm.groups import host_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not nccl.is_stand_in(), reason="the stand-in for NCCL is not preloaded (scripts/test_cuda.sh)"),
]
NOT_OF_NCCL = {"barriers", "point_to_point"}  # parts of them NCCL does not know
COUNTS = (0, 1, 1000, 300_001)  # the last one is several chunks of the ring


# ---- results


def _input(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.rand(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 8 + 1
    return values.to(dtype)


def _total(inputs: list[torch.Tensor], op: int) -> torch.Tensor:
    """The reduction in the order of ranks, rounded at each step."""
    ranks, dtype = len(inputs), inputs[0].dtype
    if op == nccl.AVG and dtype.is_floating_point:
        inputs = [values * torch.full_like(values, 1 / ranks) for values in inputs]
    joined = {nccl.PROD: torch.mul, nccl.MAX: torch.maximum, nccl.MIN: torch.minimum}.get(op, torch.add)
    total = inputs[0].clone()
    for values in inputs[1:]:
        total = joined(total, values)
    if op == nccl.AVG and not dtype.is_floating_point:
        total = torch.div(total, ranks, rounding_mode="trunc")
    return total


def _reductions(communicator: nccl.Communicator, rank: int, ranks: int) -> int:
    checks = 0

    def expect(found: torch.Tensor, expected: torch.Tensor) -> None:
        nonlocal checks
        communicator.stream.synchronize()
        assert torch.equal(found.cpu(), expected)
        checks += 1

    for dtype, code in nccl.TYPES.items():
        for count in COUNTS:
            inputs = [_input(r, count, dtype) for r in range(ranks)]
            mine = inputs[rank].cuda()
            wide = torch.cat(inputs[rank:] + inputs[:rank])  # ranks * count values, other ones on each rank
            segment = [(inputs[r:] + inputs[:r])[rank] for r in range(ranks)]
            n = ctypes.c_size_t(count)
            for op in range(5):
                result = mine.clone()
                assert communicator.all_reduce(result, op) == nccl.SUCCESS
                expect(result, _total(inputs, op))
                scattered = torch.zeros_like(mine)
                communicator.issue("ncclReduceScatter", wide.cuda(), scattered, n, code, op)
                expect(scattered, _total(segment, op))
                for root in range(ranks):
                    reduced = torch.zeros_like(mine)
                    communicator.issue("ncclReduce", mine, reduced, n, code, op, root)
                    expect(reduced, _total(inputs, op) if rank == root else torch.zeros_like(inputs[0]))
            for on_device in (True, False):
                factor = torch.tensor([3], dtype=dtype, device="cuda" if on_device else "cpu")
                op = communicator.premultiplier(factor, on_device)
                result = mine.clone()
                assert communicator.all_reduce(result, op) == nccl.SUCCESS
                nccl.checked("ncclRedOpDestroy", op, communicator.handle)
                expect(result, _total([values * torch.full_like(values, 3) for values in inputs], nccl.SUM))
    return checks


@in_zygote
def test_every_reduction_of_every_type_adds_up_in_the_order_of_ranks() -> None:
    assert nccl.together(_reductions, 3) == [len(nccl.TYPES) * len(COUNTS) * (5 * (2 + 3) + 2)] * 3


def _copies(communicator: nccl.Communicator, rank: int, ranks: int) -> None:
    def expect(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        communicator.stream.synchronize()
        assert torch.equal(found.cpu(), expected), name

    for count in COUNTS:
        inputs = [_input(r, count, torch.float32) for r in range(ranks)]
        mine, n, code = inputs[rank].cuda(), ctypes.c_size_t(count), nccl.TYPES[torch.float32]
        everything, nothing = torch.cat(inputs), torch.zeros(ranks * count)
        gathered = nothing.cuda()
        communicator.issue("ncclAllGather", mine, gathered, n, code)
        expect("all_gather", gathered, everything)
        in_place = nothing.cuda()
        in_place[rank * count : (rank + 1) * count] = mine
        torch.cuda.synchronize()
        communicator.issue("ncclAllGather", in_place[rank * count :], in_place, n, code)
        expect("all_gather in place", in_place, everything)
        exchanged = nothing.cuda()
        communicator.issue("ncclAlltoAll", torch.cat([mine + 100 * r for r in range(ranks)]), exchanged, n, code)
        expect("all_to_all", exchanged, torch.cat([values + 100 * rank for values in inputs]))
        for root in range(ranks):
            copied = torch.zeros_like(mine)
            communicator.issue("ncclBroadcast", mine, copied, n, code, root)
            expect("broadcast", copied, inputs[root])
            collected = nothing.cuda()
            communicator.issue("ncclGather", mine, collected, n, code, root)
            expect("gather", collected, everything if rank == root else nothing)
            dealt = torch.zeros_like(mine)
            communicator.issue("ncclScatter", everything.cuda(), dealt, n, code, root)
            expect("scatter", dealt, inputs[rank])


@in_zygote
def test_every_copy_arrives() -> None:
    nccl.together(_copies, 3)


def _torch_surface(rank: int, ranks: int, backend: str, newer: str, address: Cell) -> Any:
    os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", TORCH_DIST_USE_NCCL2=newer)
    if rank == 0:
        keep, text = host_store("127.0.0.1")
        address.set(text)
    plain(rank, ranks, address.get(), backend)
    if "nccl" in backend:
        torch.cuda.set_device(0)
        torch.set_default_device("cuda")
    return battery(None, *(name for name in COLLECTIVES if name not in NOT_OF_NCCL))


@in_zygote
def test_torch_gives_over_nccl_what_it_gives_over_gloo() -> None:
    """Both of torch 2.15's groups over NCCL: the one that it makes itself, and the one that the plugin does."""
    results = []
    for backend, newer in (("gloo", "1"), ("cpu:gloo,cuda:nccl", "1"), ("cpu:gloo,cuda:nccl", "0")):
        with Fleet(nccl.DEADLINE_S) as fleet:
            address = Cell(4096)
            ranks = [fleet.fork(_torch_surface, rank, 3, backend, newer, address) for rank in range(3)]
            results.append(fleet.values(ranks))
    assert results[0] == results[1] == results[2]


def _opposite_orders(communicator: nccl.Communicator, rank: int, ranks: int, second: Cell) -> Any:
    """Two communicators on streams of their own: issued in opposite orders, neither holds the other up."""
    other = nccl.join(second, rank, ranks)
    both = [communicator, other] if rank == 0 else [other, communicator]
    values = [torch.full((1 << 20,), float(rank + 1), device="cuda") for _ in both]
    connect = [torch.ones(1, device="cuda") for _ in both]
    for one, value in zip((communicator, other), connect, strict=True):  # connecting is done in the same order
        assert one.all_reduce(value) == nccl.SUCCESS
    torch.cuda.synchronize()
    for one, value in zip(both, values, strict=True):
        assert one.all_reduce(value) == nccl.SUCCESS
    torch.cuda.synchronize()
    return [value.unique().tolist() for value in values]


@in_zygote
def test_two_communicators_at_once() -> None:
    assert nccl.together(_opposite_orders, 2, Cell(4096)) == [[[3.0], [3.0]]] * 2


def _many_streams(communicator: nccl.Communicator, rank: int, ranks: int) -> Any:
    """Each rank issues on its own streams in turn; kernels keep the order of their launches."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    values = [torch.full((5,), float(step), device="cuda") for step in range(30)]
    torch.cuda.synchronize()
    for step, value in enumerate(values):
        communicator.stream = streams[(step * (rank + 1)) % 3]
        assert communicator.all_reduce(value) == nccl.SUCCESS
    torch.cuda.synchronize()
    return [value[0].item() for value in values]


@in_zygote
def test_kernels_run_in_the_order_of_their_launches_whatever_their_streams() -> None:
    assert nccl.together(_many_streams) == [[2.0 * step for step in range(30)]] * 2


def _splits(parent: nccl.Communicator, rank: int, ranks: int) -> Any:
    """Ranks 0 and 2 in reversed order; rank 1 in none, rank 3 alone."""
    color, handle = {0: 7, 1: nccl.NO_COLOR, 2: 7, 3: 8}[rank], ctypes.c_void_p()
    nccl.checked("ncclCommSplit", parent.handle, color, -rank, ctypes.byref(handle), None)
    if color == nccl.NO_COLOR:
        return handle.value
    child, own = nccl.Communicator(handle), ctypes.c_int()
    nccl.checked("ncclCommUserRank", handle, ctypes.byref(own))
    value = torch.full((1,), float(rank), device="cuda")
    assert child.all_reduce(value) == nccl.SUCCESS
    child.stream.synchronize()
    nccl.checked("ncclCommDestroy", handle)
    nccl.checked("ncclCommDestroy", parent.handle)
    return own.value, value.item(), nccl.count("communicators")


@in_zygote
def test_a_split_orders_by_key_and_leaves_out_who_has_no_color() -> None:
    assert nccl.together(_splits, 4) == [(1, 2.0, 0), None, (0, 2.0, 0), (0, 3.0, 0)]


# ---- groups


def _pairs_in_a_group(communicator: nccl.Communicator, rank: int, ranks: int) -> Any:
    """Sends before receives on both sides, more than any buffer holds: only as a group can they end."""
    sent, received = torch.full((1 << 23,), float(rank), device="cuda"), torch.empty(1 << 23, device="cuda")
    before = nccl.count("connections")
    inside, end = nccl.group(
        lambda: communicator.send(sent, 1 - rank), lambda: communicator.receive(received, 1 - rank)
    )
    communicator.stream.synchronize()
    return inside, end, received.unique().tolist(), nccl.count("connections") - before


@in_zygote
def test_sends_and_receives_of_a_group_run_at_once() -> None:
    zero, one = nccl.together(_pairs_in_a_group)
    assert zero == ([0, 0], 0, [1.0], 1)
    assert one == ([0, 0], 0, [0.0], 1)


def _failed_group(communicator: nccl.Communicator, rank: int, ranks: int) -> None:
    value = torch.ones(4, device="cuda")
    launches = nccl.count("launches")
    inside, end = nccl.group(
        lambda: communicator.all_reduce(value),
        lambda: communicator.send(value, 99),
        lambda: communicator.all_reduce(value),
    )
    assert (inside, end) == ([nccl.SUCCESS, nccl.INVALID_ARGUMENT, nccl.SUCCESS], nccl.INVALID_ARGUMENT)
    assert nccl.count("launches") == launches
    nested = nccl.group(lambda: nccl.group(lambda: communicator.all_reduce(value))[1])
    assert nested == ([nccl.SUCCESS], nccl.SUCCESS)  # the error was the former group's
    communicator.stream.synchronize()
    assert value.tolist() == [2.0] * 4
    assert nccl.call("ncclGroupEnd") == nccl.INVALID_USAGE


@in_zygote
def test_an_error_in_a_group_is_what_its_end_gives_and_nothing_is_launched() -> None:
    nccl.together(_failed_group)


def _init_in_an_open_group(communicator: nccl.Communicator, rank: int, ranks: int, second: Cell) -> None:
    if rank == 0:
        second.set(nccl.unique_id())
    identity, value = second.get(), torch.ones(1, device="cuda")
    nccl.checked("ncclGroupStart")
    result, other = nccl.init(identity, ranks, rank)
    assert result == nccl.SUCCESS and other.handle.value
    assert other.all_reduce(value) == nccl.INVALID_ARGUMENT  # not connected before the end of the group
    assert nccl.call("ncclGroupEnd") == nccl.INVALID_ARGUMENT
    assert other.all_reduce(value) == nccl.INVALID_ARGUMENT  # nor after an end that failed
    assert nccl.count("communicators") == 1
    assert communicator.all_reduce(value) == nccl.SUCCESS


@in_zygote
def test_an_init_inside_a_group_waits_for_its_end() -> None:
    nccl.together(_init_in_an_open_group, 2, Cell(4096))


def _aborts_in_a_group(communicator: nccl.Communicator, rank: int, ranks: int, second: Cell) -> Any:
    """Kernels of both on one stream: an abort of one alone would wait for the other's."""
    other = nccl.join(second, rank, ranks)
    other.stream = communicator.stream
    value = torch.ones(1, device="cuda")
    for one in (communicator, other):
        assert one.all_reduce(value) == nccl.SUCCESS
    communicator.stream.synchronize()
    if rank == 0:  # the other rank does not take part
        for one in (communicator, other):
            assert one.all_reduce(value) == nccl.SUCCESS
        assert not communicator.stream.query()
    inside, end = nccl.group(other.abort, communicator.abort)
    communicator.stream.synchronize()
    return inside, end, nccl.count("communicators")


@in_zygote
def test_aborts_in_a_group_end_kernels_that_wait_for_each_other() -> None:
    assert nccl.together(_aborts_in_a_group, 2, Cell(4096)) == [([0, 0], 0, 0)] * 2
