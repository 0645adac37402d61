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
from contextlib import contextmanager

import msgspec

from ..core.types import Generation, Rank, Step
from ..errors import DeadpoolError, TransportError
from ..transport.framing import ConnectionClosed
from ..transport.handshake import Credentials, shake_hands
from ..transport.sockets import Address, closed_on_error
from . import wire
from .arena import SlotPair, SnapshotHeader, decode_header
from .history import HistoryPruned
from .records import NotHeld
from .store import SnapshotStore
from .wire import BulkStream

OnDone = Callable[[DeadpoolError | None], None]
"""Told why not, or None: the peer has verified and sealed it."""
QUEUE_MAX = 256
_JOIN_S = 5.0


class TransferFailed(DeadpoolError):
    """It is this node that could not carry a transfer out (a bug, no memory), whoever it was for."""


class _PushJob(msgspec.Struct, frozen=True):
    rank: Rank
    step: Step
    generation: Generation
    with_payload: bool
    replicas: tuple[Rank, ...]
    layout_hash: str
    records: bytes
    on_done: OnDone


class _RecordingJob(msgspec.Struct, frozen=True):
    rank: Rank
    generation: Generation
    recording: bytes
    on_done: OnDone


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
        self._credentials = credentials
        self._store = store
        self._node = node
        self._silent_after_s = silent_after_s
        self._jobs: queue.Queue[_PushJob | _RecordingJob | None] = queue.Queue(QUEUE_MAX)
        self._stream: BulkStream | None = None
        self._lock = threading.Lock()
        self._streams: set[BulkStream] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._send_jobs, name=f"bulk-to-{address[0]}:{address[1]}", daemon=True)
        self._thread.start()

    # ---- pushes

    def push(
        self,
        rank: Rank,
        step: Step,
        generation: Generation,
        with_payload: bool,
        replicas: tuple[Rank, ...],
        layout_hash: str,
        records: bytes,
        on_done: OnDone,
    ) -> None:
        """Queues own snapshot (rank, step) for mirroring, its payload only if asked.

        `on_done` is called once, in the sender's thread (or here, if the queue is full). Call records of earlier steps
        that the peer lacks go along. Blocks: never.
        """
        self._enqueue(_PushJob(rank, step, generation, with_payload, replicas, layout_hash, records, on_done))

    def push_recording(
        self, rank: Rank, generation: Generation, recording: bytes, on_done: OnDone = lambda error: None
    ) -> None:
        """Queues a rank's recording of its start-up collectives. Blocks: never."""
        self._enqueue(_RecordingJob(rank, generation, recording, on_done))

    def _enqueue(self, job: _PushJob | _RecordingJob) -> None:
        with self._lock:
            reason = f"the connection to {self.address} is closed" if self._closing else ""
            if not reason:
                try:
                    self._jobs.put_nowait(job)
                except queue.Full:
                    reason = f"{QUEUE_MAX} transfers to {self.address} wait already"
        if reason:
            job.on_done(TransportError(reason))

    def _send_jobs(self) -> None:
        wire.lower_priority()
        while (job := self._jobs.get()) is not None:
            if self._closing:
                job.on_done(TransportError("closed"))
                if self._jobs.empty():  # the queue was full: `close` could add no end mark
                    break
                continue
            reused = self._stream is not None
            error = self._try(job)
            if error is not None and reused and self._stream is None and not self._closing:
                error = self._try(job)  # the connection may have been dead for long
            job.on_done(error)
        self._drop_stream()

    def _try(self, job: _PushJob | _RecordingJob) -> DeadpoolError | None:
        """Why it failed, if it did; a connection that broke is dropped."""
        try:
            if self._stream is None:
                self._stream = self._connect()
            if isinstance(job, _PushJob):
                self._send_snapshot(self._stream, job)
            else:
                self._stream.send(wire.PushRecording(job.rank, job.generation))
                self._stream.send_blob(job.recording)
                self._stream.expect(wire.Done)
        except wire.RefusedByPeer as error:
            return error
        except TransportError as error:
            self._drop_stream()
            return error
        except DeadpoolError as error:  # our own, and nothing was sent yet, or Abandoned
            return error
        except Exception as error:  # the next job is another one
            self._drop_stream()
            return TransferFailed(f"a transfer to {self.address} failed here: {error!r}")
        return None

    def _send_snapshot(self, stream: BulkStream, job: _PushJob) -> None:
        rank, step = job.rank, job.step
        self._store.check_generation(job.generation)
        snapshot = self._store.readable(rank, step, payload=job.with_payload)
        header = snapshot.header
        if header.layout_hash != job.layout_hash:
            raise NotHeld(f"rank {rank}, step {step} has layout {header.layout_hash}", job.layout_hash)
        stream.send(
            wire.Push(
                rank,
                step,
                job.generation,
                job.replicas,
                snapshot.pair.header_bytes,
                snapshot.digest,
                header.layout_hash,
                job.with_payload,
                header.payload_bytes,
            )  # fmt: skip
        )
        answer = stream.expect(wire.Ready, wire.Done)
        if not isinstance(answer, wire.Ready):
            return
        stream.send_records(self._records(job, answer.history_last), more=True)
        stream.send_blob(snapshot.encoded, more=True)
        stream.send_payload(snapshot.payload, lambda sums: self._store.check_read(snapshot, sums))
        stream.expect(wire.Done)

    def _records(self, job: _PushJob, history_last: Step) -> list[bytes]:
        """Records that end at the job's step and close the peer's gap, as far back as they are held."""
        held_first, held_last = self._store.history_range(job.rank)
        if held_last < job.step - 1 or held_first >= job.step or held_first < 0:
            return [job.records]
        try:
            return [*self._store.get(job.rank, max(held_first, history_last + 1), job.step - 1), job.records]
        except HistoryPruned:  # just now, by another thread: the peer's history begins anew
            return [job.records]

    # ---- questions

    def _connect(self) -> BulkStream:
        try:
            sock = socket.create_connection(self.address, timeout=self._silent_after_s)
        except OSError as error:
            raise ConnectionClosed(f"no bulk connection to {self.address}: {error}") from error
        with closed_on_error(sock):
            shake_hands(
                sock, self._credentials, wire.PURPOSE, self._node, dialling=True, timeout_s=self._silent_after_s
            )
            stream = BulkStream(sock, self._silent_after_s)
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
    def _asking(self) -> Iterator[BulkStream]:
        stream = self._connect()
        try:
            yield stream
        finally:
            self._release(stream)

    def _ask_blob(self, request: wire.AnyRequest) -> bytes:
        with self._asking() as stream:
            stream.send(request)
            stream.expect(wire.Ready)
            return stream.recv_blob()

    def get_recording(self, rank: Rank) -> bytes:
        """Raises: TransportError, also if the peer does not hold it. Blocks."""
        return self._ask_blob(wire.GetRecording(rank))

    def get_history(self, rank: Rank, first: Step, last: Step) -> list[bytes]:
        """Call records of first..last. Raises: TransportError, also if the peer does not hold them all. Blocks."""
        with self._asking() as stream:
            stream.send(wire.GetHistory(rank, first, last))
            stream.expect(wire.Ready)
            return stream.recv_records()

    def fetch_header(self, rank: Rank, step: Step) -> tuple[SnapshotHeader, bytes]:
        """The header of (rank, step), also as bytes for `SlotPair.seal_encoded`. Raises: TransportError. Blocks."""
        encoded = self._ask_blob(wire.GetHeader(rank, step))
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
        with self._asking() as stream:
            stream.send(wire.GetPayload(rank, header.step, header.layout_hash, header.payload_bytes))
            stream.expect(wire.Ready)
            stream.recv_payload(into, lambda: self._store.check_generation(generation))

    def fetch(
        self,
        rank: Rank,
        step: Step,
        payload_rank: Rank,
        into: SlotPair,
        payload_peer: BulkPeer,
        generation: Generation,
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
