"""The rendezvous: all nodes meet once at MASTER_ADDR:MASTER_PORT and exchange addresses.

Rules of this file: node 0 listens, the others dial until it answers; everyone gets the same table; then nobody depends
on that host any more. Node 0 listens on every interface, because a host's own name may resolve to a loopback address on
it. Whether the hellos fit together (versions, configuration) is for the caller to judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from ..core.types import Count, Generation, Holding, NodeId, Step, listed
from ..errors import PeerRefused, TransportError
from .framing import ConnectionClosed, put, take
from .handshake import HANDSHAKE_TIMEOUT_S, Credentials, Listener, asked
from .sockets import Address, address_towards, closed_on_error, listening, remote_name
from .tasks import Tasks, loop_time

PURPOSE = "rendezvous"
SAY_AFTER_S = 10.0
"""A host that waits for others this long says for whom, once."""
_RETRY_S = 0.2
LISTEN_S = 5.0
"""How long node 0 waits for a port that an earlier launch may hold, and is about to leave."""
_log = logging.getLogger(__name__)


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """The files of an earlier job that a host sees: whose they are, and the snapshots that it can read, each with the
    generation in which it was taken."""

    job: str
    command: list[str]
    versions: dict[str, str]
    ranks_total: Count
    committed: tuple[tuple[Generation, Step], ...]  # those that were, in each generation
    holdings: tuple[tuple[Generation, Holding], ...]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The description that a node gives of itself. `control` and `bulk` are addresses they can reach."""

    node: NodeId
    host: str
    control: Address
    bulk: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1)]
    local_size: Count
    versions: dict[str, str]
    config_digest: str
    nonce: str = ""
    """Drawn anew by every process, so that no two jobs have the same hellos."""
    launch: str = ""
    """The launch that started it; a later one is larger. "" if it has no name: plain `deepspeed` gives its hosts
    nothing that differs from start to start, and Slurm's job and step may differ between hosts of one start."""
    stored: Stored | None = None


def job_id(hellos: Sequence[Hello]) -> str:
    """Make the id that tells this job from every other, also from one with the same command on the same hosts."""
    return hashlib.sha256(msgspec.msgpack.encode([(one.node, one.nonce) for one in hellos])).hexdigest()[:16]


Answer = list[Hello] | str
"""The table, or why there is none."""


async def meet(
    nodes_total: int, master: Address, hello: Hello, credentials: Credentials, timeout_s: float
) -> list[Hello]:
    """Exchange hellos at `master`. Returns: every node's, in the order of node ids.
    Raises: TransportError naming the nodes that did not come in time; PeerRefused if node 0 has another secret."""
    if hello.node == 0:
        return await _Host(nodes_total, master, hello, credentials).wait(timeout_s)
    try:
        async with asyncio.timeout(timeout_s * 1.05 + 1.0):
            return await _join(master, hello, credentials)
    except TimeoutError as error:
        raise TransportError(
            f"node {hello.node} was not given the address table by node 0 at {master[0]}:{master[1]} in "
            f"{timeout_s:g} s",
            remedy="check that node 0 runs and that MASTER_ADDR:MASTER_PORT can be reached from this host",
        ) from error


