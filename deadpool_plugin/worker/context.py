"""The single objects of one worker process, and the switch that decides where a call goes."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch.distributed as dist

from ..comm import patches
from ..comm.collective import Operation
from ..comm.groups import Groups
from ..comm.handle import Handle
from ..comm.store import host_store
from ..core import local
from ..errors import Divergence, Unsupported, present
from . import saving
from .adapter import Adapter
from .calls import WholeStep
from .functions import RUNS_MODEL, Call
from .link import AgentLink, give_up
from .resumable import Tapes

STORES_KEPT = 3
"""The one on offer, that of this generation and that of the one before (each costs descriptors and a thread)."""


class Mode(Protocol):
    """A way to serve calls: before the first one, live, or following. `inside`: whether one is being executed."""

    inside: bool

    def call(self, call: Call) -> Any: ...

    def collective(self, handle: Handle, operation: Operation) -> Any: ...

    def finish(self) -> int: ...


class Context:
    """Created once per training process; `mode` changes as the process goes from start-up to training.

    It is the runtime of the process's groups, and carries out the orders that the link passes on at once.
    """

    mode: Mode
    installed: ClassVar[Context | None] = None
    """That of this process, for functions under `@deadpool_plugin.step`."""

    def __init__(self, link: AgentLink, groups: Groups, adapters: Sequence[Adapter], *, local_rank: int) -> None:
        self.link, self.groups, self._adapters = link, groups, adapters
        self._adapter: Adapter | None = None
        self.saves = saving.Saves(link, groups, lambda call: self.mode.call(call))
        self.tapes = Tapes()
        self.difference: Divergence | None = None
        """That this process, which follows a rank, has been seen to read other data."""
        self._offers_stores = local_rank == 0
        self._stores: list[Any] = []
        self._exit_code: int | None = None
        self.on_built: Callable[[], None] = lambda: None

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
        """The one whose framework made the first forward call."""
        return present(self._adapter, "nobody knows before the first forward which framework trains")

    def _call(self, adapter: Adapter, call: Call) -> Any:
        if self._adapter is None and call.kind in RUNS_MODEL:
            self._adapter = adapter
        return self.mode.call(call)

    def step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function under `@deadpool_plugin.step`. Raises: Unsupported if there is nothing yet to train."""
        adapter = next((adapter for adapter in self._adapters if adapter.is_used()), None)
        if adapter is None:
            raise Unsupported(
                f"{function.__qualname__}, which is under @deadpool_plugin.step, was called with nothing to train",
                "a DeepSpeed engine or a Megatron-core optimizer, imported before init_process_group",
                "build it before the first step",
            )
        return self._call(adapter, WholeStep(adapter, function, args, kwargs))

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

    # ---- orders of the agent

    def abort(self, generation: int) -> None:
        """Thread: the link's."""
        self.groups.interrupt(generation)
        self.saves.abort(generation)

    def offer_store(self) -> None:
        """Host a fresh store for the next group build and tell the agent where it listens.

        The two before it live on: somebody's groups may still talk to them. Thread: the main one, once the script has
        reached its first call; the link's whenever the newest one is built upon.
        """
        if self._offers_stores:
            server, address = host_store()
            self._stores = [*self._stores, server][-STORES_KEPT:]
            self.link.send(local.StoreOffer(address))

    # ---- the end

    def finish(self) -> int:
        """Serve swaps until every rank's script is done with its groups, as this one is. Returns the exit code.

        Reached from `destroy_process_group` or the end of the script, whichever comes first.
        """
        if self._exit_code is None:
            self._exit_code = self.mode.finish()
        return self._exit_code

    def wait_for_end(self) -> int:
        """Block until the agent ends this process, whatever generation it is. Returns the exit code."""
        return self.link.wait_for_end(interruptible=False)


def available(adapters: Sequence[Adapter]) -> list[Adapter]:
    """Those whose framework the script has imported; before it has imported any, the first one that is installed.

    Raises: Unsupported if there is none.
    """
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
