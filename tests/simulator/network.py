"""TCP between simulated hosts, under faults; production's code meets it as the module `socket` (`faked`).

Rules of this file: bytes of one connection arrive in the order in which they were sent or the connection ends; there
is no third way. So a rule's DROP is a lost segment: it and all behind it wait and are tried again; what is not
acknowledged for TCP_USER_TIMEOUT ends the connection at its sender, also where only acknowledgements are lost. A
connection that is reset loses a suffix of what was under way, then each end that can hear of it is told; who sends to
an end that has closed is told so. A dark host answers nothing; on one whose processes are gone nobody listens, and its
kernel says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import random
import socket as real
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any

from deadpool_plugin.core.types import NodeId
from deadpool_plugin.transport import sockets

from .clock import Timeline
from .loop import HostLoop, simulated
from .rules import PASS, Loss, Rules
from .violation import Violation

RETRY_S, RETRY_MAX_S = 0.2, 1.6
SYN_S = 127.0
"""For how long Linux asks a host that does not answer for a connection."""
WAITING_MAX = 20_000
"""Segments on one connection that nobody reads: more than this is no queue but a leak (BOUNDED)."""
_FIRST_PORT = 40_000
END, RESET = object(), object()
"""The last things on a connection: no more bytes; it is over."""


def address_of(node: NodeId) -> str:
    return f"10.{node >> 16 & 255}.{node >> 8 & 255}.{node & 255}"


def node_at(address: str) -> NodeId:
    _, high, middle, low = map(int, address.split("."))
    return high << 16 | middle << 8 | low


class Kernel:
    """One host's: its listeners and connections. `dark`: it has lost its power."""

    def __init__(self, network: Network, node: NodeId, loop: HostLoop) -> None:
        self.network, self.node, self.loop = network, node, loop
        self.dark = False
        self.listeners: dict[int, Socket] = {}
        self.connections: dict[Socket, None] = {}
        self.ports = itertools.count(_FIRST_PORT)


class Network:
    """All hosts' kernels, and what lies between them."""

    def __init__(self, timeline: Timeline, rules: Rules, rng: random.Random, latency_s: float) -> None:
        self.timeline, self.rules, self.rng = timeline, rules, rng
        self._latency_s = latency_s
        self.kernels: dict[NodeId, Kernel] = {}
        self.flips: list[Loss] = []
        """Rules of which segments are changed on their way, not lost, which resets their connections."""

    def attach(self, node: NodeId, loop: HostLoop) -> Kernel:
        self.kernels[node] = kernel = Kernel(self, node, loop)
        loop.kernel = kernel
        return kernel

    @property
    def dark(self) -> set[NodeId]:
        return {node for node, kernel in self.kernels.items() if kernel.dark}

    def latency(self) -> float:
        return self.rng.random() * self._latency_s

    def passes(self, source: NodeId, target: NodeId) -> bool:
        """Return whether one attempt from `source` to `target` arrives."""
        if self.kernels[source].dark or self.kernels[target].dark:
            return False
        return self.rules.judge(self.timeline.now, source, target).copies > 0

    def flips_a_bit(self, source: NodeId, target: NodeId) -> bool:
        if not self.flips:
            return False
        now = self.timeline.now
        return any(now < rule.until and not rule.judge(source, target, self.rng).copies for rule in self.flips)

    def between(self, a: NodeId, b: NodeId) -> list[Socket]:
        """The ends at `a` of the connections to `b`."""
        return [sock for sock in self.kernels[a].connections if sock.remote.node == b]

    # ---- ends

    def break_links(self, a: NodeId, b: NodeId) -> bool:
        """Something between them resets every connection. Returns: whether there was one."""
        found = self.between(a, b)
        for sock in found:
            for end in (sock, sock.remote):
                end.out.cut_suffix()
                end.out.put(RESET)
        return bool(found)

    def kill(self, node: NodeId) -> None:
        """All processes of a host are gone; its kernel resets their connections."""
        kernel = self.kernels[node]
        kernel.listeners.clear()
        for sock in list(kernel.connections):
            sock.out.cut_suffix()
            sock.out.put(RESET)
            sock.forget()

    def vanish(self, node: NodeId) -> None:
        """A host loses its power: nothing of what it said last and nothing of its end is heard."""
        kernel = self.kernels[node]
        kernel.dark = True
        kernel.listeners.clear()
        for sock in list(kernel.connections):
            sock.out.cut_suffix()
            self.timeline.after(sock.remote.timeout_s, sock.remote.is_unanswered)
            sock.forget()

    def keep_alive(self, a: NodeId, b: NodeId) -> None:
        """Nothing has passed between `a` and `b` for the time-out: keep-alives find the end of idle connections."""
        for sock in self.between(a, b):
            sock.remote.is_unanswered()
            sock.is_unanswered()


