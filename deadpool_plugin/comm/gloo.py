"""gloo: one device, so one listener and one event loop, for all groups of a generation; unblocked by cutting sockets.

Rules of this file, found the hard way: abort() and shutdown() do not wake a blocked gloo operation, shutdown(2) on
its connected sockets does. Never touch a listener (gloo throws in its loop thread: SIGABRT) and never a store's
sockets. A socket is ours if our device has accepted it: its local address is the listener's. It is ours, too, if it
leads to the listener of a peer of the same generation; peers exchange those through the store. The device is kept, so
its port cannot be given to the next generation while anybody might still cut by it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch._C._distributed_c10d import Backend, HashStore, ProcessGroupGloo, Store

from ..errors import GenerationChanged, invariant
from ..transport import linux
from ..transport.sockets import Address
from .collective import BATCH, BLOCKING, OPERATIONS, POINT_TO_POINT, CompletedWork, HandleWork, Operation, outputs
from .generations import Generations
from .handle import Handle
from .store import listening
from .waits import ABANDON_S, BatchWork, HelperWork, SlicedWork, in_helper

COMPOSITE = frozenset(name for name, kind in OPERATIONS.items() if kind == "reduce_scatter")
"""Made of several operations; a timed wait for one ignores its time-out and blocks for the group's (measured)."""
THREADS = 2
"""Per group, as torch's own default."""
_UNFINISHED_MAX = 512
_RUN_LOOP = b"pt_gloo_runloop"
_TURNS_S = 0.05
"""CPU time of about a thousand turns of a loop."""
_LOOK_S = 0.001


class GlooFabric:
    """All gloo groups of one generation.

    Source: 18 groups of 8 ranks on 2 idle cores are built in 0.07 s, against 0.14 to 0.24 s with a device each. gloo's
    lazy connections and one thread per group were tried: the first hung on a shared device, the second blocks itself
    on the store's single connection.
    """

    def __init__(self, store: Store, rank: int, generations: Generations) -> None:
        self._store, self._rank, self._generations = store, rank, generations
        self._devices, self._listeners, self._loops = _create_devices()
        self._peers: dict[int, frozenset[Address]] = {}
        self._unfinished: set[SlicedWork] = set()
        store.set(f"gloo/{rank}", ";".join(f"{host},{port}" for host, port in self._listeners))

    def build(self, handle: Handle, store: Store) -> Backend:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
        options._devices, options._threads, options._timeout = self._devices, THREADS, handle.timeout
        if hasattr(options, "global_ranks_in_group"):
            options.global_ranks_in_group, options.group_name = list(handle.ranks), handle.key
        size = handle.size()
        backend = ProcessGroupGloo(store if size > 1 else HashStore(), handle.rank(), size, options)
        backend._set_sequence_number_for_group()
        self._learn(handle.ranks)
        return backend

    def _learn(self, ranks: tuple[int, ...]) -> None:
        """Look up the listeners of `ranks`. Does not block: who has built a group with us has published his."""
        unknown = [rank for rank in ranks if rank not in self._peers and rank != self._rank]
        if not unknown:
            return
        found = dict(self._peers)
        for rank, value in zip(unknown, self._store.multi_get([f"gloo/{rank}" for rank in unknown]), strict=True):
            addresses = (item.rsplit(",", 1) for item in value.decode().split(";"))
            found[rank] = frozenset((host, int(port)) for host, port in addresses)
        self._peers = found

    def begin(self, handle: Handle, operation: Operation) -> HandleWork:
        name, args, kwargs = operation
        self._generations.check()
        if name == BATCH:
            return BatchWork([self.begin(handle, part) for part in args[0]], outputs(*operation))
        method = getattr(handle.inner, name)
        if name in BLOCKING:
            try:
                in_helper(lambda: method(*args, **kwargs), self._generations, self._generations.current, ABANDON_S)
            except GenerationChanged:
                handle.abandoned = True
                raise
            return CompletedWork()
        inner = method(*args, **kwargs)
        if name in POINT_TO_POINT or name in COMPOSITE:
            return HelperWork(inner, handle, self._generations, operation)
        if len(self._unfinished) > _UNFINISHED_MAX:
            for work in [work for work in list(self._unfinished) if work.at_rest()]:
                self._unfinished.discard(work)
        return SlicedWork(inner, handle, self._generations, operation, self._unfinished)

    def unblock(self) -> None:
        ours, theirs = set(self._listeners), set[Address]().union(*self._peers.values())
        for name in os.listdir("/proc/self/fd"):
            connection = _duplicate(int(name))
            if connection is None:
                continue
            with connection, contextlib.suppress(OSError):  # a listener, or not connected (any more)
                local, peer = _normal(connection.getsockname()), _normal(connection.getpeername())
                if local in ours or peer in theirs:
                    connection.shutdown(socket.SHUT_RDWR)

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

    def quiesce(self, stop: Callable[[], bool]) -> bool:
        """Wait until nothing that was cut can write into a tensor any more, however late its threads get a CPU.

        What can still write are gloo's event loops, which read what has arrived, and torch's threads, which wait for
        them and reduce. A cut wakes the loops; each sleeps again once it has found its connections ended, and so does a
        thread it has woken, once that has reduced. Each must be seen asleep twice, loops first: the first time it may
        only wait for a lock. A thread that has ended is at rest.

        Source: proc_pid_stat(5); gloo, transport/tcp/pair.cc (handleEvents tries its lock only).
        """
        deadline = time.monotonic() + ABANDON_S
        for work in list(self._unfinished):
            work.settle(deadline)
        self._unfinished.clear()
        reducing = {thread for thread in linux.threads() if linux.of_thread(thread, "comm").strip() == _RUN_LOOP}
        # In an operation that never ends (waits.py; gloo's race) torch's thread sleeps with such a lock in hand. The
        # loop asks for it again and again for as long as the process lives: after _TURNS_S it has done all it can.
        return all(_asleep(self._loops, _TURNS_S, stop) and _asleep(reducing, None, stop) for _ in range(2))


