"""Which of this host's addresses `interface_address` means: a file that is the same on all hosts names a network.

Rules of this file: Linux; asks the kernel for addresses, opens nothing.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from ..errors import ConfigError

_SIOCGIFCONF = 0x8912
_ENTRY_BYTES, _ENTRIES_MAX = 40, 256
_IPV6 = Path("/proc/net/if_inet6")
_GLOBAL = "00"

Found = list[tuple[str, str]]


def address_of(said: str, found: Found | None = None) -> str:
    """This host's address by `said`: the address itself, a network (10.1.0.0/16), or an interface's name (ib0).

    Args:
        found: this host's interfaces and their addresses; None asks the kernel.
    Raises: ConfigError if this host has none.
    """
    if _is_address(said):
        return said
    found = addresses_here() if found is None else found
    matching = [address for name, address in found if name == said]
    if "/" in said:
        try:
            network = ipaddress.ip_network(said, strict=False)
        except ValueError as error:
            raise ConfigError(f"interface_address {said} ({error})", "such as 10.1.0.0/16", "correct it") from error
        matching = [address for _, address in found if ipaddress.ip_address(address) in network]
    if not matching:
        raise ConfigError(
            f"interface_address {said} is no address of {os.uname().nodename}, which has "
            + ", ".join(f"{name} {address}" for name, address in found),
            "an address, a network such as 10.1.0.0/16, or the name of an interface that every host has",
            "correct it",
        )
    return matching[0]


def _is_address(said: str) -> bool:
    try:
        ipaddress.ip_address(said)
    except ValueError:
        return False
    return True


def addresses_here() -> Found:
    """This host's interfaces and their addresses, IPv4 first, without those that mean something on one link only."""
    buffer = array.array("B", bytes(_ENTRY_BYTES * _ENTRIES_MAX))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        asked = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        size, _ = struct.unpack("iP", fcntl.ioctl(sock, _SIOCGIFCONF, asked))
    entries = [buffer[at : at + _ENTRY_BYTES].tobytes() for at in range(0, size, _ENTRY_BYTES)]
    found = [(entry[:16].partition(b"\0")[0].decode(), socket.inet_ntoa(entry[20:24])) for entry in entries]
    for line in _IPV6.read_text().splitlines() if _IPV6.exists() else []:
        digits, _, _, scope, _, name = line.split()
        if scope == _GLOBAL:
            found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found
