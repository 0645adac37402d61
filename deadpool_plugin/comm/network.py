"""All communicators of one generation: the store client, one fabric per backend, and the inner groups they make.

Rules of this file: one object per generation, never reused. `unblock` may come from any thread, once the
generation is over; the object is kept afterwards as long as an operation of it is stuck.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Backend, PrefixStore, Store

from . import store as stores
from .collective import HandleWork, Operation
from .generations import Generations
from .gloo import GlooFabric
from .handle import Handle
from .nccl import NcclFabric


class Fabric(Protocol):
    """One backend's communicators of one generation, and the seam between handles and a communication library.

    Built on the main thread (or a thread it waits for); unblocked once, after the generation is over.
    """

    def build(self, handle: Handle, store: Store) -> Backend:
        """Connect to the group's other members. Blocks: until they do the same."""

    def begin(self, handle: Handle, operation: Operation) -> HandleWork:
        """Issue `operation` on the group behind `handle`.

        Raises: RuntimeError if it cannot be issued; nothing of it is open in this thread then. GenerationChanged.
        """

    def unblock(self) -> None:
        """End whatever is in flight, with errors. Thread: any."""

    def ranks_named(self, text: str) -> tuple[int, ...]:
        """To which ranks the connection may have led that the library names in an error."""

    def quiesce(self, stop: Callable[[], bool]) -> bool:
        """Wait, after `unblock`, until nothing that was in flight can write any more; False if `stop()` first."""


class Network:
    """Connected to the store of `generation` as global rank `rank`. Blocks: until the store answers."""

    def __init__(self, generation: int, address: str, rank: int, generations: Generations) -> None:
        self.store: Store = PrefixStore(str(generation), stores.connect(address))
        self._rank, self._generations = rank, generations
        self._fabrics: dict[str, Fabric] = {}

    def gather(self, size: int) -> None:
        """Wait for all `size` ranks of the generation. Called once by each.

        A newcomer may have a long way through past steps; groups wait no longer than their time-outs for each other.
        Who does not come at all is missed by the protocol, which then begins another generation.
        """
        if self.store.add("gathered", 1) == size:
            self.store.set("everybody", "")
        self.store.wait(["everybody"])

    def build(self, handle: Handle) -> dist.ProcessGroup:
        """Build a fresh inner group for `handle`. Blocks: until all its members do."""
        store = PrefixStore(handle.key, self.store)
        group = dist.ProcessGroup(store, handle.rank(), handle.size())
        types = {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}
        group._set_default_backend(types[handle.default_backend])
        for name in dict.fromkeys(handle.backends.values()):
            backend = self.fabric(name).build(handle, PrefixStore(name, store))
            for device in (device for device, its in handle.backends.items() if its == name):
                group._register_backend(torch.device(device), types[name], backend)
        group._set_group_name(handle.group_name)
        group._set_group_desc(handle.group_desc)
        if os.environ.get("TORCH_DIST_NAN_CHECK") == "1" and hasattr(c10d, "NanCheckHook"):  # from torch 2.15 on
            c10d.NanCheckHook.attach(group)  # torch has attached it to the handle, whose C++ side moves no data
        return group

    def fabric(self, name: str) -> Fabric:
        """The fabric of backend `name`, made when first needed."""
        if name not in self._fabrics:
            generations = self._generations
            of_gloo = name == "gloo"
            self._fabrics[name] = (
                GlooFabric(self.store, self._rank, generations) if of_gloo else NcclFabric(generations)
            )
        return self._fabrics[name]

    def ranks_named(self, text: str) -> tuple[int, ...]:
        """To whom the connection may have led that an error's `text` names."""
        return tuple(rank for fabric in list(self._fabrics.values()) for rank in fabric.ranks_named(text))

    def unblock(self) -> None:
        """End everything in flight in this generation. Thread: any."""
        for fabric in list(self._fabrics.values()):
            fabric.unblock()

    def quiesce(self, stop: Callable[[], bool]) -> bool:
        """Wait, after `unblock`, until nothing that was in flight can write any more; False if `stop()` first."""
        return all(fabric.quiesce(stop) for fabric in list(self._fabrics.values()))
