"""This host's addresses: the one `interface_address` means on it, and those by which a job finds it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Mapping

import psutil

from ..config import Config
from ..errors import ConfigError, TransportError
from ..transport.sockets import Address, address_towards
from ..transport.tasks import loop_time

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_RESOLVE_RETRY_S = 0.5
_log = logging.getLogger(__name__)

Found = list[tuple[str, str]]


def address_of(said: str, found: Found | None = None) -> str:
    """Find this host's address by `said`: the address, a network (10.1.0.0/16), or an interface's name (ib0).

    Raises: ConfigError if this host has none. `found`: its addresses; None asks the kernel.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(said)
        return said
    found = addresses_here() if found is None else found
    matching = [address for name, address in found if name == said]
    if "/" in said:
        try:
            network = ipaddress.ip_network(said, strict=False)
        except ValueError as error:
            wrong = f"interface_address {said} ({error})"
            raise ConfigError(wrong, "such as 10.1.0.0/16", "correct the network") from error
        matching = [address for _, address in found if ipaddress.ip_address(address) in network]
    if not matching:
        raise ConfigError(
            f"interface_address {said} is no address of {os.uname().nodename}, which has "
            + ", ".join(f"{name} {address}" for name, address in found),
            "an address, a network such as 10.1.0.0/16, or the name of an interface that every host has",
            "name one of these in interface_address",
        )
    return matching[0]


async def reachable(config: Config, target: Address, timeout_s: float) -> tuple[str, str]:
    """Return where to listen, and the address others use. `target`: what they must be reached by.

    Raises: ConfigError; TransportError if there is no way to `target` within `timeout_s`.
    """
    if config.interface_address is not None:
        ours = address_of(config.interface_address)
        return ours, ours
    deadline, said = loop_time() + timeout_s, False
    while True:  # a name that comes into being with its host (Kubernetes) may be unknown for a while
        try:
            ours = address_towards(*target)
            break
        except TransportError as error:
            if loop_time() >= deadline:
                raise
            if not said:
                _log.warning("%s; it is tried again for %.0f s", error, timeout_s)
                said = True
        await asyncio.sleep(_RESOLVE_RETRY_S)
    where = ours, ours
    if ipaddress.ip_address(ours).is_loopback and target[0] not in _LOOPBACK:
        where = "", target[0]  # the first host's name means itself there; others know it by that name
    if hint := other_network(where[1], os.environ):
        _log.warning("%s", hint)
    return where


def other_network(ours: str, environ: Mapping[str, str], found: Found | None = None) -> str:
    """Warn if the frameworks use another interface than that of `ours`; "" if they were not told to."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        interface = environ.get(name, "").removeprefix("=")
        theirs = [address for named, address in found or addresses_here() if interface and named == interface]
        if theirs and ours not in theirs:
            return (
                f"snapshots are mirrored over {ours}, {name} names {interface} ({theirs[0]}); "
                f"`interface_address: {interface}` lets them go there, too"
            )
    return ""


def addresses_here() -> Found:
    """List this host's interfaces and their addresses, IPv4 first, without link-local ones."""
    found = [(its.family, name, its.address) for name, all_its in psutil.net_if_addrs().items() for its in all_its]
    v4, v6 = ([(name, address) for family, name, address in found if family == wanted] for wanted in _FAMILIES)
    return v4 + [(name, address) for name, address in v6 if "%" not in address]
