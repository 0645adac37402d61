"""The process-wide registry of handles, the network of the current generation behind them, and the store below that.

Rules of this file: operations come from whatever thread torch issues them in (asynchronous saves and autograd have
their own), `interrupt` from any, everything else is the main thread's. Whatever waits for peers inside of a library,
and cannot be cut, runs in a thread that an announcement leaves behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from ..errors import InvariantViolated, Unsupported, present
from ..transport import sockets
from ..transport.flight_recorder import FlightRecorder
from .collective import Operation, note
from .fabric import Fabric, HandleWork
from .generations import Generations
from .gloo import GlooFabric, listening
from .handle import Handle, Runtime, members
from .nccl import NcclFabric
from .record import Recorder, Replay, user_frame

T = TypeVar("T")
_QUIESCE_S = 30.0
_ANSWER_LIMIT, _WAIT_LIMIT = timedelta(seconds=300), timedelta(days=30)  # of a store


class Groups(Runtime):
    """One per process. Call order: `patches.install`; start or rehearse; stop_recording or finish_rehearsal; then, per
    swap, interrupt (any thread) and rebuild. Without a worker it is its own runtime."""

    def __init__(self, recording_limit_bytes: int = 1 << 20, explain_timeout_s: float = 10.0) -> None:
        self.handles: list[Handle] = []
        self.runtime: Runtime = self
        """Server of what the handles are asked; a worker puts itself here before the first group is made."""
        self.generations = Generations(explain_timeout_s, self._connection_broke)
        self.calls_area = memoryview(b"")
        """Where this rank's agent looks for what the rank issues, as soon as it has an arena."""
        self.bootstrap: Store | None = None
        self.recording_limit_bytes = recording_limit_bytes
        self._lock = threading.Lock()
        """Shared by `interrupt` and a network that becomes the current one: no late interruption cuts the new one's."""
        self._network: Network | None = None
        self._recorder: Recorder | None = None
        self._replay: Replay | None = None
        self._training = False
        self._flight_recorder = FlightRecorder(self.calls_area, 0, ())
        self._pairs = False
        """All members of each group began to count together: their communicators were built again."""
        self._created: list[tuple[int, ...]] = []

    @property
    def generation(self) -> int:
        return self.generations.current

    def start(self, generation: int, store: str) -> None:
        """Begin as a live rank (RANK, WORLD_SIZE): connect groups over `store` as they are created, and record what
        their operations return. Blocks: until the store answers. Raises: GenerationChanged."""
        self.generations.enter(generation)
        self._network = self._attempt(lambda: Network(generation, store, self.generations), generation)
        self.bootstrap = PrefixStore("torch", self._network.store)
        self._recorder = Recorder(self.recording_limit_bytes)

    def rehearse(self, recording: bytes) -> None:
        """Begin as a rank's rehearsal (RANK, WORLD_SIZE), alone: operations return what `recording` has."""
        self._replay, self.bootstrap = Replay(recording), HashStore()

    def stop_recording(self) -> bytes:
        """Return the recording of everything since `start`. From here on no groups can be made. Blocks: for operations
        that nobody has waited for."""
        recorder = present(self._recorder, "stop_recording without start")
        self._recorder, self._training = None, True
        return recorder.finish(self._created)

    def finish_rehearsal(self) -> None:
        """Raises: Divergence unless everything recorded was issued."""
        present(self._replay, "finish_rehearsal without rehearse").finish()

    def fact(self, question: str, ask: Callable[[], Any]) -> Any:
        """Run `ask`, which a rehearsal could not answer, for plain data: a rehearsal is told what the rank itself
        found. Raises: Divergence if that has not asked `question` in start-up."""
        if self._replay is not None:
            return self._replay.fact(question)
        with self.unrecorded():
            answer = ask()
        if self._recorder is not None:
            self._recorder.facts.append((question, answer))
        return answer

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Leave collectives inside unrecorded: a rehearsal does not issue them."""
        recorder, self._recorder = self._recorder, None
        try:
            yield
        finally:
            self._recorder = recorder

    def interrupt(self, generation: int) -> None:
        """Unblock the main thread, because `generation` begins; operations raise GenerationChanged until `rebuild`.
        Thread: any, at any time, also during `rebuild`. Does nothing for a generation already known.
        Raises: DeadpoolError if NCCL's abort does not return; the process must then be killed."""
        with self._lock:
            if self.generations.announce(generation):
                for fabric in self._fabrics():
                    fabric.unblock()

    def _fabrics(self) -> list[Fabric]:
        return list(self._network.fabrics.values()) if self._network is not None else []

    def _connection_broke(self, generation: int, reason: str) -> bool:
        fabrics = self._fabrics() if generation == self.generation else []
        peers = tuple(rank for fabric in fabrics for rank in fabric.ranks_named(reason))
        return self.runtime.connection_broke(generation, peers, reason.strip().partition("\n")[0])

    def rebuild(self, generation: int, store: str) -> None:
        """Connect every handle again, over the store of `generation`; a rehearsing process becomes live by this.
        Blocks: until all ranks do the same. Raises: GenerationChanged if a newer generation is announced."""
        self.interrupt(generation)
        self.generations.check(generation)
        deadline = time.monotonic() + _QUIESCE_S

        def stop() -> bool:
            return self.generations.announced > generation or time.monotonic() > deadline

        if not all(fabric.quiesce(stop) for fabric in self._fabrics()):
            self.generations.check(generation)
            self.runtime.give_up(f"operations in flight have not ended within {_QUIESCE_S:g} s and may still write")
        handles = list(self.handles)

        def build() -> tuple[Network, list[dist.ProcessGroup | None]]:
            network = Network(generation, store, self.generations)
            # A newcomer may have a long way through past steps, and groups wait no longer than their time-outs.
            # The protocol misses a newcomer that does not come at all, and then begins another generation.
            if network.store.add("gathered", 1) == int(os.environ["WORLD_SIZE"]):
                network.store.set("everybody", "")
            network.store.wait(["everybody"])
            inners: list[dist.ProcessGroup | None] = []
            for handle in handles:
                self.generations.check(generation)  # else nobody waits for this thread any more
                inners.append(network.build(handle))
            return network, inners

        network, inners = self._attempt(build, generation)
        with self._lock:
            self.generations.enter(generation)
            self._network, self._replay, self._recorder, self._training = network, None, None, True
            _replace(handles, inners, aborted=True)
            self._pairs = True
            self.begin_counting()
        table = c10d._world.pg_map
        for handle in handles:  # torch hands out each group's store to whoever asks: a living one
            if handle in table:
                table[handle] = (table[handle][0], PrefixStore(f"torch/{handle.key}", network.store))

    def _attempt(self, function: Callable[[], T], generation: int) -> T:
        """Run `function` in a helper thread, in which an announcement after `generation` leaves it behind."""
        try:
            return self.generations.run(function, generation)
        except RuntimeError as error:
            self.generations.explain(error, generation)

    def begin_counting(self) -> None:
        """Count collectives from here on, as all members of a group do: its communicator is new on all of them."""
        counted = [handle for handle in self.handles if handle.size() > 1]
        described = [(handle.key, handle.rank(), handle.size()) for handle in counted]
        self._flight_recorder = FlightRecorder(self.calls_area, self.generation, described)
        for handle, record in zip(counted, self._flight_recorder.records, strict=True):
            handle.calls = record

    def cut(self, step: int) -> int:
        """Sum up this rank's collectives since the newest swap at the cut of `step`; 0 before the first swap."""
        self.generations.place.made(step)
        total = self._flight_recorder.cut(step)
        return total if self._pairs else 0

    def issue(self, handle: Handle, operation: Operation) -> HandleWork:
        """Issue `operation` on what is behind `handle` now. Raises: GenerationChanged; in a rehearsal Divergence."""
        if self._replay is not None:
            return self._replay.answer(handle, operation)
        self.generations.check()
        if handle.inner is None or self._network is None:
            raise InvariantViolated(f"{handle!r} is not connected")
        if handle.calls is not None:
            note(handle.calls, operation)
        fabric = self._network.fabrics[handle.only_backend or handle.backend_of(operation)]
        try:
            work = fabric.begin(handle, operation)
        except RuntimeError as error:
            self.generations.explain(error)
        if self._recorder is not None:
            self._recorder.add(handle, operation, work)
        return work

    collective = issue

    def create(self, given: Any, request: tuple[dict[str, str], Any]) -> Handle:
        """Make a handle, connected or a stand-in. Blocks: when live, until its members do the same.

        Args: given: what torch tells the creator of a group; request: backends by device type, and options for them.
        Raises: Unsupported in training: whoever takes a rank over later has not made it.
        """
        ranks = members(given)
        if self._training:
            raise Unsupported(
                f"a process group of ranks {list(ranks)} was made after training had begun, at {user_frame()}",
                "all groups of the script, made by every process in the same order before the first training call",
                "make it there",
            )
        occurrence = self._created.count(ranks)  # alike on all members, which an index over all groups is not
        key = f"{ranks[0]}+{len(ranks)}.{zlib.crc32(repr(ranks).encode()):08x}.{occurrence}"
        handle = Handle(self.runtime, given, len(self._created), key, *request)
        if self._replay is not None:
            self._replay.group(handle.index, ranks)
        else:
            self.generations.check()
            network = present(self._network, "a group was created before Groups.start")
            handle.inner = self._attempt(lambda: network.build(handle), self.generation)
        self._created.append(ranks)
        self.handles.append(handle)
        return handle

    def forget(self, handles: list[Handle]) -> None:
        """Let go of groups that torch has destroyed."""
        self.handles = [handle for handle in self.handles if handle not in handles]
        _replace(handles, [None] * len(handles), aborted=False)


