"""The receiving and serving end of bulk connections: one low-priority thread per connection.

Rules of this file: a slot is emptied before its first new byte, sealed after the last has been verified, and
acknowledged after that. A refusal says why. A connection that broke its protocol is closed; its slot stays empty.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from ..core.types import Generation, Holding, Rank, Step
from ..errors import DeadpoolError, PeerRefused, StaleGeneration, TransportError
from ..transport.framing import ConnectionClosed
from ..transport.handshake import Credentials, Refusals, Unproven, shake_hands
from ..transport.sockets import Address, bound_address, listen_tcp
from . import wire
from .records import NotHeld
from .store import CorruptSnapshot, NotEntered, SnapshotStore
from .wire import BulkStream

OnMirrored = Callable[[Rank, Step, Generation, Holding], None]
_JOIN_S = 5.0
_RETRY_S = 0.1
UNPROVEN_MAX = 32
"""Connections, and so threads, that have proved nothing yet."""
BROKEN_TOLD_MAX = 32
"""Connections that broke the protocol that are told of."""
_log = logging.getLogger(__name__)


class BulkServer:
    """Serves a store to other nodes from `start` (at construction) to `close`.

    Args:
        on_mirrored: (rank, step, generation, holding) after a push is verified and sealed, before its sender knows.
            Thread: a bulk thread's.
        on_refused: gets each refused peer, once per host.
        silent_after_s: patience with a peer within an exchange.
    """

    def __init__(
        self,
        store: SnapshotStore,
        credentials: Credentials,
        bind_host: str,
        port_range: tuple[int, int] | None,
        on_mirrored: OnMirrored,
        node: int = 0,
        silent_after_s: float = 10.0,
        on_refused: Callable[[PeerRefused], None] = _log.warning,
    ) -> None:
        self._store, self._credentials, self._node = store, credentials, node
        self._on_mirrored, self._silent_after_s = on_mirrored, silent_after_s
        self._shortly_s = silent_after_s / 4  # whoever pushes must have an answer before it is out of patience
        self._broken = 0
        self._lock = threading.Lock()
        self._streams: set[BulkStream] = set()
        self._threads: set[threading.Thread] = set()
        self._closing = threading.Event()
        self._unproven = Unproven("bulk", UNPROVEN_MAX)
        self._refusals = Refusals(on_refused)
        self._listener = listen_tcp(bind_host, port_range)
        self.address: Address = bound_address(self._listener)
        store.on_fence(self._cut_older)
        self._acceptor = threading.Thread(target=self._accept, name="bulk-accept", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        wire.lower_priority()
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.wait(_RETRY_S):
                    self._unproven.cannot_accept(error)
                continue
            while not self._unproven.await_room(_RETRY_S) and not self._closing.is_set():
                pass
            self._unproven.enter(sock)
            thread = threading.Thread(target=self._serve, args=(sock,), name="bulk-serve", daemon=True)
            with self._lock:
                self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads now: whoever asked tries again
                _log.warning("cannot serve a bulk connection: %s", error)
                self._unproven.leave(sock)
                sock.close()
                with self._lock:
                    self._threads.discard(thread)

    def _serve(self, sock: socket.socket) -> None:
        wire.lower_priority()
        stream: BulkStream | None = None
        try:
            with sock:
                try:
                    timeout_s = self._silent_after_s
                    shake_hands(sock, self._credentials, wire.PURPOSE, self._node, dialling=False, timeout_s=timeout_s)
                finally:
                    self._unproven.leave(sock)
                stream = BulkStream(sock, self._silent_after_s)
                with self._lock:
                    self._streams.add(stream)
                while not self._closing.is_set():
                    self._answer(stream, stream.recv(wire.AnyRequest, idle=True))
        except ConnectionClosed as error:
            _log.debug("%s", error)
        except PeerRefused as error:
            self._refusals.add(error)
        except (TransportError, OSError) as error:
            if not self._closing.is_set() and self._broken < BROKEN_TOLD_MAX:
                self._broken += 1
                _log.warning("bulk connection ended: %s", error)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                self._streams -= {stream}

    def _answer(self, stream: BulkStream, request: wire.AnyRequest) -> None:
        store = self._store
        try:
            match request:
                case wire.Push():
                    self._receive_push(stream, request)
                case wire.PushRecording():
                    recording = stream.recv_blob()
                    store.await_entry(request.generation, self._shortly_s)
                    store.put_recording(request.rank, recording, request.generation)
                    stream.send(wire.Done())
                case wire.GetRecording():
                    recording = store.records.get_recording(request.rank)
                    stream.send(wire.Ready(), more=True)
                    stream.send_blob(recording)
                case wire.GetHistory():
                    records = store.records.get(request.rank, request.first, request.last)
                    stream.send(wire.Ready(), more=True)
                    stream.send_records(records)
                case wire.GetHeader():
                    header = store.readable(request.rank, request.step, payload=False).encoded
                    stream.send(wire.Ready(), more=True)
                    stream.send_blob(header)
                case wire.GetPayload():
                    self._send_payload(stream, request)
        except ConnectionClosed:
            raise
        except TransportError as error:  # the stream may be in the middle of a transfer: say why, and end it
            stream.send(wire.Refusal(str(error)))
            raise
        except DeadpoolError as error:
            elsewhere = isinstance(error, StaleGeneration | NotEntered)
            stream.send(wire.Refusal(str(error), in_another_generation=elsewhere))

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
        self._store.await_entry(push.generation, self._shortly_s)
        with self._store.writing(push.rank, self._shortly_s):
            held = self._store.already_mirrored(push.rank, push.step, push.header_digest, push.with_payload)
            if held is None or held.replicas != push.replicas:
                held = self._receive_snapshot(stream, push)
                if held is None:
                    return
        self._on_mirrored(push.rank, push.step, push.generation, held)
        stream.send(wire.Done())

    def _receive_snapshot(self, stream: BulkStream, push: wire.Push) -> Holding | None:
        """Fills and seals the slot; None if the sender abandoned it."""
        store, generation = self._store, push.generation
        size = push.payload_bytes if push.with_payload else 0
        told = time.monotonic()

        def going_on() -> None:
            """Tells the sender to wait, as long as that makes sense."""
            nonlocal told
            store.check_generation(generation)
            if time.monotonic() - told >= self._shortly_s:
                stream.send(wire.Wait())
                told = time.monotonic()

        pair = store.begin_mirror(push.rank, push.step, generation, push.header_bytes, size, going_on)
        stream.generation = generation
        try:
            store.check_generation(generation)  # a fence that has come before cuts nothing here
            first, last = store.records.history_range(push.rank)
            stream.send(wire.Ready(min(last, push.step - 1) if first < push.step else -1))
            records = stream.recv_records()
            header = stream.recv_blob()
            sums = stream.recv_payload(pair.payload(push.step)[:size], lambda: store.check_generation(generation))
            holding = Holding(push.rank, push.step, push.with_payload, push.replicas)
            return store.finish_mirror(pair, header, generation, holding, records, sums)
        except wire.RefusedByPeer as error:
            _log.debug("abandoned: %s", error)
            return None
        except StaleGeneration as error:
            raise TransportError(str(error)) from error
        finally:
            stream.generation = None

    def _cut_older(self, generation: Generation) -> None:
        with self._lock:
            for stream in self._streams:
                if stream.generation is not None and stream.generation < generation:
                    stream.cut()

    def close(self) -> None:
        """Ends all connections and threads. Blocks: until they have ended, a few seconds at most."""
        self._closing.set()
        with contextlib.suppress(OSError):  # raised although it wakes the acceptor
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            streams, threads = list(self._streams), list(self._threads)
        for stream in streams:
            stream.cut()
        for thread in (self._acceptor, *threads):
            thread.join(_JOIN_S)
