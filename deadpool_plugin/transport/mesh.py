"""The control mesh: one TCP connection between every two nodes that need one, dialled by the larger node id.

Rules of this file: a link is made at the start, or kept, or made for the first message to a node, which waits for it.
The handshake comes before the first frame. Heartbeats and shards never share a connection (bulk has its own). A host
that is no member yet comes as a guest (join_protocol.py), and becomes a node by being admitted.

A connection that ends is made again: the larger node dials; the smaller one, if only it has seen the end, dials too,
which says: dial me. A node that is asked in vain for `silent_after_s` is lost as silent; one where nobody listens
any more, or somebody else does, or that wants no link, is lost at once. A node lost as silent gets no link again, but
is asked for a connection until it is dropped, and that it gives none is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from ..core.api import LinkLost
from ..core.messages import AnyMessage, Goodbye
from ..core.types import NodeId
from ..errors import PeerRefused, TransportError
from .first_links import LOOKS, LOOKS_MAX, FirstLinks
from .framing import ConnectionClosed, FrameProtocol, ReliableChannel, answered, decoded, put, take
from .handshake import HANDSHAKE_TIMEOUT_S, Credentials, Listener, dialled
from .join_protocol import GUEST, PURPOSE, Admitted, Announce, Answer, NotAdmitted, Question
from .rendezvous import Hello
from .sockets import Address, closed_on_error, connected, listen_tcp, remote_name, why_unreachable
from .tasks import Tasks, begin, loop_time

_RETRY_S = 0.1
_FLUSH_S = 1.0
_AGAIN_S, _AGAIN_MAX_S = 0.01, 0.2  # after an attempt to make a link again that fails: the first pause, the longest
_UNASKED_S = 0.1  # a node that has lost a link which the other end dials waits so long before it asks
YOUNG_S = 1.0
"""If our link is younger than this, the peer is reporting the previous one; keep ours."""
_ASKS = 2  # of a silent node, within its patience
_QUIETS = 1.5  # in so many times its patience a node whose host answers has said nothing: its link is made again
PROBES_MAX = 64
"""Connections asked for at a time, only to see whether kernels answer: whoever is cut off asks for all the others'."""
DIALS_MAX = 16
"""Links a node begins at a time: among hundreds of nodes on busy hosts, handshakes begun all at once time out."""
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_log = logging.getLogger(__name__)


class NotWanted(PeerRefused):
    """A node of this job counts us as lost, or does not know us."""


