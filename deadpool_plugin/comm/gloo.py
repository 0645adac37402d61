"""gloo: one device, so one listener and one event loop, for all groups of a generation; unblocked by cutting sockets.

Rules of this file, found the hard way: abort() and shutdown() do not wake a blocked gloo operation, shutdown(2) on
its connected sockets does. Never touch a listener (gloo throws in its loop thread: SIGABRT) and never a store's
sockets. A socket is ours if it was accepted by our device (its local address is the listener's) or leads to the
listener of a peer of the same generation; peers' listeners are exchanged through the store. The device is kept,
so its port cannot be given to the next generation while anybody might still cut by it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend, HashStore, ProcessGroupGloo, Store

from ..errors import invariant
from ..transport import linux
from ..transport.sockets import Address
from .collective import OPERATIONS, POINT_TO_POINT, Operation
from .fabric import Aside, GroupSpec
from .rest import await_rest
from .store import listening

COMPOSITE = frozenset(name for name in OPERATIONS if "reduce_scatter" in name)
"""Made of several operations; a timed wait for one ignores its time-out and blocks for the group's (measured)."""

THREADS = 2
"""Per group, as torch's own default."""


class GlooFabric:
    """All gloo groups of one generation.

    Source: 18 groups of 8 ranks on 2 idle cores are built in 0.07 s, against 0.14 to 0.24 s with a device each. gloo's
    lazy connections and one thread per group were tried: the first hung on a shared device, the second blocks itself
    on the store's single connection.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._devices, self._listeners, self._loops = _create_devices()
        self._peers: dict[int, frozenset[Address]] = {}
        store.set(f"gloo/{rank}", ";".join(f"{host},{port}" for host, port in self._listeners))

    def build(self, spec: GroupSpec, store: Store) -> Backend:
        size = len(spec.ranks)
        backend = ProcessGroupGloo(store if size > 1 else HashStore(), spec.rank, size, self._options(spec))
        backend._set_sequence_number_for_group()
        self._learn(spec.ranks)
        return backend

    def unblock(self) -> None:
        ours, theirs = set(self._listeners), set[Address]().union(*self._peers.values())
        for descriptor in _descriptors():
            _shut(descriptor, ours, theirs)

    def ranks_named(self, text: str) -> tuple[int, ...]:
        """The peers whose address gloo's error `text` names: by their listener, else all at that host."""
        for host, port in re.findall(r"\[([0-9a-fA-F.:]+)\]:(\d+)", text):
            # gloo prints ports in network byte order (measured: 9906 for 45606)
            named = {_normal((host, number)) for number in (port, socket.htons(int(port) & 0xFFFF))}
            at = [rank for rank, listeners in self._peers.items() if named & listeners]
            at = at or [rank for rank, listeners in self._peers.items() if host in {one for one, _ in listeners}]
            if at:
                return tuple(sorted(at))
        return ()

    def begin(self, group: dist.ProcessGroup, operation: Operation, aside: Aside) -> Any:
        name, args, kwargs = operation
        return getattr(group, name)(*args, **kwargs)

    def await_rest(self, stop: Callable[[], bool]) -> bool:
        return await_rest(self._loops, stop)

    def wait_style(self, operation: str) -> str:
        return "helper" if operation in POINT_TO_POINT or operation in COMPOSITE else "slices"

    def _options(self, spec: GroupSpec) -> Any:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
        options._devices, options._threads, options._timeout = self._devices, THREADS, spec.timeout
        if hasattr(options, "global_ranks_in_group"):
            options.global_ranks_in_group, options.group_name = list(spec.ranks), spec.key
        return options

    def _learn(self, ranks: tuple[int, ...]) -> None:
        """Look up the listeners of `ranks`. Does not block: who has built a group with us has published his."""
        unknown = [rank for rank in ranks if rank not in self._peers and rank != self._rank]
        if not unknown:
            return
        found = dict(self._peers)
        for rank, value in zip(unknown, self._store.multi_get([f"gloo/{rank}" for rank in unknown]), strict=True):
            found[rank] = frozenset(_address(item) for item in value.decode().split(";"))
        self._peers = found


def _create_devices() -> tuple[list[Any], list[Address], set[str]]:
    """gloo's devices (one per GLOO_SOCKET_IFNAME interface), where they listen, the threads of their event loops."""
    names = [name.strip() for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name.strip()]
    with listening:
        before, threads = set(_sockets()), set(linux.threads())
        if names:
            devices = [ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in names]
        else:
            devices = [ProcessGroupGloo.create_default_device(lazy_init=False)]
        loops = set(linux.threads()) - threads
        born = [descriptor for descriptor, inode in _sockets() if (descriptor, inode) not in before]
        listeners = [address for address in map(_listening_address, born) if address is not None]
    invariant(
        len(listeners) == len(devices),
        f"{len(devices)} gloo devices brought {len(listeners)} listening sockets; their sockets cannot be told apart",
    )
    return devices, listeners, loops


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _sockets() -> list[tuple[int, str]]:
    found = []
    for descriptor in _descriptors():
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # closed since it was listed
            continue
        if target.startswith("socket:"):
            found.append((descriptor, target))
    return found


def _duplicate(descriptor: int) -> socket.socket | None:
    """An internet socket of our own for `descriptor`, so that its number cannot change its meaning under us."""
    try:
        copy = os.dup(descriptor)
    except OSError:  # closed since it was listed
        return None
    try:
        found = socket.socket(fileno=copy)
    except OSError:  # not a socket
        os.close(copy)
        return None
    if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
        return found
    found.close()
    return None


def _listening_address(descriptor: int) -> Address | None:
    found = _duplicate(descriptor)
    if found is None:
        return None
    with found:
        if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        return _normal(found.getsockname())


def _shut(descriptor: int, ours: set[Address], theirs: set[Address]) -> None:
    """Cut the connection behind `descriptor` if it is gloo's."""
    found = _duplicate(descriptor)
    if found is None:
        return
    with found, contextlib.suppress(OSError):  # a listener, or not connected (any more)
        local, peer = _normal(found.getsockname()), _normal(found.getpeername())
        if local in ours or peer in theirs:
            found.shutdown(socket.SHUT_RDWR)


def _normal(name: Any) -> Address:
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


def _address(text: str) -> Address:
    host, port = text.rsplit(",", 1)
    return host, int(port)
