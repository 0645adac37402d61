"""Transfers between the stores of this node and of others: what is pushed, what is asked, and the server of both.

Rules of this file: connections are made on the event loop, what goes over them blocks threads. Pushes to one node go
over `LANES` connections side by side; those of one rank keep to one of them, and to their order. One that breaks is
made anew (one new attempt per push). A question has a connection and a thread of its own, so that a swap's fetch never
queues behind mirroring. The server empties a slot before its first new byte, seals it after the last has been verified,
and acknowledges after that. A refusal says why. A connection that broke its protocol is closed; its slot stays empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import xxhash

from ..config import Config
from ..core.types import Generation, Holding, NodeId, Rank, Source, Step
from ..errors import DeadpoolError, PeerRefused, StaleGeneration, TransportError
from ..transport.framing import ConnectionClosed
from ..transport.handshake import Credentials, Listener, dialled
from ..transport.sockets import Address, Port, closed_on_error, listen_tcp
from ..transport.tasks import Tasks, begin, loop_time, soon
from . import wire
from .arena import SlotPair, decode_header
from .records import HistoryPruned, NotHeld
from .store import CorruptSnapshot, NotEntered, SnapshotStore
from .wire import BulkStream

T = TypeVar("T")
OnMirrored = Callable[[Holding, Generation], None]
QUEUE_MAX = 256
BROKEN_TOLD_MAX = 32  # connections that broke the protocol that are told of
LANES = 4
"""Connections for pushes to one node, at most: one alone fills no fast network, nor several."""
AVOIDED_S = 60.0
"""For so long an address that has failed is not used while others do."""
_THREADS = 64  # at most: all lanes to all buddies, now and before a swap
_JOIN_S = 5.0
_log = logging.getLogger(__name__)


class BulkServer:
    """Answers other nodes until `close`, on a low-priority thread per connection. Such a thread calls `on_mirrored`."""

    def __init__(
        self,
        store: SnapshotStore,
        listeners: Sequence[socket.socket],
        credentials: Credentials,
        node: NodeId,
        silent_after_s: float,
        on_mirrored: OnMirrored,
        on_refused: Callable[[PeerRefused], None],
    ) -> None:
        self._store, self._on_mirrored, self._silent_after_s = store, on_mirrored, silent_after_s
        self._shortly_s = silent_after_s / 4  # whoever pushes must have an answer before it is out of patience
        self._broken, self._closing = 0, False
        self._lock, self._tasks = threading.Lock(), Tasks()
        self._served: dict[BulkStream, threading.Thread] = {}
        self._listeners = [
            Listener(one, wire.PURPOSE, credentials, node, self._welcome, on_refused, silent_after_s)
            for one in listeners
        ]
        self.addresses: list[Address] = [one.address for one in self._listeners]
        for one in self._listeners:
            self._tasks.start(one.serve(self._tasks))
        store.on_fence(self._cut_older)

    async def _welcome(self, sock: socket.socket, peer: NodeId) -> None:
        with closed_on_error(sock):
            stream = BulkStream(sock, self._silent_after_s)
            thread = threading.Thread(target=self._serve, args=(stream,), name="bulk-serve", daemon=True)
            with self._lock:
                self._served[stream] = thread
            try:
                thread.start()
            except RuntimeError as error:  # no more threads now: whoever asked tries again
                del self._served[stream]
                raise TransportError(f"no thread can be had for it: {error}") from error

    def _serve(self, stream: BulkStream) -> None:
        wire.lower_priority()
        try:
            while not self._closing:
                self._answer(stream, stream.recv(wire.requests, idle=True))
        except ConnectionClosed as error:
            _log.debug("%s", error)
        except (TransportError, OSError) as error:
            if not self._closing and self._broken < BROKEN_TOLD_MAX:
                self._broken += 1
                _log.warning("bulk connection ended: %s", error)
        finally:
            stream.close()
            with self._lock:
                del self._served[stream]

    def _answer(self, stream: BulkStream, request: wire.AnyRequest) -> None:
        store = self._store
        try:
            match request:
                case wire.Push():
                    self._receive_push(stream, request)
                case wire.PushRecording():
                    store.await_entry(request.generation, self._shortly_s)
                    store.put_recording(request.rank, request.recording, request.generation)
                    stream.send(wire.Done())
                case wire.GetRecording():
                    stream.send_records([store.recording(request.rank)])
                case wire.GetHistory():
                    stream.send_records(store.history(request.rank).get(request.first, request.last))
                case wire.GetHeader():
                    stream.send_records([store.readable(request.rank, request.step, payload=False).encoded])
                case wire.GetPayload():
                    self._send_payload(stream, request)
        except ConnectionClosed:
            raise
        except TransportError as error:  # the stream may be in the middle of a transfer: say why, and end it
            stream.send(wire.Refusal(str(error)))
            raise
        except DeadpoolError as error:
            stream.send(wire.Refusal(str(error), in_another_generation=isinstance(error, StaleGeneration | NotEntered)))

    def _send_payload(self, stream: BulkStream, request: wire.GetPayload) -> None:
        snapshot = self._store.readable(request.rank, request.step, payload=True)
        found = (snapshot.header.layout_hash, snapshot.header.payload_bytes)
        asked = (request.layout_hash, request.payload_bytes)
        if found != asked:
            raise NotHeld(f"rank {request.rank}, step {request.step} is laid out {found}, asked is {asked}")
        stream.send(wire.Ready(), more=True)
        with contextlib.suppress(NotHeld, CorruptSnapshot):  # which whoever asked is told
            stream.send_payload(snapshot.payload, lambda sums: self._store.check_read(snapshot, sums))

    def _receive_push(self, stream: BulkStream, push: wire.Push) -> None:
        rank, step, digest = push.rank, push.step, xxhash.xxh3_64_intdigest(push.header)
        self._store.await_entry(push.generation, self._shortly_s)
        with self._store.writing(rank, self._shortly_s):
            held = self._store.already_mirrored(rank, step, digest, push.with_payload)
            if held is None or held.replicas != push.replicas:
                held = self._receive_snapshot(stream, push)
                if held is None:
                    return
        self._on_mirrored(held, push.generation)  # before the sender knows
        stream.send(wire.Done())

    def _receive_snapshot(self, stream: BulkStream, push: wire.Push) -> Holding | None:
        """Fill and seal the slot; None if the sender abandoned it."""
        store, generation, header = self._store, push.generation, decode_header(push.header, push.rank, push.step)
        size = header.payload_bytes if push.with_payload else 0
        told = time.monotonic()

        def going_on() -> None:
            nonlocal told
            store.check_generation(generation)
            if time.monotonic() - told >= self._shortly_s:
                stream.send(wire.Wait())
                told = time.monotonic()

        pair = store.begin_mirror(push.rank, push.step, generation, push.header_bytes, size, going_on, push.before)
        stream.generation = generation
        try:
            store.check_generation(generation)  # a fence that has come before cuts nothing here
            history = store.history(push.rank)
            stream.send(wire.Ready(min(history.last, push.step - 1) if history.first < push.step else -1))
            records = stream.recv_records()
            sums = stream.recv_payload(pair.payload(push.step)[:size], lambda: store.check_generation(generation))
            holding = Holding(push.rank, push.step, push.with_payload, push.replicas, header.paired)
            store.finish_mirror(pair, push.header, generation, holding, records, sums)
            return holding
        except wire.RefusedByPeer as error:
            _log.debug("abandoned: %s", error)
            return None
        except StaleGeneration as error:
            raise TransportError(str(error)) from error
        finally:
            stream.generation = None

    def _cut_older(self, generation: Generation) -> None:
        with self._lock:
            for stream in self._served:
                if stream.generation is not None and stream.generation < generation:
                    stream.cut()

    async def close(self) -> None:
        """End all connections, and wait a few seconds at most for their threads."""
        self._closing = True
        await self._tasks.end()
        for listener in self._listeners:
            listener.close()
        with self._lock:
            served = dict(self._served)
        for stream in served:
            stream.cut()
        for thread in served.values():
            await asyncio.to_thread(thread.join, _JOIN_S)


class TransferFailed(DeadpoolError):
    """It is this node that could not carry a transfer out (a bug, no memory), whoever it was for."""


class SnapshotPush(msgspec.Struct, frozen=True):
    """An own snapshot to be mirrored."""

    rank: Rank
    step: Step
    generation: Generation
    with_payload: bool
    replicas: tuple[Rank, ...]
    layout_hash: str
    records: bytes  # of `step`; earlier ones that the peer lacks go along
    before: Step = -1  # the snapshot that is needed until this one is committed


class _Lane:
    """A connection that pushes use in turns."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.stream: BulkStream | None = None