def _replace(handles: list[Handle], inners: list[dist.ProcessGroup | None], *, aborted: bool) -> None:
    """Put `inners` behind `handles`, and let go of the groups there."""
    replaced = [handle.inner for handle in handles if handle.inner is not None]
    for handle, inner in zip(handles, inners, strict=True):
        # Some are never destroyed, not even at exit. A destructor of gloo's would join a thread that is stuck in the
        # group. One of NCCL's would abort it under members that still read from this one.
        if handle.abandoned or (not aborted and "nccl" in handle.backends.values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle.inner))
        handle.inner, handle.abandoned = inner, False
        handle.drop_coalescing()
    if replaced:  # a destructor that hangs must not hang anybody else
        threading.Thread(target=replaced.clear, name="deadpool-retire", daemon=True).start()


class Network:
    """The store of one generation, and a fabric per backend. Blocks: until the store at `address` answers."""

    def __init__(self, generation: int, address: str, generations: Generations) -> None:
        self.store: Store = PrefixStore(str(generation), connect_store(address))
        self.fabrics: dict[str, Fabric] = {}
        self._generations = generations

    def build(self, handle: Handle) -> dist.ProcessGroup:
        """Build a fresh inner group for `handle`. Blocks: until all its members do."""
        store = PrefixStore(handle.key, self.store)
        group = dist.ProcessGroup(store, handle.rank(), handle.size())
        types = {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}
        group._set_default_backend(types[handle.default_backend])
        for name in dict.fromkeys(handle.backends.values()):
            if name not in self.fabrics:
                generations = self._generations
                self.fabrics[name] = GlooFabric(self.store, generations) if name == "gloo" else NcclFabric(generations)
            backend = self.fabrics[name].build(handle, PrefixStore(name, store))
            for device in (device for device, its in handle.backends.items() if its == name):
                group._register_backend(torch.device(device), types[name], backend)
        group._set_group_name(handle.group_name)
        group._set_group_desc(handle.group_desc)
        if os.environ.get("TORCH_DIST_NAN_CHECK") == "1" and hasattr(c10d, "NanCheckHook"):  # from torch 2.15 on
            c10d.NanCheckHook.attach(group)  # torch has attached it to the handle, whose C++ side moves no data
        return group