class ControlMesh:
    """Small typed messages between all nodes of a job, in order and once per pair, over links that fail loudly.

    Call `listen`, then `connect` with every node's address (a host that joins a running job: `visit` each member
    instead), then `send`, and `close` last. From `connect` on only its nodes get links, and those that are admitted.
    The end of a node without a link is not noticed.
    Thread: the event loop's only.

    Args:
        credentials: shared; its `job` is known before `connect` or `visit` is called.
        bind_host, port_range: as for `listen_tcp` (for "" tell the others another address).
        on_lost: called once when the link to a node has ended for good, unless the node said Goodbye, or was dropped
            by us, or the mesh is closed; of a node lost for its silence again whenever it has not answered since.
        silent_after_s: a peer whose kernel acknowledges nothing for so long is lost.
        on_answered: called with how long ago the kernel of a node that `ask` names has answered, if it has.
    """

    def __init__(
        self,
        node: NodeId,
        credentials: Credentials,
        bind_host: str,
        port_range: tuple[int, int] | None,
        on_message: Callable[[NodeId, AnyMessage], None],
        on_lost: Callable[[LinkLost], None],
        silent_after_s: float = 10.0,
        on_refused: Callable[[PeerRefused], None] = _log.warning,
        on_guest: Callable[[Question], Answer] = lambda question: NotAdmitted("no host can join here"),
        on_answered: Callable[[NodeId, float], None] = lambda node, ago_s: None,
    ) -> None:
        self._node, self._credentials, self._bind = node, credentials, (bind_host, port_range)
        self._on_message, self._on_lost, self._on_guest = on_message, on_lost, on_guest
        self._on_refused, self._silent_after_s, self._on_answered = on_refused, silent_after_s, on_answered
        self._channels: dict[NodeId, ReliableChannel] = {}
        self._addresses: dict[NodeId, Address] = {}
        """The addresses of all nodes that may be linked; while it is empty anyone with the secret may be."""
        self._gone: set[NodeId] = set()
        """Lost, or dropped, or they have said Goodbye: there is no link with them to come."""
        self._attempts: dict[NodeId, asyncio.Task[None]] = {}
        """To make a link again, or (of those in `_gone`) to hear of a silent node."""
        self._tasks, self._dials = Tasks(), asyncio.Semaphore(DIALS_MAX)
        self._probes = 0  # under way
        self.changed = asyncio.Event()
        self._newest: tuple[AnyMessage | None, bytes] = (None, b"")
        self._connecting = self._closing = False
        self._listener: Listener | None = None

    @property
    def linked(self) -> frozenset[NodeId]:
        """The nodes to which there is a link, or one that is being made again."""
        return frozenset(filter(self.is_linked, {*self._channels, *self._attempts}))

    @property
    def gone(self) -> frozenset[NodeId]:
        """The nodes with which there will be no link any more."""
        return frozenset(self._gone)

    def is_linked(self, node: NodeId) -> bool:
        channel = self._channels.get(node)
        return (channel is not None and channel.connection is not None) or (
            node in self._attempts and node not in self._gone
        )

    def _links(self) -> dict[NodeId, FrameProtocol]:
        return {node: one.connection for node, one in self._channels.items() if one.connection is not None}

    # ---- links that others begin

    async def listen(self) -> Address:
        """Starts to accept links. Returns: the address to tell the others."""
        self._listener = Listener(
            listen_tcp(*self._bind), PURPOSE, self._credentials, self._node, self._let_in, self._on_refused,
            self._silent_after_s,
        )  # fmt: skip
        self._tasks.start(self._listener.serve(self._tasks))
        return self._listener.address

    async def _let_in(self, sock: socket.socket, peer: NodeId) -> None:
        if peer == GUEST:
            return await self._entertain(sock)
        why, address = self._objection(peer), remote_name(sock)
        with closed_on_error(sock):
            with contextlib.suppress(BlockingIOError):  # it waits for our word
                if not why and not sock.recv(1, socket.MSG_PEEK):
                    raise ConnectionClosed(f"node {peer} gave the handshake up")
            await put(sock, not why)  # whether there is to be a link
            if why and peer in self._gone:
                raise ConnectionClosed(f"node {peer} {why}")
            if why:
                raise PeerRefused(f"refused {address}: node {peer} {why}", address=address)
        if peer > self._node:
            return await self._attach(sock, peer)
        sock.close()
        if peer not in self._channels:
            return self._begin(peer)
        channel, reason = self._channels[peer], "the other end has lost the link"  # even if we still have one
        if channel.connection is not None and channel.age_s >= YOUNG_S:
            channel.use(None, reason)
        if channel.connection is None:
            self._renew(peer, channel, reason)

    def _objection(self, peer: NodeId) -> str:
        """Return why there must be no new link to `peer`, "" if there may be."""
        if peer in self._gone:
            return "is lost to this job"
        if peer == self._node or (peer in self._channels and peer not in self._addresses):
            return "is linked already"
        admitted = not self._addresses or peer in self._addresses
        return "" if admitted else "was not admitted to this job (deadpool join)"

    async def _entertain(self, sock: socket.socket) -> None:
        with closed_on_error(sock):
            while True:
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    question: Question = await take(sock, Question)  # until it leaves
                hello = question.hello if isinstance(question, Announce) else None
                known = self._addresses.keys() | self._gone | self._channels.keys() | {self._node}
                if hello is not None and hello.node in known:
                    answer: Answer = NotAdmitted(f"node {hello.node} is or was a node of this job")
                else:
                    answer = self._on_guest(question)
                if hello is not None and isinstance(answer, Admitted):
                    break
                await put(sock, answer)
            self._addresses[hello.node] = hello.control
            try:
                await put(sock, answer)
            except OSError as error:  # a promised link that fails is a lost one
                self.lose(hello.node, f"it left while it was let in: {error}")
                raise
        await self._attach(sock, hello.node)

    def _is_wanted(self, node: NodeId) -> bool:
        return not self._closing and node not in self._gone

    async def _attach(self, sock: socket.socket, peer: NodeId) -> None:
        link = FrameProtocol(
            lambda frame: self._received(peer, link, frame),
            lambda reason: self._ended(peer, link, reason),
            lambda: self._made(peer, link),
        )
        attaching = asyncio.get_running_loop().create_connection(lambda: link, sock=sock)
        await asyncio.shield(begin(attaching))  # cancelled, it would close a link that carries messages already

    def _made(self, peer: NodeId, link: FrameProtocol) -> None:
        if not self._is_wanted(peer) or (peer in self._channels and peer not in self._addresses):
            link.abort("the node was lost, or this is its second link")
            return
        self._channels.setdefault(peer, ReliableChannel()).use(link, "made again")
        self.changed.set()

    def _received(self, peer: NodeId, link: FrameProtocol, frame: bytes) -> None:
        channel = self._channels.get(peer)
        if channel is None or channel.connection is not link or (body := channel.receive(frame)) is None:
            return  # it comes again, or has come before
        message = decoded(_decoder, body)
        if isinstance(message, Goodbye):
            self._gone.add(peer)
        self._on_message(peer, message)

    def _ended(self, peer: NodeId, link: FrameProtocol, reason: str) -> None:
        channel = self._channels.get(peer)
        if channel is None or channel.connection is not link:
            return
        had_s, was_aborted = channel.age_s, link.aborted
        channel.use(None)
        self.changed.set()
        if not self._is_wanted(peer):
            del self._channels[peer]
        elif was_aborted or peer not in self._addresses:
            self.lose(peer, f"link lost: {reason}")
        elif not (self._connecting and peer > self._node):  # which dials again by itself
            self._renew(peer, channel, reason, 0.0 if had_s >= YOUNG_S else _RETRY_S)

    def lose(self, peer: NodeId, reason: str, silent: bool = False) -> None:
        self._channels.pop(peer, None)
        self._gone.add(peer)
        self.changed.set()
        self._on_lost(LinkLost(peer, reason, silent))
        if silent:
            self._attempts[peer] = self._tasks.start(self._ask_still(peer, reason))

    async def dial(self, node: NodeId) -> None:
        """Makes a link to `node`, or asks it to, if it is larger. Raises: PeerRefused, ConnectionClosed, OSError."""
        address = self._addresses[node]
        async with self._dials if node < self._node else contextlib.nullcontext():  # only asking costs little
            sock, found = await dialled(address, self._credentials, PURPOSE, self._node, self._silent_after_s)
            with closed_on_error(sock):
                where = remote_name(sock)
                if found != node:
                    raise PeerRefused(f"{where} says it is node {found}", f"node {node}", address=where)
                async with answered(HANDSHAKE_TIMEOUT_S, f"node {node} did not let us in"):
                    is_wanted: bool = await take(sock, bool)
                if not is_wanted:
                    raise NotWanted(f"node {node} at {where} wants no link with node {self._node}", address=where)
            if node < self._node:
                await self._attach(sock, node)
            else:
                sock.close()

    # ---- links made again

    def keep(self, nodes: Iterable[NodeId]) -> None:
        """Begins a link to each of `nodes` that may have one and has none."""
        for node in nodes:
            if node not in self._channels and node in self._addresses and self._is_wanted(node):
                self._begin(node)

    def _begin(self, peer: NodeId) -> None:
        channel = self._channels[peer] = ReliableChannel()
        self._renew(peer, channel, "")

    def _renew(self, peer: NodeId, channel: ReliableChannel, reason: str, after_s: float = 0.0) -> None:
        """Makes the link of `channel`, unless that is under way. `reason`: why it has ended, "" for the first one."""
        if peer not in self._attempts:
            self._attempts[peer] = self._tasks.start(self._make_again(peer, channel, reason, after_s))

    async def _make_again(self, peer: NodeId, channel: ReliableChannel, reason: str, after_s: float) -> None:
        why, silent, again_s = "no answer", True, _AGAIN_S
        deadline = loop_time() + self._silent_after_s
        try:
            await asyncio.sleep(after_s)
            while channel.connection is None and self._is_wanted(peer) and loop_time() < deadline:
                try:
                    async with asyncio.timeout(deadline - loop_time()):
                        # That nobody listens there is known before it is this link's turn.
                        (await connected(self._addresses[peer])).close()
                        if peer < self._node:
                            await self.dial(peer)
                        elif not await channel.is_up_within(_UNASKED_S):
                            async with contextlib.nullcontext() if reason else self._dials:  # there may be hundreds
                                if channel.connection is None:
                                    await self.dial(peer)
                            await channel.is_up_within(YOUNG_S)
                except ConnectionRefusedError:
                    raise
                except (ConnectionClosed, OSError) as error:  # who is being ended may still listen
                    _log.info("node %d does not answer now: %r", peer, error)
                    await asyncio.sleep(again_s)
                again_s = min(2 * again_s, _AGAIN_MAX_S)
        except ConnectionRefusedError:
            why, silent = "nobody listens there", False
        except NotWanted:
            why = "it wants none"
        except TransportError as error:  # somebody else is there
            why, silent = str(error), False
        # Nothing is awaited between the last look at the link and the end of this.
        self._attempts.pop(peer, None)
        if channel.connection is not None and reason:
            _log.warning("the link to node %d had ended (%s) and was made again", peer, reason)
        elif channel.connection is None and self._is_wanted(peer):
            self.lose(peer, f"link lost: {reason}; no new link: {why}" if reason else f"no link to it: {why}", silent)

    async def _ask_still(self, peer: NodeId, reason: str) -> None:
        """Says whenever `peer`, which was lost for its silence, gives no connection. One that refuses answers, too."""
        every_s = self._silent_after_s / _ASKS
        while True:
            began = loop_time()
            if (await why_unreachable(self._addresses[peer], every_s))[1]:
                self._on_lost(LinkLost(peer, reason, silent=True, still=True))
            await asyncio.sleep(max(0.0, began + every_s - loop_time()))

    # ---- signs of life

    def ask(self, node: NodeId, within_s: float) -> None:
        """Tells `on_answered` if the kernel of `node` answers. Blocks: never.

        It has on the link within half of `within_s`, or else by a new connection, which nobody has to accept, within
        all of it.
        """
        channel = self._channels.get(node)
        ago_s = channel.connection.unheard_s[1] if channel is not None and channel.connection is not None else math.inf
        if ago_s < within_s / 2:
            self._answered(node, ago_s, within_s)
        elif node in self._addresses and self._probes < PROBES_MAX and not self._closing:
            self._probes += 1
            self._tasks.start(self._probe(node, within_s))

    async def _probe(self, node: NodeId, within_s: float) -> None:
        began = loop_time()
        try:
            async with asyncio.timeout(within_s):
                (await connected(self._addresses[node])).close()
        except ConnectionRefusedError:
            pass  # its end is told by the end of its link
        except OSError:
            return
        finally:
            self._probes -= 1
        self._answered(node, loop_time() - began, within_s)

    def _answered(self, node: NodeId, ago_s: float, within_s: float) -> None:
        self._on_answered(node, ago_s)
        channel, quiet_s = self._channels.get(node), _QUIETS * within_s
        if channel is None or channel.connection is None or not self._is_wanted(node) or channel.age_s < quiet_s:
            return
        if channel.connection.unheard_s[0] >= quiet_s:
            # A path that is lost to this connection alone, or TCP that has backed off: a new one does better.
            reason = f"nothing came over it for {quiet_s:g} s, and its host answers"
            channel.use(None, reason)
            self._renew(node, channel, reason)

    async def look_around(self, nodes: Collection[NodeId]) -> None:
        """Asks those of `nodes` to which there is no link for a connection. One that gives none is lost, as if a link
        to it had ended."""

        looks = asyncio.Semaphore(LOOKS_MAX)
        apart_s = self._silent_after_s / LOOKS
        await asyncio.sleep(apart_s * (self._node % LOOKS_MAX / LOOKS_MAX))  # not all nodes at a time

        async def look(node: NodeId) -> None:
            async with looks:
                why, silent = await why_unreachable(self._addresses[node], self._silent_after_s)
            if why and node not in self._channels and self._is_wanted(node):
                self.lose(node, f"it was asked for a connection: {why}", silent)

        unlinked = [node for node in nodes if node not in self._channels and node in self._addresses]
        await asyncio.gather(*(look(node) for node in unlinked if self._is_wanted(node)))

    # ---- links at the start

    async def connect(
        self, table: Mapping[NodeId, Address], timeout_s: float = 60.0, wanted: Collection[NodeId] | None = None
    ) -> None:
        """Waits until every node of `table` (but this one), or of those that are `wanted`, is linked, or has left, or
        is lost, which was told. Raises: TransportError naming the nodes that are missing at the deadline; PeerRefused.
        """
        self._addresses |= table
        first = FirstLinks(self, self._node, table, table if wanted is None else wanted, self._silent_after_s)
        self._connecting = True
        try:
            await first.made(timeout_s)
        finally:
            self._connecting = False
        for node, channel in self._channels.items():
            if channel.connection is None:
                self._renew(node, channel, "it ended while this node waited for others")

    async def visit(self, node: NodeId, address: Address, hello: Hello, timeout_s: float) -> Answer:
        """Announces this host, no member yet, to member `node`; if the answer is Admitted there is a link to it.
        Raises: ConnectionClosed if it does not answer in time; PeerRefused without the secret."""
        async with answered(timeout_s, f"node {node} at {address[0]}:{address[1]} does not answer"):
            sock, peer = await dialled(address, self._credentials, PURPOSE, GUEST, self._silent_after_s)
            with closed_on_error(sock):
                if peer != node:
                    raise ConnectionClosed(f"node {peer} is where node {node} was")
                await put(sock, Announce(hello))
                answer: Answer = await take(sock, Answer)
        if isinstance(answer, Admitted):
            self._addresses[node] = address
            await self._attach(sock, node)
        else:
            sock.close()
        return answer

    # ---- messages and the end

    def send(self, node: NodeId, message: AnyMessage, makes_link: bool = True) -> None:
        """Queues `message`; where there is no link, nor one to be made, it is dropped. Blocks: never."""
        if makes_link and node not in self._channels:
            self.keep((node,))
        if node in self._channels and node not in self._gone:
            self._channels[node].send(self._encoded(message))

    def _encoded(self, message: AnyMessage) -> bytes:
        """Encode once what is sent to one node after another."""
        if message is not self._newest[0]:
            self._newest = message, msgspec.msgpack.encode(message)
        return self._newest[1]

    def drop(self, node: NodeId) -> None:
        """Ends the link to `node`, which is lost to the world, for good; what is queued goes first, for a moment."""
        self._gone.add(node)
        if (attempt := self._attempts.pop(node, None)) is not None:
            attempt.cancel()
        channel = self._channels.get(node)
        if channel is not None and channel.connection is not None:
            channel.connection.close()
            asyncio.get_running_loop().call_later(_FLUSH_S, channel.connection.abort, "dropped")
        else:
            self._channels.pop(node, None)

    async def close(self, goodbye: AnyMessage | None = None) -> None:
        """Sends `goodbye` to everyone, sends what is queued within a short deadline, and ends all links."""
        self._closing = True
        await self._tasks.end()
        if self._listener is not None:
            self._listener.close()
        for node, link in self._links().items():
            if goodbye is not None:
                self.send(node, goodbye)
            link.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await self._all_ended()
        for link in self._links().values():
            link.abort("it does not read our last words")
        await self._all_ended()

    async def _all_ended(self) -> None:
        while self._links():
            self.changed.clear()
            await self.changed.wait()