class _Peer:
    """Another node's server, the connections to it, and those of them that are for pushes."""

    def __init__(self, node: NodeId, addresses: Sequence[Address]) -> None:
        self.node, self.addresses, self.closed = node, addresses, False
        self.lanes, self.waiting = [_Lane() for _ in range(LANES)], 0
        self.streams: dict[BulkStream, Address] = {}
        self.dials: dict[asyncio.Timeout, Address] = {}
        self._failed: dict[Address, float] = {}

    def __str__(self) -> str:
        return " or ".join(f"{host}:{port}" for host, port in self.addresses)

    def address(self) -> Address:
        """Choose for a new connection: the address with the fewest, of those that have not failed lately if any."""
        forgiven = loop_time() - AVOIDED_S
        good = [one for one in self.addresses if self._failed.get(one, forgiven) <= forgiven]
        of_each = Counter([*self.streams.values(), *self.dials.values()])
        return min(good, key=of_each.__getitem__) if good else min(self.addresses, key=self._failed.__getitem__)

    def fails(self, address: Address) -> None:
        self._failed[address] = loop_time()

    def release(self, stream: BulkStream) -> None:
        self.streams.pop(stream, None)
        stream.close()

    async def close(self) -> None:
        self.closed = True
        for stream in self.streams:
            stream.cut()
        for dial in self.dials:
            if not dial.expired():
                dial.reschedule(0.0)
        for lane in self.lanes:
            async with lane.turn:  # after those that wait for theirs, which are answered with an error
                if lane.stream is not None:
                    self.release(lane.stream)


