"""The control mesh: one TCP connection between every two nodes, dialled by the larger node id.

Rules of this file: everything on one event loop; the handshake comes before the first frame; a refused peer is
told of once per host. Heartbeats and shards never share a connection (bulk has its own). Who is no member yet comes as
a guest (guests.py), proves the secret like everyone, and becomes a node only by being admitted. A connection that ends
is made again (lines.py); if only the smaller node has seen it end it dials, too, and what that says is: dial me.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from ..core.messages import AnyMessage, Goodbye
from ..core.types import NodeId
from ..errors import CorruptFrame, PeerRefused, TransportError
from . import guests
from .exchange import put, put_frame, take, take_frame
from .framing import ConnectionClosed, FrameProtocol
from .guests import GUEST, PURPOSE, Admitted, Announce, Answer, OnGuest
from .handshake import HANDSHAKE_TIMEOUT_S, Credentials, shake_hands_async
from .lines import Line
from .rendezvous import Hello
from .sockets import Address, bound_address, connected, listen_tcp, remote_name, tune

_RETRY_S = 0.1
_AGAIN_S = 0.01
_UNASKED_S = 0.1
"""Who has lost a link that it does not dial itself waits so long before it asks."""
_FLUSH_S = 1.0
_YOUNG_S = 1.0
"""A link that was made no longer ago is not the one that the other end has lost: it has not seen this one yet."""
_WELCOME, _NOT_WANTED = b"welcome", b"not wanted"
"""What who was dialled says once it knows by whom, and whether there is to be a link."""
DIALS_MAX = 16
"""Links a node begins at a time. With hundreds of nodes on hosts that are busy starting, handshakes begun all at once
wait for each other until their time is up; nodes that all begin with the same peer do so, too."""
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_log = logging.getLogger(__name__)


class NotWanted(PeerRefused):
    """A node of this job counts us as lost, or does not know us."""


OnMessage = Callable[[NodeId, AnyMessage], None]
OnLost = Callable[[NodeId, str], None]


class ControlMesh:
    """Small typed messages between all nodes of a job, in order and once per pair, over links that fail loudly.

    Order of calls: `listen` once, `connect` once with every node's address (a host that joins a running job: `visit`
    each member instead), then `send` and the callbacks, `close` last.
    `on_message(node, message)` is called for each message received; `on_lost(node, reason)` once when the link to
    a node has ended and cannot be made again, unless the node said Goodbye, or was dropped by us, or the mesh is
    closed. Nobody listens where a process was killed: that is known within milliseconds. A host of which nothing is
    heard has `silent_after_s`.
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
        self._renewals: dict[NodeId, asyncio.Task[None]] = {}
        self._dials = asyncio.Semaphore(DIALS_MAX)
        self._known: set[NodeId] | None = None  # None: anyone with the secret, before `connect` has said who
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._connecting = False
        self._listener: socket.socket | None = None
        self._closing = False

    @property
    def linked(self) -> frozenset[NodeId]:
        """Nodes to which there is a link now, or one that is being made again."""
        return frozenset(self._links()) | frozenset(self._renewals)

    def _links(self) -> dict[NodeId, FrameProtocol]:
        return {node: line.link for node, line in self._lines.items() if line.link is not None}

    async def listen(self) -> Address:
        """Starts to accept links; the address to tell the others."""
        self._listener = listen_tcp(*self._bind)
        self._listener.setblocking(False)
        self._start(self._accept(self._listener))
        return bound_address(self._listener)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

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
            await self._let_in(sock)
        except PeerRefused as error:
            self._tell_refused(error)
        except (TransportError, OSError) as error:  # it hung up, or is of another version
            _log.info("a control connection ended before it was a link: %s", error)

    def _tell_refused(self, error: PeerRefused) -> None:
        host = error.address.rpartition(":")[0]
        if host not in self._refused_hosts:
            self._refused_hosts.add(host)
            self._on_refused(error)

    async def _let_in(self, sock: socket.socket) -> None:
        """Makes a link of a connection that was accepted, dials who is to be dialled, or answers a guest; or raises."""
        try:
            sock.setblocking(False)
            tune(sock, self._silent_after_s)
            peer = await shake_hands_async(sock, self._credentials, PURPOSE, self._node, dialling=False)
            if peer == GUEST:
                return await self._entertain(sock)
            address = remote_name(sock)
            if why := self._objection(peer):
                await put_frame(sock, _NOT_WANTED)
                if peer in self._gone:
                    raise ConnectionClosed(f"node {peer} {why}")
                raise PeerRefused(f"refused {address}: node {peer} {why}", address=address)
            if _has_ended(sock):
                raise ConnectionClosed(f"node {peer} gave the handshake up")
            await put_frame(sock, _WELCOME)
        except BaseException:
            sock.close()
            raise
        if peer > self._node:
            await self._attach(sock, peer)
        else:
            sock.close()
            self._asked_to_dial(peer)

    async def _link(self, sock: socket.socket, dialled: NodeId) -> None:
        """Makes a link of a connection to `dialled`, or has it dial if it is larger; or closes the connection, raising.

        Raises: NotWanted, PeerRefused, ConnectionClosed, OSError.
        """
        try:
            tune(sock, self._silent_after_s)
            peer = await shake_hands_async(sock, self._credentials, PURPOSE, self._node, dialling=True)
            address = remote_name(sock)
            if peer != dialled:
                raise PeerRefused(f"{address} says it is node {peer}", f"node {dialled}", address=address)
            if await asyncio.wait_for(take_frame(sock), HANDSHAKE_TIMEOUT_S) != _WELCOME:
                raise NotWanted(f"node {peer} at {address} wants no link with node {self._node}", address=address)
        except (EOFError, asyncio.TimeoutError) as error:
            sock.close()
            raise ConnectionClosed(f"node {dialled} did not let us in: {error!r}") from error
        except BaseException:
            sock.close()
            raise
        if dialled < self._node:
            await self._attach(sock, dialled)
        else:
            sock.close()

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
        await asyncio.get_running_loop().create_connection(lambda: link, sock=sock)

    async def _entertain(self, sock: socket.socket) -> None:
        """Answer a guest; link it if it is admitted. A promised link that fails is a lost one."""
        admitted = await guests.serve(sock, self._on_guest, self._is_new)
        if admitted is None:
            sock.close()
            return
        hello, answer = admitted
        self._expect(hello.node, hello.control)
        try:
            await put(sock, answer)
        except OSError as error:
            sock.close()
            self._lose(hello.node, f"it left while it was let in: {error}")
            return
        await self._attach(sock, hello.node)

    def _expect(self, node: NodeId, address: Address) -> None:
        """`node` may be linked from now on."""
        self._known = self._known or set()
        self._known.add(node)
        self._addresses[node] = address

    def _is_new(self, node: NodeId) -> bool:
        return node not in (self._known or set()) | self._gone | self._lines.keys() | {self._node}

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
        except BaseException:
            sock.close()
            raise
        if isinstance(answer, Admitted):
            self._expect(node, address)
            await self._attach(sock, node)
        else:
            sock.close()
        return answer

    def _made(self, peer: NodeId, link: FrameProtocol) -> None:
        line = self._lines.get(peer)
        if self._closing or peer in self._gone or (line is not None and peer not in self._addresses):
            link.abort("lost meanwhile, or a second link of the same node")
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
            raise CorruptFrame(f"node {peer} sent a message that cannot be read: {error}") from error
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
        if self._closing or peer in self._gone:
            del self._lines[peer]
        elif was_aborted or peer not in self._addresses:
            self._lose(peer, reason)
        elif not (self._connecting and peer > self._node):  # which dials again by itself
            self._renew(peer, reason, 0.0 if had_s >= _YOUNG_S else _RETRY_S)

    def _lose(self, peer: NodeId, reason: str, silent: bool = False) -> None:
        self._lines.pop(peer, None)
        self._gone.add(peer)
        self._changed.set()
        if silent:
            self.silent.add(peer)
        self._on_lost(peer, reason)

    # ---- links that end, made again

    def _renew(self, peer: NodeId, reason: str, after_s: float = 0.0) -> None:
        if peer not in self._renewals:
            self._renewals[peer] = self._start(self._make_again(peer, reason, after_s))

    def _asked_to_dial(self, peer: NodeId) -> None:
        line, reason = self._lines.get(peer), "the other end has lost it"
        if line is not None and line.link is not None and line.age_s >= _YOUNG_S:
            line.carry(None, reason)
        if line is not None and line.link is None:
            self._renew(peer, reason)

    async def _make_again(self, peer: NodeId, reason: str, after_s: float) -> None:
        """Nothing is awaited between the last look at the link and the end of this."""
        loop, line = asyncio.get_running_loop(), self._lines[peer]
        why, silent, deadline = "no answer", True, loop.time() + self._silent_after_s
        try:
            await asyncio.sleep(after_s)
            while line.link is None and not self._closing and peer not in self._gone and loop.time() < deadline:
                await self._try(peer, line, deadline - loop.time())
        except ConnectionRefusedError:
            why, silent = "nobody listens there", False
        except NotWanted:
            why = "it wants none"
        except TransportError as error:  # somebody else is there
            why, silent = str(error), False
        self._renewals.pop(peer, None)
        if line.link is not None:
            _log.warning("the link to node %d had ended (%s) and was made again", peer, reason)
        elif not (self._closing or peer in self._gone):
            self._lose(peer, f"{reason}; no new link: {why}", silent)

    async def _try(self, peer: NodeId, line: Line, within_s: float) -> None:
        """One attempt. Raises: ConnectionRefusedError if nobody listens there; TransportError if it is in vain."""
        try:
            await asyncio.wait_for(self._dial_again(peer, line), within_s)
        except ConnectionRefusedError:
            raise
        except (ConnectionClosed, OSError, asyncio.TimeoutError) as error:  # who is being ended may still listen
            _log.info("node %d does not answer now: %r", peer, error)
            await asyncio.sleep(_AGAIN_S)

    async def _dial_again(self, peer: NodeId, line: Line) -> None:
        address = self._addresses[peer]
        (await connected(address)).close()  # where nobody listens that is known before it is this link's turn
        if peer < self._node:
            async with self._dials:
                await self._link(await connected(address), peer)
        elif not await _is_set_within(line.up, _UNASKED_S):
            await self._link(await connected(address), peer)
            await _is_set_within(line.up, _YOUNG_S)

    async def connect(self, table: Mapping[NodeId, Address], timeout_s: float = 60.0) -> None:
        """Returns when there is a link to every node of `table` (the own entry is ignored), or was one to a node that
        has left meanwhile, or is lost, which was told.

        Raises: TransportError naming the nodes that are missing at the deadline; PeerRefused.
        """
        others = set(table) - {self._node}
        self._known, self._connecting = self._known or set(), True
        for node in others:
            self._expect(node, table[node])
        older = sorted((node for node in others if node < self._node), reverse=True)
        dials = [asyncio.create_task(self._dial(node, table[node])) for node in older]
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
        for node, line in self._lines.items():
            if line.link is None:
                self._renew(node, "it ended while others were awaited")

    async def _all_linked(self, others: set[NodeId], dials: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*dials)
        while not others <= self.linked | self._gone:
            self._changed.clear()
            await self._changed.wait()

    async def _dial(self, node: NodeId, address: Address) -> None:
        while True:
            async with self._dials:
                try:
                    return await self._link(await connected(address), node)
                except (ConnectionClosed, OSError) as error:
                    _log.info("node %d at %s does not answer yet: %s", node, address, error)
            await asyncio.sleep(_RETRY_S)

    def send(self, node: NodeId, message: AnyMessage) -> None:
        """Queues `message`; without a link it is dropped: that there is none was told. Blocks: never."""
        if node in self._lines and node not in self._gone:
            self._lines[node].say(msgspec.msgpack.encode(message))

    def drop(self, node: NodeId) -> None:
        """Ends the link to `node`, what is queued for it going first within a short deadline, and accepts none from it
        any more: it is lost to the world."""
        self._gone.add(node)
        if (renewal := self._renewals.pop(node, None)) is not None:
            renewal.cancel()
        line = self._lines.get(node)
        if line is not None and line.link is not None:
            line.link.close()
            asyncio.get_running_loop().call_later(_FLUSH_S, line.link.abort, "dropped")
        else:
            self._lines.pop(node, None)

    async def close(self, goodbye: AnyMessage | None = None) -> None:
        """Sends `goodbye` to everyone, sends what is queued within a short deadline, and ends all links."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        for node, link in self._links().items():
            if goodbye is not None:
                self.send(node, goodbye)
            link.close()
        try:
            await asyncio.wait_for(self._all_ended(), _FLUSH_S)
        except asyncio.TimeoutError:
            for link in self._links().values():
                link.abort("it does not read our last words")
            await self._all_ended()

    async def _all_ended(self) -> None:
        while self._links():
            self._changed.clear()
            await self._changed.wait()


async def _is_set_within(event: asyncio.Event, limit_s: float) -> bool:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), limit_s)
    return event.is_set()


def _has_ended(sock: socket.socket) -> bool:
    """Whether the other end of a non-blocking connection has closed it, and all it sent is read. Raises: OSError."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
