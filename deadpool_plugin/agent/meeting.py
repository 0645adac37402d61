"""A node's agent becomes reachable and meets the others: addresses, listeners, rendezvous, links.

Rules of this file: nothing is decided about the job here. What fails is a DeadpoolError and this node's end.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from functools import cache
from importlib import metadata
from typing import Protocol

from ..config import Config
from ..core.messages import AnyMessage
from ..core.types import NodeId
from ..errors import PeerRefused, TransportError, present
from ..host.interfaces import address_of, other_network
from ..mirror.server import OnMirrored
from ..transport.handshake import Credentials
from ..transport.mesh import ControlMesh
from ..transport.rendezvous import Hello, job_id, meet
from ..transport.sockets import Address, address_towards
from ..transport.tasks import loop_time
from .host import Host
from .joining import Arrival, Job, Newcomer, Owner, Roster, how_to_join
from .world import Place

PACKAGES = ("deadpool_plugin", "torch", "megatron-core", "deepspeed")
STARTS_APART = 6
"""Hosts wait for each other for this part of `start_timeout_s`, if their patience later is too little for that."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_RETRY_S = 0.5
_log = logging.getLogger(__name__)


def meeting_s(config: Config) -> float:
    """Return how long hosts wait for each other when a job starts."""
    return max(config.decision_timeout_s, config.start_timeout_s / STARTS_APART)


async def reachable(config: Config, place: Place, job: Job) -> tuple[str, str]:
    """Find `addresses` towards the job: where names come into being with the hosts (Kubernetes), that of the first one
    may be unknown for as long as hosts wait for each other.

    Raises: ConfigError; TransportError after so long. Blocks: for the resolver, each time.
    """
    target = job.invitation.members[0] if job.invitation else (place.master_addr, place.master_port)
    deadline, said = loop_time() + meeting_s(config), False
    while True:
        try:
            found = addresses(config, target)
            if config.interface_address is None and (hint := other_network(found[1], os.environ)):
                _log.warning("%s", hint)
            return found
        except TransportError as error:
            if loop_time() >= deadline:
                raise
            if not said:
                _log.warning("%s; it is tried again for %.0f s", error, meeting_s(config))
                said = True
        await asyncio.sleep(_RETRY_S)


def addresses(config: Config, target: Address) -> tuple[str, str]:
    """Return where to listen, and the address others use. `target`: what they must be reached by.

    Raises: ConfigError; TransportError if there is no way to `target`.
    """
    if config.interface_address is not None:
        ours = address_of(config.interface_address)
        return ours, ours
    found = address_towards(*target)
    if ipaddress.ip_address(found).is_loopback and target[0] not in _LOOPBACK:
        return "", target[0]  # the first host's name means itself there; others know it by that name
    return found, found


@cache
def versions() -> dict[str, str]:
    """Read the versions of the packages that must be alike on all hosts; nobody changes what is returned."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


class Ears(Owner, Protocol):
    """A node's agent, as its links need it; each is called on the event loop's thread."""

    def received(self, node: NodeId, message: AnyMessage) -> None: ...

    def link_lost(self, node: NodeId, reason: str) -> None: ...

    def still_silent(self, node: NodeId, reason: str) -> None: ...

    def refused(self, error: PeerRefused) -> None: ...


class Links:
    """This node's control mesh, and how it comes to be. Thread: the event loop's only."""

    def __init__(
        self, place: Place, config: Config, credentials: Credentials, job: Job, host: Host, agent: Ears
    ) -> None:
        self._node, self._place, self._config, self._credentials = place.node, place, config, credentials
        self._agent, self._host = agent, host
        master = (place.master_addr, place.master_port)
        self._job, self.roster = job, Roster(place.node, job, master, credentials, agent)
        self.mesh = ControlMesh(
            place.node, credentials, host.where[0], config.port_range, agent.received, agent.link_lost,
            config.silent_after_s, agent.refused, self.roster.answer, agent.still_silent,
        )  # fmt: skip

    async def listen(self, on_mirrored: OnMirrored) -> Hello:
        """Open both listeners; what the others must know of this node. Raises: DeadpoolError."""
        host, address = self._host, self._host.where[1]
        control = (address, (await self.mesh.listen())[1])
        self.how_to_join = how_to_join(control)
        bulk = (address, host.bulk.serve(on_mirrored, self._agent.refused))
        return Hello(
            self._node, host.name, control, bulk, self._place.local_size, versions(), self._config.digest(),
            os.urandom(8).hex(), self._job.launch,
        )  # fmt: skip

    async def meet(self, hello: Hello) -> list[Hello]:
        """Exchange hellos at the master's address and link up with everyone. Raises: DeadpoolError."""
        place, config = self._place, self._config
        timeout_s = meeting_s(config)
        hellos = await meet(
            place.nodes_total, place.master_addr, place.master_port, hello, self._credentials, timeout_s
        )
        self._credentials.job = job_id(hellos)
        await self.mesh.connect({one.node: one.control for one in hellos}, timeout_s)
        for one in hellos:
            self.roster.know(one)
        return hellos

    async def join(self, hello: Hello) -> Arrival:
        """Instead of `meet`: link up with everyone of the job this host is invited to. Raises: DeadpoolError."""
        invitation = present(self._job.invitation, "a host that was not invited joins")
        self._credentials.job = invitation.job
        newcomer = Newcomer(self.mesh, hello, self._credentials, self.roster, self._config.decision_timeout_s)
        return await newcomer.arrive(invitation.members)