class Wire:
    """One direction of a connection, out of `sock`. `flight`: what arrives when, in order."""

    def __init__(self, sock: Socket) -> None:
        self._sock = sock
        self._network = sock.kernel.network
        self._ends = (sock.node, sock.remote.node)
        self.waiting: deque[object] = deque()
        self._flight: deque[tuple[float, object]] = deque()
        self._stalled_since: float | None = None
        self._retrying = self._awaits_ack = False
        self._arrives_at = 0.0

    def put(self, item: object) -> None:
        """Queue bytes, END or RESET."""
        self.waiting.append(item)
        if not self._retrying:
            self._pump()
        elif len(self.waiting) > WAITING_MAX:
            raise Violation("BOUNDED", f"{WAITING_MAX} segments wait on the way from node {self._ends}")

    def _pump(self) -> None:
        """Put on the wire what passes; try again later what does not."""
        self._retrying = False
        network, (source, target) = self._network, self._ends
        now, rules = network.timeline.now, network.rules
        while self.waiting:
            passage = rules.judge(now, source, target) if rules.in_force else PASS
            if not passage.copies or network.kernels[target].dark or network.kernels[source].dark:
                self._stall(now)
                return
            self._stalled_since = None
            if rules.in_force and not self._awaits_ack and rules.is_cut(now, target, source):
                self._awaits_ack = True
                network.timeline.after(self._sock.timeout_s, self._check_ack)
            self._fly(self.waiting.popleft(), passage.delay_s)

    def _fly(self, item: object, delay_s: float) -> None:
        timeline = self._network.timeline
        when = timeline.now + self._network.latency() + delay_s
        if when > self._arrives_at or not self._flight:
            self._arrives_at = max(when, self._arrives_at)
            timeline.at(self._arrives_at, self._arrive)
        self._flight.append((self._arrives_at, item))

    def _stall(self, now: float) -> None:
        if self._stalled_since is None:
            self._stalled_since = now
        if now - self._stalled_since >= self._sock.timeout_s:
            self.waiting.clear()
            self._sock.is_unanswered()
        else:
            self._retrying = True
            self._network.timeline.after(RETRY_S * (0.5 + self._network.rng.random()), self._pump)

    def _check_ack(self) -> None:
        """What was sent has arrived, but no acknowledgement could come back for too long."""
        network, (source, target) = self._network, self._ends
        now = network.timeline.now
        if not network.rules.is_cut(now, target, source):
            self._awaits_ack = False
        elif network.rules.is_cut(now, target, source, self._sock.timeout_s):
            self._sock.is_unanswered()
        else:
            network.timeline.after(RETRY_S, self._check_ack)

    def _arrive(self) -> None:
        self._sock.remote.kernel.loop.hear(self._land)

    def _land(self) -> None:
        flight, target, now = self._flight, self._sock.remote, self._network.timeline.now
        while flight and flight[0][0] <= now:
            target.take_in(flight.popleft()[1])
        target.heard_at = now
        if not target.kernel.dark and self._network.passes(target.node, self._sock.node):  # it is acknowledged
            self._sock.acknowledged_at = now

    def cut_suffix(self) -> None:
        """Some of what is under way is lost with the connection."""
        self.waiting.clear()
        for _ in range(self._network.rng.randint(0, len(self._flight))):
            self._flight.pop()