class BulkTransfers:
    """Transfers between the stores of this node and of others (the simulator has its own). Thread: the event loop's.

    What waits for another node raises TransportError if it does not answer, RefusedByPeer if it says no. Nothing is
    tried again. What has begun goes on if its caller is cancelled. The server listens at each of `hosts`.
    """

    def __init__(
        self, node: NodeId, credentials: Credentials, store: SnapshotStore, hosts: Sequence[str], config: Config
    ) -> None:
        self._node, self._credentials, self._store = node, credentials, store
        self._hosts, self._port_range, self._silent_after_s = hosts, config.port_range, config.slow_after_s
        self._pushing = ThreadPoolExecutor(_THREADS, "deadpool-push", wire.lower_priority)
        self._asking = ThreadPoolExecutor(_THREADS, "deadpool-ask")
        self._addresses: dict[NodeId, Sequence[Address]] = {}
        self._peers: dict[NodeId, _Peer] = {}
        self._server: BulkServer | None = None

    def serve(self, on_mirrored: OnMirrored, on_refused: Callable[[PeerRefused], None]) -> list[Port]:
        """Let other nodes mirror and ask here. Returns: the port at each of `hosts`. Raises: ConfigError."""
        loop = asyncio.get_running_loop()
        self._server = BulkServer(
            self._store, [listen_tcp(host, self._port_range) for host in self._hosts], self._credentials, self._node,
            self._silent_after_s, lambda *mirrored: soon(loop, on_mirrored, *mirrored), on_refused,
        )  # fmt: skip
        return [port for _, port in self._server.addresses]

    def know(self, node: NodeId, addresses: Sequence[Address]) -> None:
        """Spread what goes to `node` (this one included: its own server answers) over its `addresses`; where one fails,
        use the others."""
        self._addresses[node] = addresses

    def _to(self, node: NodeId) -> _Peer:
        if (peer := self._peers.get(node)) is None:
            peer = self._peers[node] = _Peer(node, self._addresses[node])
        return peer

    async def _connect(self, peer: _Peer) -> BulkStream:
        """Connect to one of the node's addresses, each of which has its part of the patience."""
        failures = list[str]()
        while len(failures) < len(peer.addresses) and not (failures and peer.closed):
            address = peer.address()
            try:
                async with asyncio.timeout(self._silent_after_s / len(peer.addresses)) as dial:
                    peer.dials[dial] = address
                    sock, found = await dialled(address, self._credentials, wire.PURPOSE, self._node)
                with closed_on_error(sock):
                    if found != peer.node:
                        raise ConnectionClosed(f"node {found} is where node {peer.node} was")
                    stream = BulkStream(sock, self._silent_after_s)
            except (OSError, ConnectionClosed) as error:
                failures.append(f"no bulk connection to {address[0]}:{address[1]}: {error!r}")
                peer.fails(address)
                continue
            finally:
                peer.dials.pop(dial, None)
            peer.streams[stream] = address
            if peer.closed:
                stream.cut()
            return stream
        raise ConnectionClosed("; ".join(failures))

    # ---- pushes

    async def push(self, node: NodeId, push: SnapshotPush) -> None:
        """Mirror an own snapshot at `node`, which has sealed it on return. Pushes of one rank go in their order.

        Raises: InAnotherGeneration, NotHeld, CorruptSnapshot, TransferFailed.
        """
        await self._push(self._to(node), push.rank, lambda stream: self._send_snapshot(stream, push))

    async def push_recording(self, node: NodeId, rank: Rank, generation: Generation, recording: bytes) -> None:
        """Have `node` hold the recording of the rank's start-up collectives."""

        def send(stream: BulkStream) -> None:
            stream.send(wire.PushRecording(rank, generation, recording))
            stream.expect(wire.Done)

        await self._push(self._to(node), rank, send)

    async def _push(self, peer: _Peer, rank: Rank, work: Callable[[BulkStream], None]) -> None:
        if peer.waiting >= QUEUE_MAX:
            raise TransportError(f"{QUEUE_MAX} transfers to {peer} wait already")

        lane = peer.lanes[rank % LANES]

        async def pushed() -> None:
            try:
                async with lane.turn:
                    await self._try_twice(peer, lane, work)
            finally:
                peer.waiting -= 1

        peer.waiting += 1
        await asyncio.shield(begin(pushed()))

    async def _try_twice(self, peer: _Peer, lane: _Lane, work: Callable[[BulkStream], None]) -> None:
        """Do `work` over the connection, or over a new one if that fails: it may have been dead for long."""
        failure: DeadpoolError = ConnectionClosed(f"the connection to {peer} is closed")
        may_be_dead = True
        while may_be_dead and not peer.closed:
            may_be_dead = lane.stream is not None
            try:
                stream = lane.stream = lane.stream or await self._connect(peer)
                return await asyncio.get_running_loop().run_in_executor(self._pushing, work, stream)
            except DeadpoolError as error:
                # One of our own comes before anything was sent, or with a Refusal: the connection is as good as before.
                if isinstance(error, wire.RefusedByPeer) or not isinstance(error, TransportError):
                    raise
                failure = error
            except Exception as error:  # the next job is another one
                failure = TransferFailed(f"a transfer to {peer} failed here: {error!r}")
            if lane.stream is not None:
                if not may_be_dead:
                    peer.fails(peer.streams[lane.stream])
                peer.release(lane.stream)
                lane.stream = None
        raise failure

    def _send_snapshot(self, stream: BulkStream, push: SnapshotPush) -> None:
        rank, step = push.rank, push.step
        self._store.check_generation(push.generation)
        snapshot = self._store.readable(rank, step, payload=push.with_payload)
        if snapshot.header.layout_hash != push.layout_hash:
            raise NotHeld(f"rank {rank}, step {step} has layout {snapshot.header.layout_hash}", push.layout_hash)
        header = snapshot.pair.header_bytes, snapshot.encoded
        stream.send(wire.Push(rank, step, push.generation, push.replicas, *header, push.with_payload, push.before))
        answer = stream.expect(wire.Ready, wire.Done)
        if isinstance(answer, wire.Ready):
            stream.send_records(self._records(push, answer.history_last))
            stream.send_payload(snapshot.payload, lambda sums: self._store.check_read(snapshot, sums))
            stream.expect(wire.Done)

    def _records(self, push: SnapshotPush, history_last: Step) -> list[bytes]:
        """Get records that end at the pushed step and close the peer's gap, as far back as they are held."""
        history = self._store.history(push.rank)
        if 0 <= (first := history.first) < push.step <= history.last + 1:
            with contextlib.suppress(HistoryPruned):  # just now, by another thread: the peer's history begins anew
                return [*history.get(max(first, history_last + 1), push.step - 1), push.records]
        return [push.records]

    # ---- questions

    async def _ask(self, node: NodeId, request: wire.AnyRequest, receive: Callable[[BulkStream], T]) -> T:
        def work(stream: BulkStream) -> T:
            stream.send(request)
            return receive(stream)

        async def asked() -> T:
            peer = self._to(node)
            stream = await self._connect(peer)
            try:
                return await asyncio.get_running_loop().run_in_executor(self._asking, work, stream)
            except TransportError as error:
                if not isinstance(error, wire.RefusedByPeer):
                    peer.fails(peer.streams[stream])
                raise
            finally:
                peer.release(stream)

        return await asyncio.shield(begin(asked()))

    async def get_recording(self, node: NodeId, rank: Rank) -> bytes:
        return await self._ask(node, wire.GetRecording(rank), BulkStream.recv_record)

    async def get_history(self, node: NodeId, rank: Rank, first: Step, last: Step) -> list[bytes]:
        """Ask `node` for the call records of first..last."""
        return await self._ask(node, wire.GetHistory(rank, first, last), BulkStream.recv_records)

    async def fetch(self, source: Source, step: Step, into: SlotPair, generation: Generation) -> None:
        """Make `into` hold snapshot (source.rank, step) from the nodes that `source` names.

        Raises: StaleGeneration once `generation` is over; the slot is then invalid, or as it was.
        """
        encoded = await self._ask(source.header_node, wire.GetHeader(source.rank, step), BulkStream.recv_record)
        header = decode_header(encoded, source.rank, step)
        if into.payload_bytes != header.payload_bytes:
            raise TransportError(f"slots of {into.payload_bytes} bytes for a payload of {header.payload_bytes} bytes")
        self._store.check_generation(generation)
        into.invalidate(step)
        view = into.payload(step)

        def receive(stream: BulkStream) -> None:
            stream.expect(wire.Ready)
            stream.recv_payload(view, lambda: self._store.check_generation(generation))
            self._store.check_generation(generation)
            into.seal_encoded(step, encoded)

        asked = wire.GetPayload(source.payload_rank, step, header.layout_hash, header.payload_bytes)
        await self._ask(source.payload_node, asked, receive)

    # ---- the end

    async def forget(self, nodes: tuple[NodeId, ...]) -> None:
        """End everything that still waits for `nodes`, which are lost."""
        gone = [self._peers.pop(node) for node in nodes if node in self._peers]
        await asyncio.gather(*(peer.close() for peer in gone))

    async def close(self) -> None:
        """End the server and every connection; threads that do not end are left behind."""
        if self._server is not None:
            await self._server.close()
        await self.forget(tuple(self._peers))
        for threads in (self._pushing, self._asking):
            threads.shutdown(wait=False, cancel_futures=True)
