"""The sending and asking end of bulk connections to one other node.

Rules of this file: pushes go through one low-priority thread with a bounded queue and one connection that is made
anew when it breaks (one new attempt per push). Everything else blocks its caller, on a connection of its own, so that
a swap's fetch never queues behind mirroring.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from ..core.types import Generation, Rank, Step
from ..errors import DeadpoolError, TransportError
from ..transport.framing import ConnectionClosed
from ..transport.handshake import Credentials, dialled
from ..transport.sockets import Address, closed_on_error
from . import wire
from .arena import SlotPair, SnapshotHeader, decode_header
from .records import HistoryPruned, NotHeld
from .store import SnapshotStore
from .wire import BulkStream

QUEUE_MAX = 256


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


class BulkPeer:
    """One other node's bulk server, as seen from `store`'s node.

    Args: silent_after_s: patience with the peer within an exchange.
    """

    def __init__(
        self,
        address: Address,
        credentials: Credentials,
        store: SnapshotStore,
        node: int = 0,
        silent_after_s: float = 10.0,
    ) -> None:
        self.address = address
        self._credentials, self._store, self._node = credentials, store, node
        self._silent_after_s = silent_after_s
        self._sender = ThreadPoolExecutor(1, f"bulk-to-{address[0]}:{address[1]}", wire.lower_priority)
        self._room = threading.Semaphore(QUEUE_MAX)
        self._stream: BulkStream | None = None
        self._lock = threading.Lock()
        self._streams: set[BulkStream] = set()
        self._dials: set[Callable[[], None]] = set()
        """Gives up each attempt to connect."""
        self._closing = False

    # ---- pushes

    def push(self, push: SnapshotPush) -> Future[None]:
        """Queues a snapshot; done once the peer has verified and sealed it. Raises: TransportError. Blocks: never."""
        return self._queue(lambda stream: self._send_snapshot(stream, push))

    def push_recording(self, rank: Rank, generation: Generation, recording: bytes) -> Future[None]:
        """Queues a rank's recording of its start-up collectives. Raises: TransportError. Blocks: never."""

        def send(stream: BulkStream) -> None:
            stream.send(wire.PushRecording(rank, generation, recording))
            stream.expect(wire.Done)

        return self._queue(send)

    def _queue(self, work: Callable[[BulkStream], None]) -> Future[None]:
        with self._lock:
            if self._closing:
                raise ConnectionClosed(f"the connection to {self.address} is closed")
            if not self._room.acquire(blocking=False):
                raise TransportError(f"{QUEUE_MAX} transfers to {self.address} wait already")
            done = self._sender.submit(self._send, work)
        done.add_done_callback(lambda _: self._room.release())
        return done

    def _send(self, work: Callable[[BulkStream], None]) -> None:
        """Does `work` over the connection, or over a new one if that fails: it may have been dead for long."""
        if self._closing:
            raise ConnectionClosed("closed")
        failure: DeadpoolError
        while True:
            reused = self._stream is not None
            try:
                self._stream = self._stream or self._connect()
                return work(self._stream)
            except DeadpoolError as error:
                # One of our own comes before anything was sent, or with a Refusal: the connection is as good as before.
                if isinstance(error, wire.RefusedByPeer) or not isinstance(error, TransportError):
                    raise
                failure = error
            except Exception as error:  # the next job is another one
                failure = TransferFailed(f"a transfer to {self.address} failed here: {error!r}")
            self._drop_stream()
            if not reused or self._closing:
                raise failure

    def _send_snapshot(self, stream: BulkStream, push: SnapshotPush) -> None:
        rank, step = push.rank, push.step
        self._store.check_generation(push.generation)
        snapshot = self._store.readable(rank, step, payload=push.with_payload)
        if snapshot.header.layout_hash != push.layout_hash:
            raise NotHeld(f"rank {rank}, step {step} has layout {snapshot.header.layout_hash}", push.layout_hash)
        stream.send(
            wire.Push(
                rank, step, push.generation, push.replicas, snapshot.pair.header_bytes, snapshot.encoded,
                push.with_payload,
            )
        )  # fmt: skip
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

    # ---- connections

    def _connect(self) -> BulkStream:
        async def dial() -> BulkStream:
            task, loop = asyncio.current_task(), asyncio.get_running_loop()

            def give_up() -> None:
                loop.call_soon_threadsafe(task.cancel)  # type: ignore[union-attr]  # asyncio.run made it

            with self._lock:
                self._dials.add(give_up)
                if self._closing:
                    give_up()
            try:
                async with asyncio.timeout(self._silent_after_s):
                    sock, _ = await dialled(self.address, self._credentials, wire.PURPOSE, self._node)
            finally:
                with self._lock:
                    self._dials.discard(give_up)
            with closed_on_error(sock):
                return BulkStream(sock, self._silent_after_s)

        try:
            stream = asyncio.run(dial())
        except (OSError, asyncio.CancelledError) as error:
            raise ConnectionClosed(f"no bulk connection to {self.address}: {error!r}") from error
        with self._lock:
            self._streams.add(stream)
            if self._closing:
                stream.cut()
        return stream

    def _release(self, stream: BulkStream) -> None:
        with self._lock:
            self._streams.discard(stream)
        stream.close()

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._release(self._stream)
            self._stream = None

    def close(self) -> None:
        """Ends the sender and every question; what is queued is answered with an error."""
        with self._lock:
            if not self._closing:
                self._closing = True
                for stream in self._streams:
                    stream.cut()
                for give_up in self._dials:  # the process ends no sooner than its threads
                    give_up()
                self._sender.submit(self._drop_stream)
                self._sender.shutdown(wait=False)

    # ---- questions

    @contextlib.contextmanager
    def _asking(self, request: wire.AnyRequest) -> Iterator[BulkStream]:
        stream = self._connect()
        try:
            stream.send(request)
            yield stream
        finally:
            self._release(stream)

    def get_recording(self, rank: Rank) -> bytes:
        """Raises: TransportError, also if the peer does not hold it. Blocks."""
        with self._asking(wire.GetRecording(rank)) as stream:
            return stream.expect(wire.Blob).content

    def get_history(self, rank: Rank, first: Step, last: Step) -> list[bytes]:
        """Get records of first..last. Raises: TransportError, also if the peer does not hold them all. Blocks."""
        with self._asking(wire.GetHistory(rank, first, last)) as stream:
            return stream.recv_records()

    def fetch(
        self, rank: Rank, step: Step, payload_rank: Rank, into: SlotPair, payload_peer: BulkPeer, generation: Generation
    ) -> SnapshotHeader:
        """Makes `into` hold snapshot (rank, step): header from here, payload of `payload_rank` from `payload_peer`.

        Args: generation: whose plan asks for it; once that is over nothing is written any more.
        Raises: TransportError, StaleGeneration; the slot is then invalid, or as it was.
        Blocks: as long as the peers go on sending.
        """
        with self._asking(wire.GetHeader(rank, step)) as stream:
            encoded = stream.expect(wire.Blob).content
        header, view = decode_header(encoded, rank, step), into.payload(step)
        if len(view) != header.payload_bytes:
            raise TransportError(f"slots of {len(view)} bytes for a payload of {header.payload_bytes} bytes")
        self._store.check_generation(generation)
        into.invalidate(step)
        request = wire.GetPayload(payload_rank, step, header.layout_hash, header.payload_bytes)
        with payload_peer._asking(request) as stream:
            stream.expect(wire.Ready)
            stream.recv_payload(view, lambda: self._store.check_generation(generation))
        self._store.check_generation(generation)
        into.seal_encoded(step, encoded)
        return header