class _Host:
    """Node 0's side: collects hellos, then hands out the table."""

    def __init__(self, nodes_total: int, address: Address, hello: Hello, credentials: Credentials) -> None:
        self._nodes_total, self._address, self._hello, self._credentials = nodes_total, address, hello, credentials
        self._where = f"{address[0]}:{address[1]}"
        self._hellos: dict[NodeId, Hello] = {0: hello}
        self._socks: dict[NodeId, socket.socket] = {}
        self._changed = asyncio.Event()
        self._superseded = ""  # by the host of a later launch that has come here

    async def wait(self, timeout_s: float) -> list[Hello]:
        """Wait for all, and hand out the table. Raises: TransportError, which the nodes that have come are told."""
        listener = Listener(await self._listen(), PURPOSE, self._credentials, 0, self._greet, _log.warning)
        tasks = Tasks()
        tasks.start(listener.serve(tasks))
        try:
            await self._all_met(timeout_s, listener.refused)
            table = [self._hellos[node] for node in sorted(self._hellos)]
            await self._tell_all(table)
            return table
        except TransportError as failure:
            await self._tell_all(str(failure))
            raise
        finally:
            await tasks.end()
            listener.close()
            for sock in self._socks.values():
                sock.close()

    async def _all_met(self, timeout_s: float, refused: Mapping[str, str]) -> None:
        def say() -> None:  # a firewall, or an address that several hosts have, shows in nothing else for minutes
            _log.warning("still waiting at %s for node %s", self._where, self._missing())

        saying = asyncio.get_running_loop().call_later(SAY_AFTER_S, say)
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._hellos) < self._nodes_total and not self._superseded:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            reasons = "".join(f"; {reason}" for reason in refused.values())
            raise TransportError(
                f"only {len(self._hellos)} of {self._nodes_total} nodes met at {self._where} in {timeout_s:g} s, "
                f"missing: node {self._missing()}{reasons}",
                remedy="look at the output of the missing nodes' hosts",
            ) from error
        finally:
            saying.cancel()
        if self._superseded:
            raise TransportError(
                f"a later launch of this job has come from {self._superseded}: this one ends, which still waited "
                f"for node {self._missing()}"
            )

    async def _listen(self) -> socket.socket:
        """Listen at the port, from which an earlier launch is told to go. Raises: TransportError if it is taken."""
        deadline = loop_time() + LISTEN_S
        while True:
            try:
                return listening("", self._address[1])
            except OSError as error:
                is_taken = error.errno == errno.EADDRINUSE and self._hello.launch
                if not is_taken or loop_time() >= deadline:
                    raise TransportError(
                        f"node 0 cannot listen at MASTER_PORT {self._address[1]}: {error}",
                        remedy="choose another --master_port",
                    ) from error
            with contextlib.suppress(TransportError, OSError, EOFError):
                async with asyncio.timeout(_RETRY_S * 5):
                    await asked(self._address, self._credentials, PURPOSE, 0, self._hello, Answer)
            await asyncio.sleep(_RETRY_S)

    def _missing(self) -> str:
        return listed(node for node in range(self._nodes_total) if node not in self._hellos)

    async def _greet(self, sock: socket.socket, peer: NodeId) -> None:
        def refusal(reason: str, remedy: str = "") -> PeerRefused:
            return PeerRefused(reason, remedy=remedy, address=address)

        address = remote_name(sock)
        with closed_on_error(sock):
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello: Hello = await take(sock, Hello)
            ours, where = self._hello.launch, f"{hello.host} (node {hello.node})"
            if hello.launch and ours and hello.launch > ours:  # of two launches the earlier one ends
                self._superseded = hello.host
                self._changed.set()
                raise ConnectionClosed(f"{address} is of a later launch")
            if hello.launch and ours and hello.launch < ours:
                await put(sock, f"{where} is of an earlier launch, and another one has begun")
                raise refusal(f"processes of an earlier launch still wait at {where}: they are told to end")
            if hello.node != peer or not 0 < peer < self._nodes_total:
                raise refusal(f"refused {address}: it is node {hello.node}; expected 1..{self._nodes_total - 1}")
            if self._hellos.setdefault(peer, hello) != hello:
                other = self._hellos[peer].host
                raise refusal(
                    f"refused {address}: node {peer} is here already, from {other}",
                    "give every host its own --node_rank; if processes of an earlier start still wait on "
                    f"{other}, end them or choose another --master_port",
                )
        if peer in self._socks:
            self._socks[peer].close()
        self._socks[peer] = sock
        self._changed.set()

    async def _tell_all(self, answer: Answer) -> None:
        encoded = msgspec.Raw(msgspec.msgpack.encode(answer))

        async def tell(peer: NodeId, sock: socket.socket) -> None:
            try:
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    await put(sock, encoded)
            except OSError as error:  # it will be missing from the mesh, with an error that names it
                _log.warning("node %d left the rendezvous: %r", peer, error)

        await asyncio.gather(*(tell(peer, sock) for peer, sock in self._socks.items()))


async def _join(master: Address, hello: Hello, credentials: Credentials) -> list[Hello]:
    say_at, said = loop_time() + SAY_AFTER_S, False
    while True:
        try:
            answer: Answer = await asked(master, credentials, PURPOSE, hello.node, hello, Answer)
        except (ConnectionClosed, OSError, EOFError) as error:  # node 0 is not there yet, or was started again
            if not said and loop_time() >= say_at:
                said, hint = True, ""
                with contextlib.suppress(OSError, TransportError):
                    # deepspeed takes the first address of `hostname -I`, which every host may have (docker0, virbr0).
                    if address_towards(*master) == socket.getaddrinfo(*master)[0][4][0]:
                        hint = "; that is an address of this host, too: give --master_addr"
                _log.warning("node %d: node 0 at %s:%d does not answer yet (%s)%s", hello.node, *master, error, hint)
            await asyncio.sleep(_RETRY_S)
            continue
        if isinstance(answer, str):
            raise TransportError(f"node 0 gave up: {answer}")
        return answer
