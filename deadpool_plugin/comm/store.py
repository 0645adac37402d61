"""The key-value store a generation's groups are built over: hosted by one of its workers, gone with it.

Rules of this file: whoever hosts a store keeps it while groups of its generation may still talk to it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from datetime import timedelta

import psutil
from torch._C._distributed_c10d import TCPStore

from ..transport import sockets

_ANSWER_LIMIT = timedelta(seconds=300)
_WAIT_LIMIT = timedelta(days=30)

listening = threading.Lock()
"""Held by whoever opens a listener: gloo.py tells gloo's by what there is before and after."""


def host_store(host: str | None = None) -> tuple[TCPStore, str]:
    """Start a store in this process, and return it and its "host:port".

    Args:
        host: the address others reach this process at; by default that of gloo's interface (GLOO_SOCKET_IFNAME), else
            its agent's (DEADPOOL_ADDRESS), else what its name resolves to.
    """
    address = host or _own_address()
    with listening:
        listener = sockets.listening(_bound(address), 0)
    port = listener.getsockname()[1]
    server = TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=_ANSWER_LIMIT,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return server, f"{address}:{port}"


def connect(address: str) -> TCPStore:
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
