"""The control mesh: one TCP connection between every two nodes, dialled by the larger node id.

Rules of this file: everything on one event loop; the handshake comes before the first frame; a refused peer is
told of once per host. Heartbeats and shards never share a connection (bulk has its own). Who is no member yet comes as
a guest (guests.py), proves the secret like everyone, and becomes a node only by being admitted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from ..core.messages import AnyMessage, Goodbye
from ..core.types import NodeId
from ..errors import CorruptFrame, PeerRefused, TransportError
from . import guests
from .exchange import put, take
from .framing import ConnectionClosed, FrameProtocol
from .guests import GUEST, PURPOSE, Admitted, Announce, Answer, OnGuest
from .handshake import Credentials, shake_hands_async
from .rendezvous import Hello
from .sockets import Address, bound_address, connected, listen_tcp, remote_name, tune

_RETRY_S = 0.1
_FLUSH_S = 1.0
DIALS_MAX = 16
"""Links a node begins at a time. With hundreds of nodes on hosts that are busy starting, handshakes begun all at once
wait for each other until their time is up; nodes that all begin with the same peer do so, too."""
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_log = logging.getLogger(__name__)

OnMessage = Callable[[NodeId, AnyMessage], None]
OnLost = Callable[[NodeId, str], None]


class ControlMesh:
    """Small typed messages between all nodes of a job, in order per pair, over links that fail loudly.

    Order of calls: `listen` once, `connect` once with every node's address (a host that joins a running job: `visit`
    each member instead), then `send` and the callbacks, `close` last.
    `on_message(node, message)` is called for each message received; `on_lost(node, reason)` once when the link to
    a node ends, unless the node said Goodbye, or was dropped by us, or the mesh is closed, or it dials us again because
    `connect` has not returned yet.
    Once `connect` was called, a node that is not in its table gets no link unless it was admitted (guests.py).

    Thread: the event loop's only.
    Args:
        credentials: shared; its `job` is known before `connect` or `visit` is called.
        bind_host: the interface to listen on; `listen` returns it ("" listens on all: tell the others another).
        port_range: ports to choose from (ends included); None lets the system choose.
        silent_after_s: a peer whose kernel acknowledges nothing for so long is lost.
        on_refused: gets each refused peer, once per host; the default logs it.
        on_guest: answers hosts that are no members.
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
        on_guest: OnGuest = guests.nobody_joins,
    ) -> None:
        self.timed_out: set[NodeId] = set()
        """Lost because their kernel answered no more, which is no sign that they are gone."""
        self._node = node
        self._credentials = credentials
        self._bind = (bind_host, port_range)
        self._on_message = on_message
        self._on_lost = on_lost
        self._silent_after_s = silent_after_s
        self._on_refused = on_refused
        self._on_guest = on_guest
        self._refused_hosts: set[str] = set()
        self._links: dict[NodeId, FrameProtocol] = {}
        self._barred: set[NodeId] = set()
        self._left: set[NodeId] = set()
        """Those that were linked and are no more, for good."""
        self._known: set[NodeId] | None = None  # None: anyone with the secret, before `connect` has said who
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._connecting = False
        self._listener: socket.socket | None = None
        self._closing = False

    @property
    def linked(self) -> frozenset[NodeId]:
        """Nodes to which there is a link now."""
        return frozenset(self._links)

    async def listen(self) -> Address:
        """Starts to accept links; the address to tell the others."""
        self._listener = listen_tcp(*self._bind)
        self._listener.setblocking(False)
        self._start(self._accept(self._listener))
        return bound_address(self._listener)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # too many open files, or the peer gave up: neither ends the mesh
                _log.warning("cannot accept a control connection: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            self._start(self._welcome(sock))

    async def _welcome(self, sock: socket.socket) -> None:
        try:
            await self._link(sock, dialled=None)
        except PeerRefused as error:
            self._tell_refused(error)
        except (TransportError, OSError) as error:  # it hung up, or is of another version
            _log.info("a control connection ended before it was a link: %s", error)

    def _tell_refused(self, error: PeerRefused) -> None:
        host = error.address.rpartition(":")[0]
        if host not in self._refused_hosts:
            self._refused_hosts.add(host)
            self._on_refused(error)

    async def _link(self, sock: socket.socket, dialled: NodeId | None) -> None:
        """Makes a link of a connected socket (or answers the guest at its other end), or closes it and raises."""
        try:
            sock.setblocking(False)
            tune(sock, self._silent_after_s)
            peer = await shake_hands_async(sock, self._credentials, PURPOSE, self._node, dialling=dialled is not None)
            address = remote_name(sock)
            if dialled is not None and peer != dialled:
                raise PeerRefused(f"{address} says it is node {peer}", f"node {dialled}", address=address)
            if peer == GUEST:
                return await self._entertain(sock)
            if why := self._objection(peer):
                raise PeerRefused(f"refused {address}: node {peer} {why}", address=address)
            if dialled is None and _has_ended(sock):
                raise ConnectionClosed(f"node {peer} gave the handshake up")
            await self._attach(sock, peer)
        except BaseException:
            sock.close()
            raise

    def _objection(self, peer: NodeId) -> str:
        """Why there must be no new link to `peer`, "" if there may."""
        if peer in self._barred:
            return "is lost to this job"
        if peer in self._links or peer == self._node:
            return "is linked already"
        return "" if self._known is None or peer in self._known else "was not admitted to this job (deadpool join)"

    async def _attach(self, sock: socket.socket, peer: NodeId) -> None:
        link = FrameProtocol(
            lambda body: self._received(peer, body),
            lambda reason: self._ended(peer, link, reason),
            lambda: self._made(peer, link),
        )
        await asyncio.get_running_loop().create_connection(lambda: link, sock=sock)

    async def _entertain(self, sock: socket.socket) -> None:
        """Answer a guest; link it if it is admitted. A promised link that fails is a lost one."""
        admitted = await guests.serve(sock, self._on_guest, self._is_new)
        if admitted is None:
            sock.close()
            return
        peer, answer = admitted
        self._known = (self._known or set()) | {peer}
        try:
            await put(sock, answer)
            await self._attach(sock, peer)
        except OSError as error:
            sock.close()
            self._on_lost(peer, f"it left while it was let in: {error}")

    def _is_new(self, node: NodeId) -> bool:
        known = self._known or set()
        return node not in known and node not in self._links and node not in self._barred and node != self._node

    async def visit(self, node: NodeId, address: Address, hello: Hello, timeout_s: float) -> Answer:
        """Announces this host, no member yet, to member `node`; if the answer is Admitted there is a link to it.

        Raises: ConnectionClosed if it does not answer in time; PeerRefused without the secret.
        """
        try:
            return await asyncio.wait_for(self._visit(node, address, hello), timeout_s)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            raise ConnectionClosed(f"node {node} at {address[0]}:{address[1]} does not answer: {error!r}") from error

    async def _visit(self, node: NodeId, address: Address, hello: Hello) -> Answer:
        sock = await connected(address)
        try:
            tune(sock, self._silent_after_s)
            peer = await shake_hands_async(sock, self._credentials, PURPOSE, GUEST, dialling=True)
            if peer != node:
                raise ConnectionClosed(f"node {peer} is where node {node} was")
            await put(sock, Announce(hello))
            answer: Answer = await take(sock, Answer)
            if not isinstance(answer, Admitted):
                sock.close()
                return answer
            self._known = (self._known or set()) | {node}
            await self._attach(sock, node)
            return answer
        except BaseException:
            sock.close()
            raise

    def _made(self, peer: NodeId, link: FrameProtocol) -> None:
        if peer in self._links:
            link.abort("a second link of the same node")
            return
        self._links[peer] = link
        self._changed.set()

    def _received(self, peer: NodeId, body: bytes) -> None:
        try:
            message = _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise CorruptFrame(f"node {peer} sent a message that cannot be read: {error}") from error
        if isinstance(message, Goodbye):
            self._barred.add(peer)
        self._on_message(peer, message)

    def _ended(self, peer: NodeId, link: FrameProtocol, reason: str) -> None:
        if self._links.get(peer) is not link:
            return
        del self._links[peer]
        self._changed.set()
        if link.timed_out:
            self.timed_out.add(peer)
        dials_again = self._connecting and peer > self._node  # it gave a handshake up that was done here
        if peer in self._barred or not dials_again:
            self._left.add(peer)
        if not (self._closing or peer in self._barred or dials_again):
            self._on_lost(peer, reason)

    async def connect(self, table: Mapping[NodeId, Address], timeout_s: float = 60.0) -> None:
        """Returns when there is a link to every node of `table` (the own entry is ignored), or was one to a node that
        has left meanwhile, or is lost, which was told.

        Raises: TransportError naming the nodes that are missing at the deadline; PeerRefused.
        """
        others = set(table) - {self._node}
        self._known, self._connecting = (self._known or set()) | others, True
        slots = asyncio.Semaphore(DIALS_MAX)
        older = sorted((node for node in others if node < self._node), reverse=True)
        dials = [asyncio.create_task(self._dial(node, table[node], slots)) for node in older]
        try:
            await asyncio.wait_for(self._all_linked(others, dials), timeout_s)
        except asyncio.TimeoutError as error:
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

    async def _all_linked(self, others: set[NodeId], dials: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*dials)
        while not others <= self.linked | self._left:
            self._changed.clear()
            await self._changed.wait()

    async def _dial(self, node: NodeId, address: Address, slots: asyncio.Semaphore) -> None:
        while True:
            async with slots:
                try:
                    return await self._link(await connected(address), dialled=node)
                except (ConnectionClosed, OSError) as error:
                    _log.info("node %d at %s does not answer yet: %s", node, address, error)
            await asyncio.sleep(_RETRY_S)

    def send(self, node: NodeId, message: AnyMessage) -> None:
        """Queues `message`; without a link it is dropped: that there is none was told. Blocks: never."""
        if node in self._links:
            self._links[node].send(msgspec.msgpack.encode(message))

    def drop(self, node: NodeId) -> None:
        """Ends the link to `node`, what is queued for it going first within a short deadline, and accepts none from it
        any more: it is lost to the world."""
        self._barred.add(node)
        link = self._links.get(node)
        if link is not None:
            link.close()
            asyncio.get_running_loop().call_later(_FLUSH_S, link.abort, "dropped")

    async def close(self, goodbye: AnyMessage | None = None) -> None:
        """Sends `goodbye` to everyone, sends what is queued within a short deadline, and ends all links."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        for node, link in list(self._links.items()):
            if goodbye is not None:
                self.send(node, goodbye)
            link.close()
        try:
            await asyncio.wait_for(self._all_ended(), _FLUSH_S)
        except asyncio.TimeoutError:
            for link in list(self._links.values()):
                link.abort("it does not read our last words")
            await self._all_ended()

    async def _all_ended(self) -> None:
        while self._links:
            self._changed.clear()
            await self._changed.wait()


def _has_ended(sock: socket.socket) -> bool:
    """Whether the other end of a non-blocking connection has closed it, and all it sent is read. Raises: OSError."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
