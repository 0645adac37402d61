"""gloo: one device, so one listener and one event loop, for all groups of a generation; unblocked by cutting sockets.

Rules of this file, found the hard way:
- abort() and shutdown() do not wake a blocked gloo operation, shutdown(2) on its connected sockets does.
- Never touch a listener (gloo throws in its loop thread: SIGABRT) and never a store's sockets.
- A socket is ours if its local address is our device's listener, or if it leads to the listener of a peer of the same
  generation; peers exchange those through the store.
- The device is kept, so its port cannot be given to the next generation while anybody might still cut by it.
- An operation that does not end within `ABANDON_S` after an announcement is abandoned, and its group kept for ever.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend, HashStore, ProcessGroupGloo, Store

from ..errors import GenerationChanged, invariant
from ..transport import linux
from ..transport.sockets import Address
from .collective import BATCH, BLOCKING, OPERATIONS, Operation
from .fabric import Fabric, HandleWork, SwapWork
from .generations import SLICE_S, Generations
from .handle import Handle

listening = threading.Lock()
"""Held by whoever opens a listener: gloo's are told from others by what there is before and after."""
UNSLICED = frozenset(name for name, kind in OPERATIONS.items() if kind in {"send", "recv", "reduce_scatter"})
"""A timed wait breaks a send or receive; one for a reduce_scatter, made of several operations, ignores its time-out and
blocks for the group's (measured). Of the others it leaves things as they are when the time is up."""
ABANDON_S = 0.2
"""A severed operation fails by itself within some 20 ms; about one in 300 never does."""
_UNFINISHED_MAX = 512
_RUN_LOOP = b"pt_gloo_runloop"
_TURNS_S = 0.05
"""CPU time of about a thousand turns of a loop."""
_LOOK_S = 0.001