class Socket:
    """What production's code uses of a socket. Its waiting calls are the loop's, see HostLoop."""

    remote: Socket
    out: Wire

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.node = kernel, kernel.node
        self.port = 0
        self.timeout_s = SYN_S
        self.heard_at = self.acknowledged_at = kernel.network.timeline.now
        self.closed = self._has_ended = self._said_end = False
        self._error: OSError | None = None
        self._data = bytearray()
        self._backlog: deque[Socket] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._transport: Transport | None = None

    # ---- as the module `socket` has it

    def setblocking(self, flag: bool) -> None:
        """It never blocks."""

    def setsockopt(self, level: int, name: int, value: int) -> None:
        if (level, name) == (real.IPPROTO_TCP, real.TCP_USER_TIMEOUT):
            self.timeout_s = value / 1000

    def getsockopt(self, level: int, name: int, size: int) -> bytes:
        assert (level, name) == (real.IPPROTO_TCP, real.TCP_INFO)
        now = self.kernel.network.timeline.now
        times_ms = (int(1000 * (now - at)) for at in (self.heard_at, self.acknowledged_at))
        return struct.pack("52x2I", *times_ms).ljust(size, b"\0")

    def getsockname(self) -> tuple[str, int]:
        return address_of(self.node), self.port

    def getpeername(self) -> tuple[str, int]:
        if self.closed or not hasattr(self, "remote"):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return self.remote.getsockname()

    def recv(self, size: int, flags: int = 0) -> bytes:
        assert flags == real.MSG_PEEK
        if not self._data and not self._has_ended:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return bytes(self._data[:size])

    @property
    def sends(self) -> bool:
        return self._error is None and not self.closed and not self._said_end

    def send(self, data: bytes) -> None:
        if not self.sends:
            raise self._error or OSError(errno.EPIPE, os.strerror(errno.EPIPE))
        self.out.put(data)

    def shutdown(self, how: int) -> None:
        """No more bytes in either direction."""
        self.end_writing()
        self.take_in(END)

    def close(self) -> None:
        if self.closed:
            return
        if hasattr(self, "out") and self._error is None:
            if self._data:
                self.out.put(RESET)
            elif not self._said_end:
                self.out.put(END)
        self.forget()

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- as the event loop has it

    async def connect(self, address: tuple[str, int]) -> None:
        """Raises: ConnectionRefusedError; TimeoutError after SYN_S."""
        network, target = self.kernel.network, node_at(address[0])
        deadline, again_s = self.kernel.loop.time() + SYN_S, RETRY_S
        while self.kernel.loop.time() < deadline:
            if target not in network.kernels or not network.passes(self.node, target):
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, RETRY_MAX_S)
                continue
            await asyncio.sleep(network.latency())
            kernel = network.kernels[target]
            if kernel.dark:
                continue
            listener = kernel.listeners.get(address[1])
            if listener is None:
                if network.passes(target, self.node):
                    await asyncio.sleep(network.latency())
                    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
                await asyncio.sleep(RETRY_S)
                continue
            self._join(Socket(kernel), address[1])
            listener.queue(self.remote)
            while not network.passes(target, self.node):  # the answer is lost, and comes again
                if self.kernel.loop.time() >= deadline:
                    break
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(network.latency())
            return
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    def _join(self, remote: Socket, port: int) -> None:
        self.port, remote.port = next(self.kernel.ports), port
        self.remote, remote.remote = remote, self
        for end in (self, remote):
            end.out = Wire(end)
            end.kernel.connections[end] = None

    def listen(self, port: int) -> None:
        self.port = port or next(self.kernel.ports)
        if self.port in self.kernel.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self.kernel.listeners[self.port] = self

    def queue(self, sock: Socket) -> None:
        self._backlog.append(sock)
        self._wake()

    async def accept(self) -> Socket:
        while not self._backlog:
            await self._wait()
        return self._backlog.popleft()

    async def receive(self, size: int) -> bytes:
        """Some bytes, none at the end. Raises: OSError."""
        while not self._data and not self._has_ended:
            if self._error is not None:
                raise self._error
            if self.closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            await self._wait()
        data = bytes(self._data[:size])
        del self._data[:size]
        return data

    async def _wait(self) -> None:
        self._waiter = self.kernel.loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def carry(self, protocol: asyncio.Protocol) -> Transport:
        """From now on what comes is the protocol's."""
        self._transport = Transport(self, protocol)
        return self._transport

    def hand_over(self) -> None:
        """What has come before goes to the transport."""
        data, self._data = bytes(self._data), bytearray()
        assert self._transport is not None
        if data:
            self._transport.heard(data)
        if self._error is not None:
            self._transport.broke(self._error)
        elif self._has_ended:
            self._transport.ended()

    # ---- what comes

    def take_in(self, item: object) -> None:
        """Bytes, END or RESET have arrived."""
        if self.closed:
            if isinstance(item, bytes) and not self.kernel.dark:
                self.out.put(RESET)  # nobody has this socket any more, which its kernel says
            return
        if self._error is not None:
            return
        network = self.kernel.network
        if isinstance(item, bytes):
            if network.flips and network.flips_a_bit(self.remote.node, self.node):
                self.out.put(RESET)
                self.fail(ConnectionResetError(errno.ECONNRESET, "a segment was changed on its way"))
                return
            if self._transport is not None:
                self._transport.heard(item)
            else:
                self._data += item
        elif item is RESET:
            self.fail(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))
        else:
            self._has_ended = True
            if self._transport is not None:
                self._transport.ended()
        self._wake()

    def is_unanswered(self) -> None:
        """What was sent was not acknowledged in time."""
        self.fail(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))

    def fail(self, error: OSError) -> None:
        if self.closed or self._error is not None:
            return
        self._error = error
        self.out.waiting.clear()
        if self._transport is not None:
            self._transport.broke(error)
        self._wake()

    def end_writing(self) -> None:
        if self.sends:
            self._said_end = True
            self.out.put(END)

    def forget(self) -> None:
        """It is closed: its kernel has nothing of it but what is under way."""
        self.closed = True
        if self.kernel.listeners.get(self.port) is self:
            del self.kernel.listeners[self.port]
        self.kernel.connections.pop(self, None)
        self._wake()


