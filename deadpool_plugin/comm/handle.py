"""The process group a framework holds for ever; the communicators behind it are replaced in a swap.

Rules of this file: a Handle never changes its identity, rank, size, ranks or name. Every operation of this torch's
ProcessGroup is forwarded (a missing override would fall through to C++ and fail there); tests compare the surface. No
thread is started and nothing is decided here: `Groups` does both.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from ..errors import Unsupported
from ..transport.flight_recorder import GroupRecord
from .collective import BATCH, BLOCKING, OPERATIONS, Operation


class Runtime(Protocol):
    """The process around the handles, whose worker decides what becomes of an operation; by default one without."""

    def collective(self, handle: Handle, operation: Operation) -> Any:
        """Serve one operation: issue it, log it or answer it from a record. Returns: its Work."""

    def before_destroy(self) -> None:
        """The script is about to destroy torch's groups, which still work."""
        return

    def connection_broke(self, generation: int, peers: tuple[int, ...], reason: str) -> bool:
        """A connection broke, to one of the ranks `peers`. Returns: whether another generation follows."""
        return False

    def give_up(self, reason: str) -> NoReturn:
        """End this process, which is then replaced."""
        sys.exit(reason)


class Handle(dist.ProcessGroup):
    """A process group whose inner group can be replaced.

    Args: given: what torch tells the creator of a group; index: counts this rank's groups in creation order; key: names
        the group alike on all its members; backends: by device type, with options for them.
    """

    group_name: Any = ""
    """torch's own is a property that asks a communicator."""

    def __init__(
        self, runtime: Runtime, given: Any, index: int, key: str, backends: dict[str, str], options: Any = None
    ) -> None:
        self.ranks = members(given)
        super().__init__(given.group_rank, len(self.ranks))  # type: ignore[call-arg]  # what torch's own groups call
        self._runtime, self._rank = runtime, int(given.group_rank)
        self.group_name = str(given.group_id)
        self._set_group_desc("undefined")
        self.index, self.key, self.backends, self.options = index, key, backends, options
        self.timeout: timedelta = given.timeout
        names = set(backends.values())
        self.only_backend = next(iter(names)) if len(names) == 1 else None
        self.default_backend = "nccl" if "nccl" in names else next(iter(backends.values()))
        """The device that torch takes for operations that name none (ProcessGroup.hpp, barrier)."""
        self.inner: dist.ProcessGroup | None = None
        self.abandoned = False
        self.sequence = 0  # counts operations while start-up is recorded or replayed
        self.calls: GroupRecord | None = None
        """The collectives that this rank has issued here since the newest swap."""
        self._parts: dict[int, list[Operation]] = {}
        """The state of each thread that coalesces: a save's may use the same group meanwhile."""

    # ---- operations: `_forward` makes the others

    def _start_coalescing(self, device: torch.device) -> None:
        self._parts[threading.get_ident()] = []

    def _end_coalescing(self, device: torch.device) -> Any:
        parts = self._parts.pop(threading.get_ident(), None)
        return self._runtime.collective(self, Operation(BATCH, (parts,), {})) if parts else None

    def drop_coalescing(self) -> None:
        """Forget what a batch of the caller's thread that was interrupted has collected."""
        self._parts.pop(threading.get_ident(), None)

    def backend_of(self, operation: Operation) -> str:
        """The backend that serves `operation`: that of the device of its tensors, or of its options."""
        if operation.name == BLOCKING:
            return "gloo"
        tensors = operation.tensors()
        device = tensors[0].device if tensors else getattr(operation.argument(0, "opts"), "device", None)
        return self.default_backend if device is None else self.backends[device.type]

    # ---- what torch and the frameworks ask a group

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self.ranks)

    def getBackendName(self) -> str:
        """For torch's C++ only, which would look behind a name it knows (its DDP's logger does)."""
        return "deadpool"

    def name(self) -> str:
        return ",".join(dict.fromkeys(self.backends.values()))

    _get_backend_name = name

    def _get_backend(self, device: torch.device) -> Any:
        """The communicator behind the handle; valid until the next swap. In a rehearsal, the handle itself."""
        return self if self.inner is None else self.inner._get_backend(device)

    get_backend = _get_backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self.backends]

    def getGroupName(self) -> Any:
        return self.group_name

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        if self.inner is not None:
            for device in self._device_types:
                self.inner._get_backend(device)._set_default_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Do nothing: it would end the group, which is not the framework's to end. `shutdown` likewise."""

    shutdown = _set_sequence_number_for_group = abort

    def __repr__(self) -> str:
        return f"<Handle {self.index} {self.name()} ranks {list(self.ranks)}>"


def members(given: Any) -> tuple[int, ...]:
    return tuple(given.global_ranks_in_group) or tuple(range(given.group_size))


REFUSED = (
    "get_reconfigure_handle",
    "new_window",
    "reconfigure",
    *(f"{verb}_{when}_hook" for verb in ("register", "unregister") for when in ("abort", "post", "pre")),
)
"""Methods of torch 2.15 and later that would act on the handle's C++ side, where no communicator is."""


def _refuse(name: str) -> Callable[..., Any]:
    def refused(self: Handle, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported(
            f"ProcessGroup.{name} was called on {self!r}",
            "collectives and point-to-point operations only",
            "leave the call out, or run without the plugin",
        )

    return refused


def _forward(name: str) -> Callable[..., Any]:
    def operation(self: Handle, *args: Any, **kwargs: Any) -> Any:
        if self._parts and (parts := self._parts.get(threading.get_ident())) is not None:
            parts.append(Operation(name, args, kwargs))
            return None
        return self._runtime.collective(self, Operation(name, args, kwargs))

    return operation


for _name in OPERATIONS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(Handle, _name, _forward(_name))
for _name in {*vars(dist.ProcessGroup), *vars(Backend)}:  # the latter is asked of a handle in a rehearsal
    if _name.startswith("supports_"):
        setattr(Handle, _name, property(lambda self: False))
for _name in REFUSED:
    setattr(Handle, _name, _refuse(_name))