def host_store(host: str | None = None) -> tuple[TCPStore, str]:
    """Start a store in this process, to be kept while groups may still talk to it. Returns: it, and its "host:port".

    Args: host: where others reach this process; by default that of gloo's interface (GLOO_SOCKET_IFNAME), else its
        agent's (DEADPOOL_ADDRESS), else what its name resolves to.
    """
    address = host or _own_address()
    with listening:
        listener = sockets.listening(_bound(address), 0)
    port = listener.getsockname()[1]
    server = TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=_ANSWER_LIMIT, master_listen_fd=listener.detach()
    )
    return server, f"{address}:{port}"


def connect_store(address: str) -> TCPStore:
    """Connect to the store at "host:port". Blocks: up to _ANSWER_LIMIT until it answers."""
    host, port = address.rsplit(":", 1)
    client = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_ANSWER_LIMIT)
    client.set_timeout(_WAIT_LIMIT)  # who was to set a key, and is lost or gets no further, is missed by the protocol
    return client


def _own_address() -> str:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    for found in psutil.net_if_addrs().get(interface, ()):
        if found.family == socket.AF_INET:
            return str(found.address)
    return os.environ.get("DEADPOOL_ADDRESS") or socket.gethostbyname(socket.gethostname())


def _bound(address: str) -> str:
    """Return where to listen: everywhere if a host's own name is a loopback address on itself (Debian's 127.0.1.1)."""
    if ":" in address or address == "localhost":
        return address
    resolved = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    *_, (found, *_) = min(resolved, key=lambda one: one[0])  # IPv4 where it has both
    return "" if ipaddress.ip_address(found).is_loopback and found != address else str(found)