class Transport(asyncio.Transport):
    """asyncio's over a Socket."""

    def __init__(self, sock: Socket, protocol: asyncio.Protocol) -> None:
        super().__init__({"socket": sock})
        self._sock, self._protocol, self._loop = sock, protocol, sock.kernel.loop
        self._closing = self._lost = False
        self._loop.call_soon(protocol.connection_made, self)
        self._loop.call_soon(sock.hand_over)

    def heard(self, data: bytes) -> None:
        self._loop.call_soon(self._read, data)

    def _read(self, data: bytes) -> None:
        if not self._closing:
            self._protocol.data_received(data)

    def ended(self) -> None:
        self._loop.call_soon(self._read_end)

    def _read_end(self) -> None:
        if not self._closing and not self._protocol.eof_received():
            self.close()

    def broke(self, error: OSError) -> None:
        self._loop.call_soon(self._end, error)

    def _end(self, error: OSError | None) -> None:
        self._closing = True
        if not self._lost:
            self._lost = True
            self._sock.close()
            self._protocol.connection_lost(error)

    def write(self, data: Any) -> None:
        if not self._lost and self._sock.sends:  # else `broke` says why not
            self._sock.out.put(bytes(data))

    def write_eof(self) -> None:
        self._sock.end_writing()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._end, None)

    def abort(self) -> None:
        self._closing = True
        self._loop.call_soon(self._end, None)

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """All is sent at once."""


class Datagrams(Socket):
    """A socket that is only asked which of the host's addresses leads somewhere."""

    def connect(self, address: tuple[str, int]) -> None:  # type: ignore[override]
        """Nothing is sent."""


class FakeModule:
    """The module `socket`, as far as transport/sockets.py uses it, on the host whose loop runs."""

    def __getattr__(self, name: str) -> Any:
        assert name.isupper() or name == "gaierror", f"transport/sockets.py uses socket.{name}, which is not simulated"
        vars(self)[name] = found = getattr(real, name)  # it is not asked again
        return found

    def _kernel(self) -> Kernel:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HostLoop)
        kernel: Kernel = loop.kernel
        return kernel

    def socket(self, family: int, kind: int) -> Socket:
        return Socket(self._kernel()) if kind == real.SOCK_STREAM else Datagrams(self._kernel())

    def has_dualstack_ipv6(self) -> bool:
        return False

    def create_server(self, address: tuple[str, int], **options: Any) -> Socket:
        sock = Socket(self._kernel())
        sock.listen(address[1])
        return sock

    def getaddrinfo(self, host: str, port: int, **options: Any) -> list[Any]:
        return [(real.AF_INET, options.get("type", real.SOCK_STREAM), 0, "", (host, port))]


@contextlib.contextmanager
def faked() -> Iterator[None]:
    """Production's sockets are those of the host whose loop runs, meanwhile."""
    vars(sockets)["socket"] = FakeModule()
    try:
        with simulated():
            yield
    finally:
        vars(sockets)["socket"] = real
