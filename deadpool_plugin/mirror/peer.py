"""The sending and asking end of bulk connections to one other node.

Rules of this file: pushes go through one low-priority thread with a bounded queue and one connection that is made
anew when it breaks (one new attempt per push). Everything else blocks its caller, on a connection of its own, so that
a swap's fetch never queues behind mirroring.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import msgspec

from ..core.types import Generation, Rank, Step
from ..errors import DeadpoolError, TransportError
from ..transport.framing import ConnectionClosed
from ..transport.handshake import Credentials, shake_hands
from ..transport.sockets import Address, closed_on_error
from . import wire
from .arena import SlotPair, SnapshotHeader, decode_header
from .records import HistoryPruned, NotHeld
from .store import SnapshotStore
from .wire import BulkStream

QUEUE_MAX = 256
_JOIN_S = 5.0


class TransferFailed(DeadpoolError):
    """It is this node that could not carry a transfer out (a bug, no memory), whoever it was for."""


class SnapshotPush(msgspec.Struct, frozen=True):
    """An own snapshot to be mirrored, its payload only if asked. `records`: those of `step`; records of earlier steps
    that the peer lacks go along."""

    rank: Rank
    step: Step
    generation: Generation
    with_payload: bool
    replicas: tuple[Rank, ...]
    layout_hash: str
    records: bytes


class BulkPeer:
    """One other node's bulk server, as seen from `store`'s node.

    Args:
        store: where pushed snapshots and their histories are read.
        silent_after_s: patience with the peer within an exchange.
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
        self._jobs: queue.Queue[tuple[Callable[[BulkStream], None], Future[None]] | None] = queue.Queue(QUEUE_MAX)
        self._stream: BulkStream | None = None
        self._lock = threading.Lock()
        self._streams: set[BulkStream] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._send_jobs, name=f"bulk-to-{address[0]}:{address[1]}", daemon=True)
        self._thread.start()

    # ---- pushes

    def push(self, push: SnapshotPush) -> Future[None]:
        """Queues a snapshot; done once the peer has verified and sealed it. Blocks: never."""
        return self._queue(lambda stream: self._send_snapshot(stream, push))

    def push_recording(self, rank: Rank, generation: Generation, recording: bytes) -> Future[None]:
        """Queues a rank's recording of its start-up collectives. Blocks: never."""

        def send(stream: BulkStream) -> None:
            stream.send(wire.PushRecording(rank, generation))
            stream.send_blob(recording)
            stream.expect(wire.Done)

        return self._queue(send)

    def _queue(self, work: Callable[[BulkStream], None]) -> Future[None]:
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # it goes on although its caller is cancelled
        with self._lock:
            reason = f"the connection to {self.address} is closed" if self._closing else ""
            if not reason:
                try:
                    self._jobs.put_nowait((work, done))
                except queue.Full:
                    reason = f"{QUEUE_MAX} transfers to {self.address} wait already"
        if reason:
            done.set_exception(TransportError(reason))
        return done

    def _send_jobs(self) -> None:
        wire.lower_priority()
        while (job := self._jobs.get()) is not None:
            work, done = job
            if self._closing:
                done.set_exception(TransportError("closed"))
                if self._jobs.empty():  # the queue was full: `close` could add no end mark
                    break
                continue
            reused = self._stream is not None
            error = self._try(work)
            if error is not None and reused and self._stream is None and not self._closing:
                error = self._try(work)  # the connection may have been dead for long
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
        self._drop_stream()

    def _try(self, work: Callable[[BulkStream], None]) -> DeadpoolError | None:
        """Return why it failed, if it did; a connection that broke is dropped."""
        try:
            if self._stream is None:
                self._stream = self._connect()
            work(self._stream)
        except DeadpoolError as error:
            # One of our own comes before anything was sent, or with Abandoned: the connection is as good as before.
            if isinstance(error, TransportError) and not isinstance(error, wire.RefusedByPeer):
                self._drop_stream()
            return error
        except Exception as error:  # the next job is another one
            self._drop_stream()
            return TransferFailed(f"a transfer to {self.address} failed here: {error!r}")
        return None

    def _send_snapshot(self, stream: BulkStream, push: SnapshotPush) -> None:
        rank, step = push.rank, push.step
        self._store.check_generation(push.generation)
        snapshot = self._store.readable(rank, step, payload=push.with_payload)
        header = snapshot.header
        if header.layout_hash != push.layout_hash:
            raise NotHeld(f"rank {rank}, step {step} has layout {header.layout_hash}", push.layout_hash)
        stream.send(
            wire.Push(
                rank, step, push.generation, push.replicas, snapshot.pair.header_bytes, snapshot.digest,
                header.layout_hash, push.with_payload, header.payload_bytes,
            )
        )  # fmt: skip
        answer = stream.expect(wire.Ready, wire.Done)
        if not isinstance(answer, wire.Ready):
            return
        stream.send_records(self._records(push, answer.history_last), more=True)
        stream.send_blob(snapshot.encoded, more=True)
        stream.send_payload(snapshot.payload, lambda sums: self._store.check_read(snapshot, sums))
        stream.expect(wire.Done)

    def _records(self, push: SnapshotPush, history_last: Step) -> list[bytes]:
        """Get records that end at the pushed step and close the peer's gap, as far back as they are held."""
        held_first, held_last = self._store.records.history_range(push.rank)
        if held_last < push.step - 1 or held_first >= push.step or held_first < 0:
            return [push.records]
        with contextlib.suppress(HistoryPruned):  # just now, by another thread: the peer's history begins anew
            earlier = self._store.records.get(push.rank, max(held_first, history_last + 1), push.step - 1)
            return [*earlier, push.records]
        return [push.records]

    # ---- questions

    def _connect(self) -> BulkStream:
        try:
            sock = socket.create_connection(self.address, timeout=self._silent_after_s)
        except OSError as error:
            raise ConnectionClosed(f"no bulk connection to {self.address}: {error}") from error
        with closed_on_error(sock):
            timeout_s = self._silent_after_s
            shake_hands(sock, self._credentials, wire.PURPOSE, self._node, dialling=True, timeout_s=timeout_s)
            stream = BulkStream(sock, timeout_s)
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

    @contextmanager
    def _asking(self, request: wire.AnyRequest) -> Iterator[BulkStream]:
        """Connect to the peer, which is then ready to answer `request`."""
        stream = self._connect()
        try:
            stream.send(request)
            stream.expect(wire.Ready)
            yield stream
        finally:
            self._release(stream)

    def get_recording(self, rank: Rank) -> bytes:
        """Raises: TransportError, also if the peer does not hold it. Blocks."""
        with self._asking(wire.GetRecording(rank)) as stream:
            return stream.recv_blob()

    def get_history(self, rank: Rank, first: Step, last: Step) -> list[bytes]:
        """Get records of first..last. Raises: TransportError, also if the peer does not hold them all. Blocks."""
        with self._asking(wire.GetHistory(rank, first, last)) as stream:
            return stream.recv_records()

    def fetch_header(self, rank: Rank, step: Step) -> tuple[SnapshotHeader, bytes]:
        """Get the header of (rank, step), also as bytes for `seal_encoded`. Raises: TransportError. Blocks."""
        with self._asking(wire.GetHeader(rank, step)) as stream:
            encoded = stream.recv_blob()
        header = decode_header(encoded)
        if (header.rank, header.step) != (rank, step):
            raise TransportError(f"{self.address} sent {(header.rank, header.step)}", f"rank {rank}, step {step}")
        return header, encoded

    def fetch_payload(self, rank: Rank, header: SnapshotHeader, into: memoryview, generation: Generation) -> None:
        """Fills `into` with the payload of `rank` at `header.step`, which must be laid out as `header` says.

        Raises: TransportError, StaleGeneration once `generation` is over; `into` is then worth nothing.
        Blocks: as long as the peer goes on sending.
        """
        if len(into) != header.payload_bytes:
            raise TransportError(f"slots of {len(into)} bytes for a payload of {header.payload_bytes} bytes")
        with self._asking(wire.GetPayload(rank, header.step, header.layout_hash, header.payload_bytes)) as stream:
            stream.recv_payload(into, lambda: self._store.check_generation(generation))

    def fetch(
        self, rank: Rank, step: Step, payload_rank: Rank, into: SlotPair, payload_peer: BulkPeer, generation: Generation
    ) -> SnapshotHeader:
        """Makes `into` hold snapshot (rank, step): header from here, payload of `payload_rank` from `payload_peer`.

        Args: generation: whose plan asks for it; once that is over nothing is written any more.
        Raises: TransportError, StaleGeneration; the slot is then invalid, or as it was. Blocks: as long as the peers go
        on sending; call it in a thread.
        """
        header, encoded = self.fetch_header(rank, step)
        self._store.check_generation(generation)
        into.invalidate(step)
        payload_peer.fetch_payload(payload_rank, header, into.payload(step), generation)
        self._store.check_generation(generation)
        into.seal_encoded(step, encoded)
        return header

    def close(self) -> None:
        """Ends the sender and every question; what is queued is answered with an error."""
        with self._lock:
            self._closing = True
            for stream in self._streams:
                stream.cut()
        with contextlib.suppress(queue.Full):
            self._jobs.put_nowait(None)
        self._thread.join(_JOIN_S)