def _asleep(threads: Iterable[str], turns_s: float | None, stop: Callable[[], bool]) -> bool:
    """Wait until each of `threads` has been seen asleep or has run for `turns_s` (None: however long it runs)."""
    began_s = {thread: _looked_at(thread)[1] for thread in threads}
    while began_s:
        for thread, before_s in list(began_s.items()):
            runs, cpu_s = _looked_at(thread)
            if not runs or (turns_s is not None and cpu_s - before_s >= turns_s):
                del began_s[thread]
        if began_s and stop():
            return False
        time.sleep(_LOOK_S if began_s else 0.0)
    return True


def _looked_at(thread: str) -> tuple[bool, float]:
    """Find out whether it runs, or would if it got a CPU, and how long it has had one so far, in seconds."""
    fields = linux.of_thread(thread, "stat").rpartition(b")")[2].split()
    if not fields:
        return False, 0.0
    return fields[0] not in b"SZX", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _create_devices() -> tuple[list[Any], list[Address], set[str]]:
    """gloo's devices (one per GLOO_SOCKET_IFNAME interface), where they listen, the threads of their event loops."""
    names = [name.strip() for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name.strip()]
    with listening:
        before, threads = _sockets(), set(linux.threads())
        if names:
            devices = [ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in names]
        else:
            devices = [ProcessGroupGloo.create_default_device(lazy_init=False)]
        loops = set(linux.threads()) - threads
        listeners = []
        for descriptor, _ in _sockets() - before:
            if (born := _duplicate(descriptor)) is not None:
                with born:
                    if born.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        listeners.append(_normal(born.getsockname()))
    invariant(
        len(listeners) == len(devices),
        f"{len(devices)} gloo devices brought {len(listeners)} listening sockets; their sockets cannot be told apart",
    )
    return devices, listeners, loops


def _sockets() -> set[tuple[int, str]]:
    """The sockets of this process: descriptors and inodes."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found.add((int(name), target))
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


def _normal(name: Any) -> Address:
    return str(name[0]).removeprefix("::ffff:"), int(name[1])
