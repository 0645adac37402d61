"""The key-value store a generation's groups are built over: hosted by one of its workers, gone with it.

Rules of this file: whoever hosts a store keeps it while groups of its generation may still talk to it.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import threading
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from ..transport import sockets

_SIOCGIFADDR = 0x8915
_ANSWER_LIMIT = timedelta(seconds=300)
_WAIT_LIMIT = timedelta(days=30)

listening = threading.Lock()
"""Held by whoever opens a listener: gloo.py tells gloo's by what there is before and after."""


def host_store(host: str | None = None) -> tuple[TCPStore, str]:
    """Start a store in this process; returns it and its "host:port". It listens on that address only, unless that is a
    name which means something else to others.

    Args:
        host: the address others reach this process at; by default that of gloo's interface (GLOO_SOCKET_IFNAME), else
            its agent's (DEADPOOL_ADDRESS), else what its name resolves to.
    """
    address = host or _own_address()
    bound = _bound(address)
    with listening:
        listener = sockets.listening(bound, 0)
    port = listener.getsockname()[1]
    server = TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=_ANSWER_LIMIT,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return server, f"{address}:{port}"


def connect(address: str) -> TCPStore:
    """A client of the store at "host:port", which waits for a key as long as it takes: who was to set it and is lost,
    or gets no further, is missed by the protocol. Blocks: up to _ANSWER_LIMIT until the store answers."""
    host, port = address.rsplit(":", 1)
    client = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_ANSWER_LIMIT)
    client.set_timeout(_WAIT_LIMIT)
    return client


def _own_address() -> str:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if interface:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            packed = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, packed)[20:24])
    return os.environ.get("DEADPOOL_ADDRESS") or socket.gethostbyname(socket.gethostname())


def _bound(address: str) -> str:
    """Return where to listen: everywhere if a host's own name is a loopback address on itself (Debian's 127.0.1.1)."""
    if ":" in address or address == "localhost":
        return address
    resolved = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    *_, (found, *_) = min(resolved, key=lambda one: one[0])  # IPv4 where it has both
    return "" if ipaddress.ip_address(found).is_loopback and found != address else str(found)
