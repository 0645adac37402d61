"""Transfers between the stores of this node and of others: snapshots and recordings pushed, what is asked, the server.

Rules of this file: connections are made on the event loop, what goes over them blocks threads. Pushes to one node take
turns on one connection that is made anew when it breaks (one new attempt per push). A question has a connection and a
thread of its own, so that a swap's fetch never queues behind mirroring.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from ..config import Config
from ..core.types import Generation, Holding, NodeId, Rank, Source, Step
from ..errors import DeadpoolError, PeerRefused, TransportError
from ..transport.framing import ConnectionClosed
from ..transport.handshake import Credentials, dialled
from ..transport.sockets import Address, Port, closed_on_error
from ..transport.tasks import begin, soon
from . import wire
from .arena import SlotPair, decode_header
from .records import HistoryPruned, NotHeld
from .server import BulkServer
from .store import SnapshotStore
from .wire import BulkStream

T = TypeVar("T")
QUEUE_MAX = 256
_THREADS = 16


class TransferFailed(DeadpoolError):
    """It is this node that could not carry a transfer out (a bug, no memory), whoever it was for."""


class SnapshotPush(msgspec.Struct, frozen=True):
    """An own snapshot to be mirrored. `records`: those of `step`; earlier ones that the peer lacks go along."""

    rank: Rank
    step: Step
    generation: Generation
    with_payload: bool
    replicas: tuple[Rank, ...]
    layout_hash: str
    records: bytes


class _Peer:
    """Another node's server, the connections to it, and the one of them that pushes use in turns."""

    def __init__(self, address: Address) -> None:
        self.address, self.closed = address, False
        self.turn, self.waiting = asyncio.Lock(), 0
        self.stream: BulkStream | None = None
        self.streams: set[BulkStream] = set()
        self.dials: set[asyncio.Timeout] = set()

    def release(self, stream: BulkStream) -> None:
        self.streams.discard(stream)
        stream.close()

    async def close(self) -> None:
        self.closed = True
        for stream in self.streams:
            stream.cut()
        for dial in self.dials:
            if not dial.expired():
                dial.reschedule(0.0)
        async with self.turn:  # after those that wait for theirs, which are answered with an error
            if self.stream is not None:
                self.release(self.stream)


