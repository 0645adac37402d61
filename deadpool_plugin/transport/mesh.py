"""The control mesh: one TCP connection between every two nodes, dialled by the larger node id.

Rules of this file: everything on one event loop; the handshake comes before the first frame; a refused peer is
told of once per host. Heartbeats and shards never share a connection (bulk has its own). Who is no member yet comes as
a guest (join_protocol.py), proves the secret like everyone, and becomes a node only by being admitted. A connection
that ends is made again (renewal.py); if only the smaller node has seen it end it dials, too, and what that says is:
dial me.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Mapping

import msgspec

from ..core.messages import AnyMessage, Goodbye
from ..core.types import NodeId
from ..errors import CorruptFrame, PeerRefused, TransportError
from . import join_protocol, links
from .exchange import put
from .framing import ConnectionClosed, FrameProtocol, why_unreadable
from .handshake import Credentials, Unproven
from .join_protocol import GUEST, Admitted, Answer, OnGuest
from .reliable_channel import Line
from .rendezvous import Hello
from .renewal import YOUNG_S, Renewals
from .sockets import Address, bound_address, closed_on_error, connected, listen_tcp, remote_name
from .tasks import Tasks, begin

_RETRY_S = 0.1
_FLUSH_S = 1.0
REFUSED_HOSTS_MAX = 32
"""Refusals that are told of: a host that can forge addresses has more of them than we have memory."""
DIALS_MAX = 16
"""Links a node begins at a time. With hundreds of nodes on hosts that are busy starting, handshakes begun all at once
wait for each other until their time is up; nodes that all begin with the same peer do so, too."""
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_log = logging.getLogger(__name__)


OnMessage = Callable[[NodeId, AnyMessage], None]
OnLost = Callable[[NodeId, str], None]


def _not_said(node: NodeId, reason: str) -> None: ...


class ControlMesh:
    """Small typed messages between all nodes of a job, in order and once per pair, over links that fail loudly.

    Order of calls: `listen` once, `connect` once with every node's address (a host that joins a running job: `visit`
    each member instead), then `send` and the callbacks, `close` last.
    `on_message(node, message)` is called for each message received; `on_lost(node, reason)` once when the link to
    a node has ended and cannot be made again, unless the node said Goodbye, or was dropped by us, or the mesh is
    closed. Nobody listens where a process was killed: that is known within milliseconds. A host of which nothing is
    heard has `silent_after_s`.
    Once `connect` was called, a node that is not in its table gets no link unless it was admitted (join_protocol.py).

    Thread: the event loop's only.
    Args:
        credentials: shared; its `job` is known before `connect` or `visit` is called.
        bind_host: the interface to listen on; `listen` returns it ("" listens on all: tell the others another).
        port_range: ports to choose from (ends included); None lets the system choose.
        silent_after_s: a peer whose kernel acknowledges nothing for so long is lost.
        on_refused: gets each refused peer, once per host; the default logs it.
        on_guest: answers hosts that are no members.
        on_still_silent: called with a node that was lost for its silence, and why, whenever it has not answered since.
    """

    def __init__(
        self,
        node: NodeId,
        credentials: Credentials,
        bind_host: str,
        port_range: tuple[int, int] | None,
        on_message: OnMessage,
        on_lost: OnLost,
        silent_after_s: float = 10.0,
        on_refused: Callable[[PeerRefused], None] = _log.warning,
        on_guest: OnGuest = join_protocol.nobody_joins,
        on_still_silent: OnLost = _not_said,
    ) -> None:
        self.silent: set[NodeId] = set()
        """Lost because they answer no more, or count us as lost: no sign that they are gone."""
        self._node = node
        self._credentials = credentials
        self._bind = (bind_host, port_range)
        self._on_message = on_message
        self._on_lost = on_lost
        self._silent_after_s = silent_after_s
        self._on_refused = on_refused
        self._on_guest = on_guest
        self._refused_hosts: set[str] = set()
        self._lines: dict[NodeId, Line] = {}
        self._addresses: dict[NodeId, Address] = {}
        self._gone: set[NodeId] = set()
        """There is no link with them any more, for good, or none to come: lost, dropped, or they have said Goodbye."""
        self._renewals = Renewals(
            node, self._addresses, self._dial, self._is_wanted, self._lose, on_still_silent, patience_s=silent_after_s
        )
        self._dials = asyncio.Semaphore(DIALS_MAX)
        self._known: set[NodeId] | None = None  # None: anyone with the secret, before `connect` has said who
        self._tasks = Tasks()
        self._unproven = Unproven()
        self._changed = asyncio.Event()
        self._connecting = False
        self._listener: socket.socket | None = None
        self._closing = False

    @property
    def linked(self) -> frozenset[NodeId]:
        """Nodes to which there is a link now, or one that is being made again."""
        return frozenset(self._links()) | self._renewals.nodes

    def _links(self) -> dict[NodeId, FrameProtocol]:
        return {node: line.link for node, line in self._lines.items() if line.link is not None}

    async def listen(self) -> Address:
        """Starts to accept links; the address to tell the others."""
        self._listener = listen_tcp(*self._bind)
        self._listener.setblocking(False)
        self._tasks.start(self._accept(self._listener))
        return bound_address(self._listener)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # too many open files, or the peer gave up: neither ends the mesh
                self._unproven.cannot_accept("control", error)
                await asyncio.sleep(_RETRY_S)
                continue
            self._tasks.start(self._welcome(sock))
            await asyncio.sleep(0)  # accepting one that waits already does not let others run

    async def _welcome(self, sock: socket.socket) -> None:
        try:
            await self._let_in(sock)
        except PeerRefused as error:
            self._tell_refused(error)
        except (TransportError, OSError) as error:  # it hung up, or is of another version
            _log.info("a control connection ended before it was a link: %s", error)

    def _tell_refused(self, error: PeerRefused) -> None:
        host = error.address.rpartition(":")[0]
        if host not in self._refused_hosts and len(self._refused_hosts) < REFUSED_HOSTS_MAX:
            self._refused_hosts.add(host)
            self._on_refused(error)

    async def _let_in(self, sock: socket.socket) -> None:
        """Makes a link of a connection that was accepted, dials who is to be dialled, or answers a guest; or raises."""
        with self._unproven.held(sock):
            peer = await links.greet(sock, self._node, self._credentials, self._silent_after_s)
        if peer == GUEST:
            return await self._entertain(sock)
        if why := self._objection(peer):
            address = remote_name(sock)
            await links.turn_away(sock)
            if peer in self._gone:
                raise ConnectionClosed(f"node {peer} {why}")
            raise PeerRefused(f"refused {address}: node {peer} {why}", address=address)
        await links.welcome(sock, peer)
        if peer > self._node:
            await self._attach(sock, peer)
        else:
            sock.close()
            self._renewals.asked(peer, self._lines.get(peer))

    def _objection(self, peer: NodeId) -> str:
        """Why there must be no new link to `peer`, "" if there may."""
        if peer in self._gone:
            return "is lost to this job"
        if peer == self._node or (peer in self._lines and peer not in self._addresses):
            return "is linked already"
        return "" if self._known is None or peer in self._known else "was not admitted to this job (deadpool join)"

    async def _attach(self, sock: socket.socket, peer: NodeId) -> None:
        link = FrameProtocol(
            lambda frame: self._received(peer, link, frame),
            lambda reason: self._ended(peer, link, reason),
            lambda: self._made(peer, link),
        )
        attaching = asyncio.get_running_loop().create_connection(lambda: link, sock=sock)
        await asyncio.shield(begin(attaching))  # cancelled, it would close a link that carries messages already

    async def _entertain(self, sock: socket.socket) -> None:
        """Answer a guest; link it if it is admitted. A promised link that fails is a lost one."""
        admitted = await join_protocol.serve(sock, self._on_guest, self._is_new)
        if admitted is None:
            return
        hello, answer = admitted
        self._expect(hello.node, hello.control)
        try:
            with closed_on_error(sock):
                await put(sock, answer)
        except OSError as error:
            self._lose(hello.node, f"it left while it was let in: {error}")
            return
        await self._attach(sock, hello.node)

    def _expect(self, node: NodeId, address: Address) -> None:
        """`node` may be linked from now on."""
        self._known = self._known or set()
        self._known.add(node)
        self._addresses[node] = address

    def _is_wanted(self, node: NodeId) -> bool:
        """Return whether there may be a link to `node` now."""
        return not self._closing and node not in self._gone

    def _is_new(self, node: NodeId) -> bool:
        return node not in (self._known or set()) | self._gone | self._lines.keys() | {self._node}

    async def visit(self, node: NodeId, address: Address, hello: Hello, timeout_s: float) -> Answer:
        """Announces this host, no member yet, to member `node`; if the answer is Admitted there is a link to it.

        Raises: ConnectionClosed if it does not answer in time; PeerRefused without the secret.
        """
        try:
            async with asyncio.timeout(timeout_s):
                sock, answer = await join_protocol.announce(
                    node, address, hello, self._credentials, self._silent_after_s
                )
        except (OSError, EOFError) as error:
            raise ConnectionClosed(f"node {node} at {address[0]}:{address[1]} does not answer: {error!r}") from error
        if isinstance(answer, Admitted):
            self._expect(node, address)
            await self._attach(sock, node)
        else:
            sock.close()
        return answer

    def _made(self, peer: NodeId, link: FrameProtocol) -> None:
        line = self._lines.get(peer)
        if not self._is_wanted(peer) or (line is not None and peer not in self._addresses):
            link.abort("the node was lost, or this is its second link")
            return
        self._lines.setdefault(peer, Line()).carry(link, "made again")
        self._changed.set()

    def _received(self, peer: NodeId, link: FrameProtocol, frame: bytes) -> None:
        line = self._lines.get(peer)
        body = line.hear(frame) if line is not None and line.link is link else None  # else it comes again
        if body is None:
            return
        try:
            message = _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise CorruptFrame(f"node {peer}: {why_unreadable(error, body, AnyMessage)}") from error
        if isinstance(message, Goodbye):
            self._gone.add(peer)
        self._on_message(peer, message)

    def _ended(self, peer: NodeId, link: FrameProtocol, reason: str) -> None:
        line = self._lines.get(peer)
        if line is None or line.link is not link:
            return
        had_s, was_aborted = line.age_s, link.aborted
        line.carry(None)
        self._changed.set()
        if not self._is_wanted(peer):
            del self._lines[peer]
        elif was_aborted or peer not in self._addresses:
            self._lose(peer, reason)
        elif not (self._connecting and peer > self._node):  # which dials again by itself
            self._renewals.begin(peer, line, reason, 0.0 if had_s >= YOUNG_S else _RETRY_S)

    def _lose(self, peer: NodeId, reason: str, silent: bool = False) -> None:
        self._lines.pop(peer, None)
        self._gone.add(peer)
        self._changed.set()
        if silent:
            self.silent.add(peer)
        self._on_lost(peer, reason)

    async def connect(self, table: Mapping[NodeId, Address], timeout_s: float = 60.0) -> None:
        """Returns when there is a link to every node of `table` (the own entry is ignored), or was one to a node that
        has left meanwhile, or is lost, which was told. All of them listened when they met.

        Raises: TransportError naming the nodes that are missing at the deadline; PeerRefused.
        """
        others = set(table) - {self._node}
        self._known, self._connecting = self._known or set(), True
        for node in others:
            self._expect(node, table[node])
        older = sorted((node for node in others if node < self._node), reverse=True)
        dials = [asyncio.create_task(self._dial_until_linked(node)) for node in older]
        dials += [asyncio.create_task(self._lose_if_gone(node, len(table))) for node in sorted(others)]
        for dial in dials:
            dial.add_done_callback(lambda _: self._changed.set())
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_linked(others, dials)
        except TimeoutError as error:
            missing = ", ".join(f"{node} at {table[node]}" for node in sorted(others - self.linked))
            raise TransportError(
                f"node {self._node} has no control link to node {missing} after {timeout_s:g} s",
                remedy="check that these nodes run and that no firewall blocks the ports (port_range)",
            ) from error
        finally:
            self._connecting = False
            for dial in dials:
                dial.cancel()
            await asyncio.gather(*dials, return_exceptions=True)
        for node, line in self._lines.items():
            if line.link is None:
                self._renewals.begin(node, line, "it ended while this node waited for others")

    async def _all_linked(self, others: set[NodeId], dials: list[asyncio.Task[None]]) -> None:
        while not others <= self.linked | self._gone:
            self._changed.clear()
            await self._changed.wait()
            for dial in dials:
                if dial.done():
                    dial.result()

    async def _dial_until_linked(self, node: NodeId) -> None:
        while node not in self._gone:
            try:
                return await self._dial(node)
            except (ConnectionClosed, OSError) as error:
                _log.info("node %d at %s does not answer yet: %s", node, self._addresses[node], error)
            await asyncio.sleep(_RETRY_S)

    async def _lose_if_gone(self, node: NodeId, total: int) -> None:
        """Count a node that dies or stands still while the hosts link up as lost, like any later. Count nobody as long
        as fewer than half of them are linked: the network is at fault then, which is told at the deadline."""
        loop, unlinked_s, failing_s = asyncio.get_running_loop(), 0.0, 0.0
        await asyncio.sleep(YOUNG_S * (1 + (node + self._node) % 8 / 8))  # not all nodes at a time
        while node not in self._gone:
            began = loop.time()
            await asyncio.sleep(YOUNG_S)
            why, silent = ("", False) if node in self.linked else await self._why_unreachable(node)
            took_s = loop.time() - began
            if node in self.linked or took_s > self._silent_after_s + 2 * YOUNG_S:  # for now; or this node stood still
                unlinked_s = failing_s = 0.0
                continue
            unlinked_s += took_s
            failing_s = failing_s + took_s if why else 0.0
            if not why and unlinked_s >= 2 * self._silent_after_s:
                why, silent = "it accepts connections and does not answer", True
            elif silent and failing_s < self._silent_after_s:
                continue
            if why and node not in self._gone and 2 * (len(self.linked | self._gone) + 1) >= total:
                hint = "if it lives, check that no firewall blocks the ports (port_range)"
                reason = f"no control link to it since the hosts met: {why}; {hint}"
                self._lose(node, reason, silent)
                if silent:
                    self._renewals.ask_still(node, reason)

    async def _why_unreachable(self, node: NodeId) -> tuple[str, bool]:
        """Ask `node` for a connection. Returns: why there is none, and whether that is only its silence; "" if there is
        one, or if it is this node that has no descriptor for it."""
        try:
            async with asyncio.timeout(self._silent_after_s):
                (await connected(self._addresses[node])).close()
        except ConnectionRefusedError:
            return "nobody listens there any more", False
        except OSError as error:
            return ("", False) if error.errno in (errno.EMFILE, errno.ENFILE) else (f"no answer ({error!r})", True)
        return "", False

    async def _dial(self, node: NodeId) -> None:
        """Makes a link to `node`, or asks it to, if it is larger. Raises: as `links.dial`."""
        address = self._addresses[node]
        async with self._dials if node < self._node else contextlib.nullcontext():  # only asking costs little
            sock = await links.dial(node, address, self._node, self._credentials, self._silent_after_s)
            if node < self._node:
                await self._attach(sock, node)
            else:
                sock.close()

    def send(self, node: NodeId, message: AnyMessage) -> None:
        """Queues `message`; without a link it is dropped: that there is none was told. Blocks: never."""
        if node in self._lines and node not in self._gone:
            self._lines[node].say(msgspec.msgpack.encode(message))

    def drop(self, node: NodeId) -> None:
        """Ends the link to `node`, what is queued for it going first within a short deadline, and accepts none from it
        any more: it is lost to the world."""
        self._gone.add(node)
        self._renewals.stop(node)
        line = self._lines.get(node)
        if line is not None and line.link is not None:
            line.link.close()
            asyncio.get_running_loop().call_later(_FLUSH_S, line.link.abort, "dropped")
        else:
            self._lines.pop(node, None)

    async def close(self, goodbye: AnyMessage | None = None) -> None:
        """Sends `goodbye` to everyone, sends what is queued within a short deadline, and ends all links."""
        self._closing = True
        await self._tasks.end()
        await self._renewals.close()
        if self._listener is not None:
            self._listener.close()
        for node, link in self._links().items():
            if goodbye is not None:
                self.send(node, goodbye)
            link.close()
        try:
            async with asyncio.timeout(_FLUSH_S):
                await self._all_ended()
        except TimeoutError:
            for link in self._links().values():
                link.abort("it does not read our last words")
            await self._all_ended()

    async def _all_ended(self) -> None:
        while self._links():
            self._changed.clear()
            await self._changed.wait()
