"""TCP sockets with the options every connection of ours has.

Rules of this file: no port is fixed, 0 means the system chooses; a range is tried from its first to its last port. A
socket that listens on all interfaces does so in both families: others may know the host by a name of either.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import struct
from collections.abc import Iterator
from typing import Annotated

import msgspec

from ..errors import ConfigError, TransportError

# From linux/tcp.h, which Python does not name; the second since Linux 6.15.
_TCP_THIN_LINEAR_TIMEOUTS, _TCP_RTO_MAX_MS = 16, 44
_RESEND_MS, _SYNS = 1000, 127  # the least and the most that Linux takes
_LAST_RECEIVED = struct.Struct("52x2I")  # in tcp_info(7): ms since the newest data and the newest acknowledgement
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Address = tuple[str, Port]
BACKLOG = 4096


@contextlib.contextmanager
def closed_on_error(sock: socket.socket) -> Iterator[None]:
    """Closes `sock` if what is done with it raises, or is cancelled."""
    try:
        yield
    except BaseException:
        sock.close()
        raise


def listening(host: str, port: int) -> socket.socket:
    """Listen on the interface `host`, "" for all. Raises: OSError."""
    if not host and socket.has_dualstack_ipv6():
        try:
            return socket.create_server((host, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG
    )


def listen_tcp(host: str, port_range: tuple[int, int] | None = None) -> socket.socket:
    """Listen on the interface `host` ("" for all), at a free port or one of the range (ends included).
    Raises: ConfigError if the interface does not exist or every port of the range is taken."""
    ports = range(port_range[0], port_range[1] + 1) if port_range else (0,)
    for port in ports:
        try:
            sock = listening(host, port)
            resend_steadily(sock)
            return sock
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                found = f"cannot listen at {host or '*'}:{port}: {error}"
                raise ConfigError(found, remedy="check interface_address") from error
    raise ConfigError(f"all ports {ports[0]} to {ports[-1]} of {host or '*'} are taken", remedy="widen port_range")


def remote_name(sock: socket.socket) -> str:
    """Name the other end as "host:port", for people and to know a host again, whichever family it comes by."""
    try:
        host, port = sock.getpeername()[:2]
    except OSError:  # it is gone already
        return "(closed)"
    return f"{host.removeprefix('::ffff:')}:{port}"


async def connected(address: Address) -> socket.socket:
    """Connect to `address` (a name or a number) by the first of its addresses that answers; the socket does not block.
    Raises: OSError; ConnectionRefusedError only if all refuse."""
    loop = asyncio.get_running_loop()
    try:  # a number needs none of the threads that names are looked up in: others may hold them all
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
    error: OSError | None = None
    for family, kind, _, _, target in found:
        sock = socket.socket(family, kind)
        try:
            with closed_on_error(sock):
                sock.setblocking(False)
                resend_steadily(sock)
                await loop.sock_connect(sock, target)
            return sock
        except OSError as failure:
            error = failure if error is None or isinstance(error, ConnectionRefusedError) else error
    raise error or OSError(f"{address[0]} has no address")


async def why_unreachable(address: Address, within_s: float) -> tuple[str, bool]:
    """Ask for a connection, which nobody has to accept. Returns: why there is none; if only for silence."""
    try:
        async with asyncio.timeout(within_s):
            (await connected(address)).close()
    except ConnectionRefusedError:
        return "nobody listens there any more", False
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):  # else it is this host that has no descriptor for it
            return f"no answer ({error!r})", True
    return "", False


def resend_steadily(sock: socket.socket) -> None:
    """Let what is lost be sent again within a second each time, where the kernel can: by itself it doubles its pause up
    to two minutes, and after some losses a path that is well again carries nothing. Accepted sockets inherit it."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RESEND_MS)
        # Requests for a connection, and a listener's answers: for two minutes, as requests by themselves.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, _SYNS)


def tune(sock: socket.socket, silent_after_s: float) -> None:
    """Set no delay, and after what silence a connection fails: an idle one after three probes, as one may be lost."""
    idle_s, every_s = max(1, int(silent_after_s / 2)), max(1, int(silent_after_s / 4))
    timeout_s = max(silent_after_s, idle_s + 2.5 * every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A lost one of a few small frames is sent again at a steady pace, not after 0.2, 0.6, 1.4 and 3 s.
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)


def unheard_s(sock: socket.socket) -> tuple[float, float]:
    """Return how long ago the other end's kernel last sent data, and data or an acknowledgement. Raises: OSError."""
    data_ms, acknowledgement_ms = _LAST_RECEIVED.unpack_from(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64))
    return data_ms / 1000, min(data_ms, acknowledgement_ms) / 1000


def address_towards(host: str, port: int) -> str:
    """Find the address of this host's interface that leads to `host`; sends nothing. Raises: TransportError."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(target)
            return str(sock.getsockname()[0])
    except OSError as error:
        raise TransportError(f"no way to {host}: {error}", remedy="check MASTER_ADDR and interface_address") from error


def allow_many_files() -> None:
    """Let this process open as many files as its host allows, and those it starts: some for each of many nodes."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