class BulkTransfers:
    """Transfers between the stores of this node and of others. Thread: the event loop's only.

    What waits for another node raises TransportError if it does not answer, RefusedByPeer if it says no. Nothing is
    tried again. What has begun goes on if its caller is cancelled. The server listens at `bind_host`.
    """

    def __init__(
        self, node: NodeId, credentials: Credentials, store: SnapshotStore, bind_host: str, config: Config
    ) -> None:
        self._node, self._credentials, self._store = node, credentials, store
        self._bind, self._silent_after_s = (bind_host, config.port_range), config.patience_s
        self._pushing = ThreadPoolExecutor(_THREADS, "deadpool-push", wire.lower_priority)
        self._asking = ThreadPoolExecutor(_THREADS, "deadpool-ask")
        self._addresses: dict[NodeId, Address] = {}
        self._peers: dict[NodeId, _Peer] = {}
        self._server: BulkServer | None = None

    def serve(
        self, on_mirrored: Callable[[Holding, Generation], None], on_refused: Callable[[PeerRefused], None]
    ) -> Port:
        """Let other nodes mirror and ask here, at the port that is returned. Raises: ConfigError.

        `on_mirrored` is called for each snapshot that has arrived whole, before its sender is told.
        """
        loop = asyncio.get_running_loop()
        self._server = BulkServer(
            self._store, self._credentials, *self._bind, lambda *mirrored: soon(loop, on_mirrored, *mirrored),
            self._node, self._silent_after_s, on_refused,
        )  # fmt: skip
        return self._server.address[1]

    def know(self, node: NodeId, address: Address) -> None:
        """Use `address` for `node`, this one included: its own server answers."""
        self._addresses[node] = address

    def _to(self, node: NodeId) -> _Peer:
        if node not in self._peers:
            self._peers[node] = _Peer(self._addresses[node])
        return self._peers[node]

    async def _connect(self, peer: _Peer) -> BulkStream:
        try:
            async with asyncio.timeout(self._silent_after_s) as dial:
                peer.dials.add(dial)
                sock, _ = await dialled(peer.address, self._credentials, wire.PURPOSE, self._node)
        except OSError as error:
            raise ConnectionClosed(f"no bulk connection to {peer.address}: {error!r}") from error
        finally:
            peer.dials.discard(dial)
        with closed_on_error(sock):
            stream = BulkStream(sock, self._silent_after_s)
        peer.streams.add(stream)
        if peer.closed:
            stream.cut()
        return stream

    # ---- pushes

    async def push(self, node: NodeId, push: SnapshotPush) -> None:
        """Mirror an own snapshot at `node`, which has sealed it on return. Pushes to one node go in their order.

        Raises: InAnotherGeneration, NotHeld, CorruptSnapshot, TransferFailed.
        """
        await self._push(self._to(node), lambda stream: self._send_snapshot(stream, push))

    async def push_recording(self, node: NodeId, rank: Rank, generation: Generation, recording: bytes) -> None:
        """Have `node` hold the recording of the rank's start-up collectives."""

        def send(stream: BulkStream) -> None:
            stream.send(wire.PushRecording(rank, generation, recording))
            stream.expect(wire.Done)

        await self._push(self._to(node), send)

    async def _push(self, peer: _Peer, work: Callable[[BulkStream], None]) -> None:
        if peer.waiting >= QUEUE_MAX:
            raise TransportError(f"{QUEUE_MAX} transfers to {peer.address} wait already")

        async def pushed() -> None:
            try:
                async with peer.turn:
                    await self._try_twice(peer, work)
            finally:
                peer.waiting -= 1

        peer.waiting += 1
        await asyncio.shield(begin(pushed()))

    async def _try_twice(self, peer: _Peer, work: Callable[[BulkStream], None]) -> None:
        """Do `work` over the connection, or over a new one if that fails: it may have been dead for long."""
        failure: DeadpoolError = ConnectionClosed(f"the connection to {peer.address} is closed")
        may_be_dead = True
        while may_be_dead and not peer.closed:
            may_be_dead = peer.stream is not None
            try:
                stream = peer.stream = peer.stream or await self._connect(peer)
                return await asyncio.get_running_loop().run_in_executor(self._pushing, work, stream)
            except DeadpoolError as error:
                # One of our own comes before anything was sent, or with a Refusal: the connection is as good as before.
                if isinstance(error, wire.RefusedByPeer) or not isinstance(error, TransportError):
                    raise
                failure = error
            except Exception as error:  # the next job is another one
                failure = TransferFailed(f"a transfer to {peer.address} failed here: {error!r}")
            if peer.stream is not None:
                peer.release(peer.stream)
                peer.stream = None
        raise failure

    def _send_snapshot(self, stream: BulkStream, push: SnapshotPush) -> None:
        rank, step = push.rank, push.step
        self._store.check_generation(push.generation)
        snapshot = self._store.readable(rank, step, payload=push.with_payload)
        if snapshot.header.layout_hash != push.layout_hash:
            raise NotHeld(f"rank {rank}, step {step} has layout {snapshot.header.layout_hash}", push.layout_hash)
        header = snapshot.pair.header_bytes, snapshot.encoded
        stream.send(wire.Push(rank, step, push.generation, push.replicas, *header, push.with_payload))
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
            finally:
                peer.release(stream)

        return await asyncio.shield(begin(asked()))

    async def get_recording(self, node: NodeId, rank: Rank) -> bytes:
        [recording] = await self._ask(node, wire.GetRecording(rank), BulkStream.recv_records)
        return recording

    async def get_history(self, node: NodeId, rank: Rank, first: Step, last: Step) -> list[bytes]:
        """Ask `node` for the call records of first..last."""
        return await self._ask(node, wire.GetHistory(rank, first, last), BulkStream.recv_records)

    async def fetch(self, source: Source, step: Step, into: SlotPair, generation: Generation) -> None:
        """Make `into` hold snapshot (source.rank, step) from the nodes that `source` names.

        Raises: StaleGeneration once `generation` is over; the slot is then invalid, or as it was.
        """
        [encoded] = await self._ask(source.header_node, wire.GetHeader(source.rank, step), BulkStream.recv_records)
        header, view = decode_header(encoded, source.rank, step), into.payload(step)
        if len(view) != header.payload_bytes:
            raise TransportError(f"slots of {len(view)} bytes for a payload of {header.payload_bytes} bytes")
        self._store.check_generation(generation)
        into.invalidate(step)

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