class GlooFabric(Fabric):
    """All gloo groups of one generation.

    Source: 18 groups of 8 ranks on 2 idle cores take 0.07 s, against 0.14 to 0.24 s with a device each. On a shared
    device, lazy connections hung; a thread per group blocks itself on the store's single connection.
    """

    def __init__(self, store: Store, generations: Generations) -> None:
        self._store, self._rank, self.generations = store, int(os.environ["RANK"]), generations
        self._devices, self._listeners, self._loops = _create_devices()
        self._peers: dict[int, frozenset[Address]] = {}
        self._unfinished: set[SwapWork] = set()  # waited for in slices, and not done: they may write late
        store.set(f"gloo/{self._rank}", ";".join(f"{host},{port}" for host, port in self._listeners))

    def build(self, handle: Handle, store: Store) -> Backend:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
        options._devices, options._timeout = self._devices, handle.timeout
        if hasattr(options, "global_ranks_in_group"):
            options.global_ranks_in_group, options.group_name = list(handle.ranks), handle.key
        size = handle.size()
        backend = ProcessGroupGloo(store if size > 1 else HashStore(), handle.rank(), size, options)
        backend._set_sequence_number_for_group()
        unknown = [rank for rank in handle.ranks if rank not in self._peers and rank != self._rank]
        if unknown:  # does not block: who has built a group with us has published his listeners
            values = self._store.multi_get([f"gloo/{rank}" for rank in unknown])
            self._peers = self._peers | {
                rank: frozenset(_normal(item.rsplit(",", 1)) for item in value.decode().split(";"))
                for rank, value in zip(unknown, values, strict=True)
            }
        return backend

    def begin(self, handle: Handle, operation: Operation) -> HandleWork:
        name, args, kwargs = operation
        if name == BATCH:
            return HandleWork(operation, parts=[self.begin(handle, part) for part in args[0]])
        method = getattr(handle.inner, name)
        if name == BLOCKING:
            self._run(lambda: method(*args, **kwargs), handle, self.generations.current)
            return HandleWork(operation)
        work = SwapWork(method(*args, **kwargs), self, handle, operation)
        if name not in UNSLICED:
            if len(self._unfinished) > _UNFINISHED_MAX:
                self._unfinished -= {work for work in list(self._unfinished) if work.has_ended()}
            self._unfinished.add(work)
        return work

    def _run(self, function: Callable[[], Any], handle: Handle, since: int) -> None:
        try:
            self.generations.run(function, since, ABANDON_S)
        except GenerationChanged:
            handle.abandoned = True
            raise

    def wait_for(self, work: SwapWork, timeout: timedelta | None) -> None:
        inner = work.inner
        if work.operation.name in UNSLICED:
            wait = inner.wait if timeout is None else lambda: inner.wait(timeout)
            self._run(wait, work.handle, work.generation)
            return
        limit = time.monotonic() + timeout.total_seconds() if timeout and timeout > timedelta(0) else math.inf
        abandon_at = math.inf
        while True:
            began = time.monotonic()
            try:
                inner.wait(timedelta(seconds=SLICE_S))
                break
            except RuntimeError:
                now = time.monotonic()
                # one that has failed fails at once; a Work made of several never says that it is completed
                if now - began < SLICE_S / 2 or (now >= limit and not inner.is_completed()):
                    self._unfinished.discard(work)
                    raise
            if self.generations.announced > work.generation:
                abandon_at = min(abandon_at, now + ABANDON_S)
                if now >= abandon_at:
                    work.handle.abandoned = True
                    raise GenerationChanged(self.generations.announced)
        self._unfinished.discard(work)

    def unblock(self) -> None:
        ours, theirs = set(self._listeners), set[Address]().union(*self._peers.values())
        for connection in _sockets():
            with contextlib.suppress(OSError):  # a listener, or not connected (any more)
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

        Gloo's event loops still read what has arrived, and torch's threads wait for them and reduce. A cut wakes the
        loops; each sleeps again once it has found its connections ended, and so does a thread it has woken. Each must
        be seen asleep twice, loops first: the first time it may only wait for a lock.

        Source: proc_pid_stat(5); gloo, transport/tcp/pair.cc (handleEvents tries its lock only).
        """
        deadline = time.monotonic() + ABANDON_S
        for work in list(self._unfinished):
            while not work.has_ended() and time.monotonic() < deadline:
                time.sleep(0.001)
            if not work.has_ended():
                work.handle.abandoned = True
        self._unfinished.clear()
        reducing = {thread for thread in linux.threads() if linux.of_thread(thread, "comm").strip() == _RUN_LOOP}
        # In an operation that never ends (gloo's race) torch's thread sleeps with such a lock in hand. The loop asks
        # for it again and again for as long as the process lives: after _TURNS_S it has done all it can.
        return all(_asleep(self._loops, _TURNS_S, stop) and _asleep(reducing, math.inf, stop) for _ in range(2))


def _asleep(threads: Iterable[str], turns_s: float, stop: Callable[[], bool]) -> bool:
    """Wait until each of `threads` has slept, has ended or has run for `turns_s`; False if `stop()` first."""
    began_s = {thread: _looked_at(thread)[1] for thread in threads}
    while True:
        for thread, before_s in list(began_s.items()):
            runs, cpu_s = _looked_at(thread)
            if not runs or cpu_s - before_s >= turns_s:
                del began_s[thread]
        if not began_s or stop():
            return not began_s
        time.sleep(_LOOK_S)


def _looked_at(thread: str) -> tuple[bool, float]:
    """Find out whether it runs, or would if it got a CPU, and for how many seconds it has had one."""
    fields = linux.of_thread(thread, "stat").rpartition(b")")[2].split()
    if not fields:
        return False, 0.0
    return fields[0] not in b"SZX", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _create_devices() -> tuple[list[Any], list[Address], set[str]]:
    """gloo's devices (one per GLOO_SOCKET_IFNAME interface), where they listen, the threads of their event loops."""
    names = [name.strip() for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name.strip()]
    with listening:
        before, threads = _listeners(), set(linux.threads())
        if names:
            devices = [ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in names]
        else:
            devices = [ProcessGroupGloo.create_default_device(lazy_init=False)]
        listeners, loops = list(_listeners() - before), set(linux.threads()) - threads
    invariant(
        len(listeners) == len(devices),
        f"{len(devices)} gloo devices brought {len(listeners)} listening sockets; their sockets cannot be told apart",
    )
    return devices, listeners, loops


def _listeners() -> set[Address]:
    is_listening = socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    return {_normal(found.getsockname()) for found in _sockets() if found.getsockopt(*is_listening)}


def _sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of every TCP socket of this process, so that its number cannot change its meaning under us."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:  # closed since it was listed
            continue
        try:
            found = socket.socket(fileno=copy)
        except OSError:  # not a socket
            os.close(copy)
            continue
        with found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                yield found


def _normal(name: Any) -> Address:
    return str(name[0]).removeprefix("::ffff:"), int(name[1])
