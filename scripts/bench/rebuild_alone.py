"""One rank of a big job, alone in its process: the plugin's own groups, over a store that counts and without peers.

The frameworks make their groups through the plugin, as in a job. Two things are not real: the store's server (all
others have already said there what they say), and communicators, which connect nobody. A communicator asks the store
what the real one asks; tests/contract/test_comm_alone.py holds it to gloo's and NCCL's own calls.

Rules of this file: one process counts for one rank, once. Nothing is timed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo, Store

from deadpool_plugin.comm import gloo, groups as groups_module, nccl, patches
from deadpool_plugin.comm.fabric import HandleWork
from deadpool_plugin.comm.groups import Groups

from .rebuild_report import Group, Layout

_ANY_LISTENER = b"127.0.0.1,1"


class CountingStore(Store):
    """A client of a store where every other rank's keys are there already. `calls` counts by method."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def set(self, key: str, value: str) -> None:
        self.calls["set"] += 1

    def get(self, key: str) -> bytes:
        self.calls["get"] += 1
        return _ANY_LISTENER

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls["multi_get"] += 1
        return [_ANY_LISTENER] * len(keys)

    def add(self, key: str, amount: int) -> int:
        self.calls["add"] += 1
        return amount

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.calls["wait"] += 1

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Nobody waits here."""


def gloo_asks(store: Store, place: int, size: int) -> None:
    """Ask `store` what gloo does while it connects a group: each member's addresses, its own too."""
    store.set(f"0/{place}", "")
    for other in (*range(place), *range(place + 1, size), place):
        store.wait([f"0/{other}"])
        store.get(f"0/{other}")


def nccl_asks(store: Store, place: int) -> None:
    """Ask `store` what ProcessGroupNCCL does for a communicator's first operation: the unique identifier."""
    if place == 0:
        store.set("0", "")
    else:
        store.get("0")


class _Alone:
    """Stand in for a class of communicators: call `asks`, connect nobody."""

    def __init__(self, kind: Any, asks: Callable[[Store, int, int], None]) -> None:
        self._kind, self._asks = kind, asks
        self.made = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def __call__(self, store: Store, place: int, size: int, options: Any) -> ProcessGroupGloo:
        self.made += 1
        if size > 1:
            self._asks(store, place, size)
        alone = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
        alone._devices, alone._threads = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)], 1
        return ProcessGroupGloo(HashStore(), 0, 1, alone)


class _NcclOptions:
    """ProcessGroupNCCL.Options, which a torch without CUDA lacks."""

    is_high_priority_stream = False


class _NcclKind:
    Options = _NcclOptions


def count(layout: Layout, make_groups: Callable[[Layout], None], rank: int) -> dict[str, Any]:
    """Make the groups of `rank` and rebuild them once. Returns every call of new_group, this rank's own groups, and
    what its part of the rebuild asked of the store."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(layout.ranks), LOCAL_RANK=str(rank % layout.node_ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", GLOO_SOCKET_IFNAME="lo")
    connected: list[CountingStore] = []
    called: list[Group] = []
    new_group = dist.new_group

    def noted(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        members = tuple(range(layout.ranks)) if ranks is None else tuple(sorted(ranks))
        backend = kwargs.get("backend") or "nccl"
        called.append(Group(str(kwargs.get("group_desc") or "undefined"), str(backend), members))
        return new_group(ranks, *args, **kwargs)

    def connect(address: str) -> CountingStore:
        connected.append(CountingStore())
        return connected[-1]

    of_gloo = _Alone(ProcessGroupGloo, gloo_asks)
    of_nccl = _Alone(_NcclKind, lambda store, place, size: None)
    with (
        mock.patch.object(groups_module, "connect_store", connect),
        mock.patch.object(gloo, "ProcessGroupGloo", of_gloo),
        mock.patch.object(dist, "ProcessGroupNCCL", of_nccl, create=True),
        mock.patch.object(dist, "is_nccl_available", lambda: True),
        mock.patch.object(nccl, "_library", lambda: None),
        mock.patch.object(dist, "new_group", noted),
    ):
        groups = Groups()
        groups.collective = lambda handle, operation: HandleWork(operation)  # type: ignore[method-assign]
        patches.install(groups)
        groups.start(0, "")
        make_groups(layout)
        groups.stop_recording()
        of_gloo.made = of_nccl.made = 0
        groups.rebuild(1, "")
    mine = [
        (Group(handle.group_desc, backend, handle.ranks))
        for handle in groups.handles
        for backend in dict.fromkeys(handle.backends.values())
    ]
    return {
        "rank": rank,
        "called": called,
        "mine": mine,
        "made": {"gloo": of_gloo.made, "nccl": of_nccl.made},
        "store": dict(connected[-1].calls),
    }


# ---- what makes groups


def megatron(layout: Layout) -> None:
    """Make groups as Megatron-LM does, with its defaults."""
    from megatron.core import parallel_state

    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(layout.tp, layout.pp)


def zero(layout: Layout) -> None:
    """Make groups as deepspeed.initialize does with ZeRO, all ranks data parallel."""
    import deepspeed
    import torch

    deepspeed.init_distributed(dist_backend="nccl", verbose=False)
    model = torch.nn.Linear(4, 4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)


def pipeline(layout: Layout) -> None:
    """Make groups as DeepSpeed's PipelineModule and engine do for stages, data and tensor ranks."""
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

    deepspeed.init_distributed(dist_backend="nccl", verbose=False)
    PipelineParallelGrid(PipeModelDataParallelTopology(layout.pp, layout.tp, layout.dp), dist.new_group())


SETUPS: dict[str, Callable[[Layout], None]] = {"megatron": megatron, "zero": zero, "pipeline": pipeline}
