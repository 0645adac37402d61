"""A recorded start-up replays alone: the same results, the same handles, and a divergence that names the call."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comm import battery, become, live
from support.forked import Cell, Fleet
from support.stand_in import fake
from support.zygote import in_zygote

from deadpool_plugin.comm import patches, record
from deadpool_plugin.comm.collective import Operation
from deadpool_plugin.comm.fabric import HandleWork
from deadpool_plugin.comm.groups import Groups, host_store
from deadpool_plugin.comm.record import Recorder, Replay
from deadpool_plugin.errors import Divergence, Unsupported

LIMIT = 1 << 20


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64,
     torch.float8_e4m3fn],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)])
def test_a_tensor_survives_encoding(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 9).to(dtype)
    target = torch.zeros(shape).to(dtype)
    replayed(tensor, target, LIMIT)
    assert torch.equal(target.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_tensor_that_is_not_contiguous_survives() -> None:
    tensor, target = torch.arange(12.0).view(3, 4).t(), torch.zeros(3, 4).t()
    replayed(tensor, target, LIMIT)
    assert torch.equal(target, tensor)


def test_a_tensor_above_the_limit_is_recorded_without_values() -> None:
    assert replayed(torch.ones(5), torch.full((5,), 7.0), limit_bytes=19).tolist() == [7.0] * 5
    assert replayed(torch.ones(5), torch.full((5,), 7.0), limit_bytes=20).tolist() == [1.0] * 5


def replayed(tensor: torch.Tensor, target: torch.Tensor, limit_bytes: int = 0) -> torch.Tensor:
    """Return what a rehearsal has in `target` after an operation that gave `tensor`."""
    recorder = Recorder(limit_bytes)
    operation = Operation("broadcast", ([tensor],))
    recorder.add(fake(index=0, sequence=0), operation, HandleWork(operation))
    replay = Replay(recorder.finish([(0, 1)]))
    replay.answer(fake(index=0, sequence=0), Operation("broadcast", ([target],)))
    return target


def test_indices_are_recorded_however_small_the_limit_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A permutation of the data that one rank draws for all: who takes over would train on other data."""
    order = torch.randperm(200_000)
    assert torch.equal(replayed(order, torch.zeros_like(order)), order)
    assert replayed(torch.ones(3), torch.zeros(3)).tolist() == [0.0] * 3
    monkeypatch.setattr(record, "INDICES_BYTES_MAX", 1000)
    with pytest.raises(Divergence, match="broadcast at .* gave .int64.200000.., too large to be recorded"):
        replayed(order, torch.zeros_like(order))


