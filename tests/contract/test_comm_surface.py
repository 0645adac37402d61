"""Every collective through a handle gives what plain gloo gives; the handle hides torch's group completely."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support import present
from support.comm import TIMEOUT, battery, live, plain
from support.forked import Cell, Fleet
from support.zygote import in_zygote
from torch.distributed.device_mesh import init_device_mesh

from deadpool_plugin.comm import collective, handle
from deadpool_plugin.comm.groups import host_store
from deadpool_plugin.comm.handle import Handle
from deadpool_plugin.errors import Unsupported


def _plain(rank: int, size: int, address: Cell) -> Any:
    if rank == 0:
        server, text = host_store()
        address.set(text)
    plain(rank, size, address.get())
    pair = [dist.new_group([index, index + 1]) for index in range(0, size, 2)][rank // 2]
    results = battery(), battery(pair)
    dist.barrier()
    return results


def _handles(rank: int, size: int, address: Cell) -> Any:
    if rank == 0:
        server, text = host_store("127.0.0.1")
        address.set(text)
    live(rank, size, address.get())
    pair = [dist.new_group([index, index + 1]) for index in range(0, size, 2)][rank // 2]
    results = battery(), battery(pair)
    dist.barrier()
    return results


@pytest.mark.parametrize("size", [2, 4])
@in_zygote
def test_every_collective_equals_plain_gloo(size: int) -> None:
    with Fleet() as fleet:
        results = []
        for function in (_plain, _handles):
            address = Cell()
            results.append(fleet.values([fleet.fork(function, rank, size, address) for rank in range(size)]))
    assert results[0] == results[1]


def _holders_of_raw_groups() -> list[str]:
    """Python objects, other than a handle's own attributes, that refer to a group of torch's (itself untracked)."""
    found = []
    for holder in gc.get_objects():
        if any(type(item) is dist.ProcessGroup for item in gc.get_referents(holder)):
            own = isinstance(holder, Handle) or (isinstance(holder, dict) and "_runtime" in holder)
            found += [] if own else [f"{type(holder)}: {holder}"]
    return found


def _identity(rank: int, size: int, address: Cell) -> Any:
    if rank == 0:
        server, text = host_store("127.0.0.1")
        address.set(text)
    groups = live(rank, size, address.get())
    made = [dist.new_group([0, 1]), dist.new_group([1], backend="gloo"), dist.new_group(backend="cpu:gloo")]
    default = dist.group.WORLD
    mine = [group for group in (default, *made) if group is not dist.GroupMember.NON_GROUP_MEMBER]
    world = dist.distributed_c10d._world
    tables: list[Iterable[Any]] = [
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
    ]
    held = [group for table in (*tables, *world.tags_to_pg.values()) for group in table]
    held = [group for group in held if group is not dist.GroupMember.NON_GROUP_MEMBER]
    facts: dict[str, Any] = {
        "all handles": all(isinstance(group, Handle) for group in mine + held),
        "registered": [group is handle for group, handle in zip(mine, groups.handles, strict=True)],
        "raw": _holders_of_raw_groups(),
        "resolved": [dist.distributed_c10d._resolve_process_group(group.group_name) is group for group in mine],
        "backends": [dist.get_backend(group) for group in mine],
        "timeouts": [group.timeout == TIMEOUT for group in mine],
        "ranks": [dist.get_process_group_ranks(group) for group in mine],
        "desc": [group.group_desc for group in mine],
    }
    ended = []
    groups.runtime.before_destroy = lambda: ended.append(dist.is_initialized())  # type: ignore[method-assign]
    dist.barrier()
    dist.destroy_process_group()
    facts["ended"] = ended, dist.is_initialized(), len(groups.handles), len(world.pg_map)
    return facts


@in_zygote
def test_torch_holds_nothing_but_handles() -> None:
    with Fleet() as fleet:
        address = Cell()
        zero, one = fleet.values([fleet.fork(_identity, rank, 2, address) for rank in range(2)])
    for facts, count in ((zero, 3), (one, 4)):
        assert facts["all handles"] and facts["raw"] == [], facts
        assert facts["registered"] == facts["resolved"] == facts["timeouts"] == [True] * count
        assert facts["ended"] == ([True], False, 0, 0)
        assert facts["desc"][0] == "default_pg"
    assert zero["backends"] == ["gloo", "gloo", "cpu:gloo"]
    assert zero["ranks"] == [[0, 1], [0, 1], [0, 1]] and one["ranks"] == [[0, 1], [0, 1], [1], [0, 1]]


def _other_ways(rank: int, size: int, address: Cell) -> Any:
    if rank == 0:
        server, text = host_store("127.0.0.1")
        address.set(text)
    groups = live(rank, size, address.get())
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.full((2, 3), rank + 1.0)).sum().backward()
    summed = functional.all_reduce(torch.full((2,), rank + 1.0), "sum", present(dist.group.WORLD))
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("outer", "inner"))
    local, _ = dist.new_subgroups(1)
    dist.distributed_c10d._set_pg_timeout(TIMEOUT * 2)
    dist.barrier()
    checks_nan = hasattr(dist.distributed_c10d, "NanCheckHook")
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    checked, said = dist.new_group(), "NaN" * (not checks_nan)
    try:
        dist.all_reduce(torch.full((1,), float("nan")), group=checked)
    except RuntimeError as error:
        said = str(error)
    refused = 0
    for name in handle.REFUSED:
        try:
            getattr(checked, name)()
        except Unsupported:
            refused += 1
    return {
        "nan": "NaN" in said,
        "refused": refused == len(handle.REFUSED),
        "gradient": [present(parameter.grad).tolist() for parameter in model.parameters()],
        "functional": summed.tolist(),
        "handles": isinstance(mesh.get_group("inner"), Handle) and isinstance(local, Handle),
        "timeout": groups.handles[0].timeout == TIMEOUT * 2,
    }


@in_zygote
def test_torchs_own_layers_work_on_handles() -> None:
    """DDP's C++ reducer, functional collectives, device meshes and subgroups reach the handle in their own ways."""
    with Fleet() as fleet:
        address = Cell()
        for facts in fleet.values([fleet.fork(_other_ways, rank, 2, address) for rank in range(2)]):
            assert facts["gradient"] == [[[3.0, 3.0, 3.0]], [2.0]] and facts["functional"] == [3.0, 3.0]
            assert facts["handles"] and facts["timeout"] and facts["nan"] and facts["refused"]


def test_no_data_moving_method_of_this_torch_is_missing() -> None:
    """A method that moves data and is not overridden would fall through to C++ and fail there."""
    known = {
        "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "abort", "bound_device_id", "boxed",
        "get_backend", "get_group_store", "group_desc", "group_name", "merge_remote_group", "name", "rank",
        "set_timeout", "shutdown", "size", "split_group", "supports_abort_hooks", "supports_completion_hooks",
        "supports_reconfigure", "supports_window", "unbox", "use_pg_for_symm_mem_rendezvous",
    }  # fmt: skip
    methods = {name for name in vars(dist.ProcessGroup) if not name.startswith("_")}
    assert methods - known <= {*collective.OPERATIONS, *handle.REFUSED}
    overridden = {name for name in methods if name.startswith(("get_backend", "supports_")) or name in handle.REFUSED}
    assert overridden <= set(vars(Handle))
    assert all(name in vars(Handle) for name in collective.OPERATIONS if hasattr(dist.ProcessGroup, name))
