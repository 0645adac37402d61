"""All communicators of one generation: the store client, one fabric per backend, and the inner groups they make.

Rules of this file: one object per generation, never reused. `unblock` may come from any thread, once the
generation is over; the object is kept afterwards as long as an operation of it is stuck.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store

from . import store as stores
from .fabric import Fabric, GroupSpec
from .gloo import GlooFabric
from .handle import Handle
from .nccl import NcclFabric


class Network:
    """Connected to the store of `generation` as global rank `rank`. Blocks: until the store answers."""

    def __init__(self, generation: int, address: str, rank: int) -> None:
        self.store: Store = PrefixStore(str(generation), stores.connect(address))
        self._rank = rank
        self._fabrics: dict[str, Fabric] = {}

    def gather(self, size: int) -> None:
        """Once for each rank of the generation. Blocks: until all `size` of them are here.

        A newcomer may have a long way through past steps; groups wait no longer than their time-outs for each other.
        Who does not come at all is missed by the protocol, which then begins another generation.
        """
        if self.store.add("gathered", 1) == size:
            self.store.set("everybody", "")
        self.store.wait(["everybody"])

    def build(self, handle: Handle) -> dist.ProcessGroup:
        """A fresh inner group for `handle`. Blocks: until all its members build it."""
        store = PrefixStore(handle.key, self.store)
        group = dist.ProcessGroup(store, handle.rank(), handle.size())
        names = list(dict.fromkeys(handle.backends.values()))
        group._set_default_backend(_backend_type(handle.default_backend))
        spec = GroupSpec(handle.key, handle.ranks, handle.rank(), handle.timeout, handle.options)
        for name in names:
            backend = self.fabric(name).build(spec, PrefixStore(name, store))
            for device in (device for device, its in handle.backends.items() if its == name):
                group._register_backend(torch.device(device), _backend_type(name), backend)
        group._set_group_name(handle.group_name)
        group._set_group_desc(handle.group_desc)
        if os.environ.get("TORCH_DIST_NAN_CHECK") == "1" and hasattr(c10d, "NanCheckHook"):  # from torch 2.15 on
            c10d.NanCheckHook.attach(group)  # torch has attached it to the handle, whose C++ side moves no data
        return group

    def fabric(self, name: str) -> Fabric:
        """The fabric of backend `name`, made when first needed."""
        if name not in self._fabrics:
            self._fabrics[name] = GlooFabric(self.store, self._rank) if name == "gloo" else NcclFabric()
        return self._fabrics[name]

    @property
    def has_nccl(self) -> bool:
        return "nccl" in self._fabrics

    def ranks_named(self, text: str) -> tuple[int, ...]:
        """To whom the connection may have led that an error's `text` names."""
        return tuple(rank for fabric in list(self._fabrics.values()) for rank in fabric.ranks_named(text))

    def unblock(self) -> None:
        """End everything in flight in this generation. Thread: any."""
        for fabric in list(self._fabrics.values()):
            fabric.unblock()

    def await_rest(self, stop: Callable[[], bool]) -> bool:
        """Wait, after `unblock`, until nothing that was in flight can write any more; False if `stop()` first."""
        return all(fabric.await_rest(stop) for fabric in list(self._fabrics.values()))


def _backend_type(name: str) -> dist.ProcessGroup.BackendType:
    return {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}[name]