def _startup(rank: int) -> Any:
    """A script's start-up: groups, every collective; above the limit objects, and a parameter, once more as bytes."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    objects: list[Any] = [None] * 4
    dist.all_gather_object(objects, [rank, "more than a page" * 1000])
    results = battery(), battery(pair), objects
    parameters = torch.full((2000,), float(rank))
    dist.broadcast(parameters, 0)
    dist.broadcast(parameters.view(torch.uint8), 0)
    dist.send(torch.ones(1), rank ^ 1) if rank % 2 else dist.recv(torch.empty(1), rank ^ 1)
    return results, parameters


def _record(rank: int, address: Cell, recording: Cell) -> Any:
    if rank == 0:
        server, text = host_store("127.0.0.1")
        address.set(text)
    groups = live(rank, 4, address.get(), recording_limit_bytes=4000)
    results, parameters = _startup(rank)
    unwaited = dist.all_reduce(torch.ones(1), async_op=True)
    recorded = groups.stop_recording()
    assert unwaited.is_completed()
    recording.set(recorded)
    dist.barrier()
    return results, len(recorded)


def _rehearse(rank: int, recording: bytes) -> Any:
    become(rank, 4)
    groups = Groups()
    patches.install(groups)
    groups.rehearse(recording)
    dist.init_process_group("gloo")
    results, parameters = _startup(rank)
    dist.all_reduce(torch.ones(1), async_op=True)
    groups.finish_rehearsal()
    assert parameters.tolist() == [float(rank)] * 2000, "what was not recorded is left untouched"
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, 4, "gloo")
    dist.destroy_process_group()
    return results


@in_zygote
def test_a_rehearsal_sees_what_the_rank_saw() -> None:
    with Fleet() as fleet:
        address, recordings = Cell(), [Cell() for _ in range(4)]
        live_ones = fleet.values([fleet.fork(_record, rank, address, recordings[rank]) for rank in range(4)])
        alone = fleet.values([fleet.fork(_rehearse, rank, recordings[rank].get()) for rank in range(4)])
    assert alone == [results for results, _ in live_ones]
    assert all(64_000 < size < 84_000 for _, size in live_ones)


def _small(rank: int, address: Cell, recording: Cell) -> None:
    if rank == 0:
        server, text = host_store("127.0.0.1")
        address.set(text)
    groups = live(rank, 2, address.get())
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=group)
    dist.broadcast(torch.ones(2), 0, group=group)
    recording.set(groups.stop_recording())
    dist.barrier()


def _diverge(how: str, recording: bytes) -> str:
    become(1, 2)
    groups = Groups()
    patches.install(groups)
    groups.rehearse(recording)
    dist.init_process_group("gloo")
    try:
        group = dist.new_group([1] if how == "other group" else [0, 1])
        if how == "other operation":
            dist.barrier(group=group)
        dist.all_reduce(torch.ones(4 if how == "other shape" else 3), group=group)
        if how == "one less":
            groups.finish_rehearsal()
        dist.broadcast(torch.ones(2), 0, group=group)
        if how == "one more":
            dist.broadcast(torch.ones(2), 0, group=group)
    except Divergence as error:
        return str(error)
    return "no divergence"


@pytest.mark.parametrize(
    "how, expected",
    [
        ("other operation", ["barrier [] as operation 0 of group 1", "allreduce [float32[3]]"]),
        ("other shape", ["allreduce [float32[4]] as operation 0 of group 1", "allreduce [float32[3]]"]),
        ("one more", ["broadcast [float32[2]] as operation 2 of group 1", "none there"]),
        ("one less", ["without 1 recorded operations", "broadcast [float32[2]]"]),
        ("other group", ["made group 1 of ranks [1]", "ranks [0, 1], as recorded"]),
    ],
)
@in_zygote
def test_a_divergence_names_the_call(how: str, expected: list[str]) -> None:
    with Fleet() as fleet:
        address, recordings = Cell(), [Cell(), Cell()]
        fleet.values([fleet.fork(_small, rank, address, recordings[rank]) for rank in range(2)])
        (message,) = fleet.values([fleet.fork(_diverge, how, recordings[1].get())])
    for part in expected:
        assert part in message, message
    assert f"{os.path.basename(__file__)}:" in message, message


def _recording_is_done(address: Cell) -> list[int]:
    server, text = host_store("127.0.0.1")
    groups = live(0, 1, text)
    groups.stop_recording()
    dist.all_reduce(torch.ones(1))
    return [handle.sequence for handle in groups.handles]


@in_zygote
def test_nothing_is_recorded_after_the_end() -> None:
    with Fleet() as fleet:
        assert fleet.values([fleet.fork(_recording_is_done, Cell())]) == [[0]]


def _asks_for(backend: str) -> str:
    _, text = host_store("127.0.0.1")
    live(0, 1, text)
    with pytest.raises(Unsupported) as refused:
        dist.new_group([0], backend=backend)
    return str(refused.value)


@in_zygote
@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_nccl_is_refused_by_name_where_torch_has_none() -> None:
    with Fleet() as fleet:
        (refused,) = fleet.values([fleet.fork(_asks_for, "nccl")])
    assert refused.startswith("a process group of backend 'nccl', which torch ") and 'name "gloo"' in refused


def _makes_a_group_late() -> list[str]:
    server, text = host_store("127.0.0.1")
    groups = live(0, 1, text)
    with groups.unrecorded():  # a save before training
        dist.barrier(group=dist.new_group([0]))
    groups.stop_recording()
    refused = []
    for begins_again in (False, True):
        if begins_again:
            again, address = host_store("127.0.0.1")
            groups.rebuild(1, address)
        try:
            dist.new_group([0])
        except Unsupported as error:
            refused.append(str(error))
    dist.barrier()
    return refused


@in_zygote
def test_a_group_that_nobody_could_rebuild_in_a_swap_is_refused_where_it_is_made() -> None:
    with Fleet() as fleet:
        (refused,) = fleet.values([fleet.fork(_makes_a_group_late)])
    assert len(refused) == 2
    for message in refused:
        assert message.startswith("a process group of ranks [0] was made after training had begun, at ")
        assert f"{os.path.basename(__file__)}:" in message and "before the first training call" in message
