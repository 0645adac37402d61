"""The single objects of one worker process, and the switch that decides where a call goes."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ..comm import patches
from ..comm.collective import Operation
from ..comm.groups import Groups, host_store
from ..comm.handle import Handle
from ..core import local
from ..errors import Divergence, Unsupported, present
from . import saving
from .adapter import Adapter
from .calls import RUNS_MODEL, Call, CallKind
from .copies import Inputs
from .iterators import POINTER, RewoundByItself
from .link import AgentLink, give_up
from .patching import Function
from .resumable import Tapes

STORES_KEPT = 3  # that on offer, of this generation and of the one before (each costs descriptors and a thread)


class Mode(Protocol):
    """A way to serve calls: before the first one, live, or following. `inside`: whether one is being executed."""

    @property
    def inside(self) -> bool: ...
    def call(self, call: Call) -> Any: ...
    def collective(self, handle: Handle, operation: Operation) -> Any: ...
    def finish(self) -> int: ...


class Context:
    """The runtime of a process's groups; it carries out its agent's orders. `mode` goes from start-up to training."""

    mode: Mode
    installed: ClassVar[Context | None] = None  # for functions under `@deadpool_plugin.step`

    def __init__(self, link: AgentLink, groups: Groups, adapters: Sequence[Adapter], *, local_rank: int) -> None:
        self.link, self.groups, self._adapters = link, groups, adapters
        self._adapter: Adapter | None = None
        self.saves = saving.Saves(link, groups, lambda call: self.mode.call(call))
        self.tapes = Tapes()
        self.difference: Divergence | None = None  # from the rank that this process follows, in the data it has read
        self._offers_stores = local_rank == 0
        self._stores: list[Any] = []
        self._exit_code: int | None = None

    def install(self) -> None:
        """Put ourselves between the script and torch.distributed, and (at its initialisation) the framework."""
        self.groups.runtime = Context.installed = self
        patches.install(self.groups)
        saving.install(self.saves)
        self.tapes.install(lambda: self.mode.inside)
        original = dist.init_process_group

        def init_process_group(*args: Any, **kwargs: Any) -> None:  # no wraps: by its signature DeepSpeed gives more
            from . import dcp  # torch imports a good deal for it

            for adapter in available(self._adapters):
                adapter.install(functools.partial(self._call, adapter), self.saves)
            dcp.install(self.saves)
            original(*args, **kwargs)

        dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group

    # ---- calls

    @property
    def adapter(self) -> Adapter:
        """Return the one whose framework made the first forward call."""
        return present(self._adapter, "nobody knows before the first forward which framework trains")

    def _call(self, adapter: Adapter, call: Call) -> Any:
        if self._adapter is None and call.kind in RUNS_MODEL:
            self._adapter = adapter
        return self.mode.call(call)

    def step(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function under `@deadpool_plugin.step`. Raises: Unsupported if there is nothing yet to train."""
        adapter = next((adapter for adapter in self._adapters if adapter.is_used()), None)
        if adapter is None:
            raise Unsupported(
                f"{function.__qualname__}, which is under @deadpool_plugin.step, was called with nothing to train",
                "a DeepSpeed engine or a Megatron-core optimizer, imported before init_process_group",
                "build it before the first step",
            )
        return self._call(adapter, WholeStep(adapter, function, args, kwargs))

    def finish(self) -> int:
        """Serve swaps until every rank's script is done with its groups, as this one is. Returns the exit code."""
        if self._exit_code is None:  # else `destroy_process_group` came before the end of the script
            self._exit_code = self.mode.finish()
        return self._exit_code

    # ---- the runtime of the groups

    def collective(self, handle: Handle, operation: Operation) -> Any:
        flight = saving.own_flight.get()
        if flight is None:
            return self.mode.collective(handle, operation)
        flight.check()
        return self.groups.issue(handle, operation)

    def before_destroy(self) -> None:
        error = sys.exc_info()[1]
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.finish()  # else the script is failing: it must not wait for the others to end well

    def connection_broke(self, generation: int, peers: tuple[int, ...], reason: str) -> bool:
        """Its agent answers with a new generation, or ends this process."""
        self.link.send(local.ConnectionBroke(int(os.environ["RANK"]), generation, peers, reason))
        return True

    give_up = staticmethod(give_up)

    # ---- orders of the agent, on the link's thread

    def abort(self, generation: int) -> None:
        self.groups.interrupt(generation)
        self.saves.abort(generation)

    def offer_store(self) -> None:
        """Host a fresh store for the next group build. Thread: the main one at its start and first call, too."""
        if self._offers_stores:
            server, address = host_store()
            self._stores = [*self._stores, server][-STORES_KEPT:]  # somebody's groups may still talk to the older ones
            self.link.send(local.StoreOffer(address))


def available(adapters: Sequence[Adapter]) -> list[Adapter]:
    """List those whose framework is imported, else the first that is installed. Raises: Unsupported without one."""
    if imported := [adapter for adapter in adapters if adapter.framework in sys.modules]:
        return imported
    for adapter in adapters:
        with contextlib.suppress(ImportError):  # not even the package it would be in is installed
            if importlib.util.find_spec(adapter.framework) is not None:
                return [adapter]
    raise Unsupported(
        "no training framework that deadpool_plugin knows is installed",
        " or ".join(adapter.framework for adapter in adapters),
        "install it on every host, or run this script without the plugin",
    )


class WholeStep(Call):
    """A script's own step function under `@deadpool_plugin.step`, as one call: kept, redone and followed as a whole."""

    def __init__(self, adapter: Adapter, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(f"step {function.__qualname__}", CallKind.STEP, function)
        self._adapter, self._inputs = adapter, Inputs(args, kwargs, self.name)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not isinstance(leaf, torch.nn.Parameter):
                raise Unsupported(
                    f"{self.name} was given a tensor of {list(leaf.shape)} that requires grad",
                    "data: a graph that begins outside the function cannot be redone",
                    "do everything that leads to the loss inside it",
                )
            # what gives something else each time it is asked, and nobody rewinds; files are written to
            if hasattr(type(leaf), "__next__") and not isinstance(leaf, (RewoundByItself, io.IOBase)):
                raise Unsupported(
                    f"{self.name} was given a {type(leaf).__name__} to read data from, which a redo would read on",
                    "the data themselves, or a resumable loader",
                    POINTER,
                )

    def __call__(self) -> Any:
        args, kwargs = self._inputs.take()
        with self._adapter.inside_step():  # what the framework is asked in it is no call, but for the update
            return self.function(*args, **kwargs)

    def check(self) -> None:
        self._inputs.check()

    def outcome(self, value: Any) -> Any:
        return [value, self._adapter.state.visible()]

    told = outcome

    def skipped(self, outcome: Any) -> Any:
        value, visible = outcome
        self._adapter.state.show(visible)
        return value

    def loss(self, value: Any, on_host: Callable[[Any], Any]) -> float | None:
        """Find the loss in the function's result: a number, the first, or the one so called."""
        value = on_host(value)
        if isinstance(value, dict):
            value = value.get("loss")
        elif isinstance(value, (list, tuple)):
            value = next(iter(value), None)
        is_number = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))
        return float(value) if is_number else None
