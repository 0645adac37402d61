"""The receiving and serving end of bulk connections: one low-priority thread per connection that has proved itself.

Rules of this file: a slot is emptied before its first new byte, sealed after the last has been verified, and
acknowledged after that. A refusal says why. A connection that broke its protocol is closed; its slot stays empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

import xxhash

from ..core.types import Generation, Holding, NodeId
from ..errors import DeadpoolError, PeerRefused, StaleGeneration, TransportError
from ..transport.framing import ConnectionClosed
from ..transport.handshake import Credentials, Listener
from ..transport.sockets import Address, closed_on_error, listen_tcp
from ..transport.tasks import Tasks
from . import wire
from .arena import decode_header
from .records import NotHeld
from .store import CorruptSnapshot, NotEntered, SnapshotStore
from .wire import BulkStream

_JOIN_S = 5.0
BROKEN_TOLD_MAX = 32
"""Connections that broke the protocol that are told of."""
_log = logging.getLogger(__name__)


class BulkServer:
    """Serves a store to other nodes from its construction to `close`. Thread: the event loop's.

    Args:
        on_mirrored: called after a push is verified and sealed, before its sender knows. Thread: a bulk thread's.
        on_refused: gets each refused peer, once per host.
        silent_after_s: patience with a peer within an exchange.
    """

    def __init__(
        self,
        store: SnapshotStore,
        credentials: Credentials,
        bind_host: str,
        port_range: tuple[int, int] | None,
        on_mirrored: Callable[[Holding, Generation], None],
        node: NodeId = 0,
        silent_after_s: float = 10.0,
        on_refused: Callable[[PeerRefused], None] = _log.warning,
    ) -> None:
        self._store, self._on_mirrored, self._silent_after_s = store, on_mirrored, silent_after_s
        self._shortly_s = silent_after_s / 4  # whoever pushes must have an answer before it is out of patience
        self._broken = 0
        self._lock = threading.Lock()
        self._served: dict[BulkStream, threading.Thread] = {}
        self._closing = False
        listener, self._tasks = listen_tcp(bind_host, port_range), Tasks()
        self._listener = Listener(listener, wire.PURPOSE, credentials, node, self._welcome, on_refused, silent_after_s)
        self.address: Address = self._listener.address
        self._tasks.start(self._listener.serve(self._tasks))
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
                self._answer(stream, stream.recv(wire.AnyRequest, idle=True))
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
        rank, step, digest = push.rank, push.step, xxhash.xxh3_64_intdigest(push.header)
        self._store.await_entry(push.generation, self._shortly_s)
        with self._store.writing(rank, self._shortly_s):
            held = self._store.already_mirrored(rank, step, digest, push.with_payload)
            if held is None or held.replicas != push.replicas:
                held = self._receive_snapshot(stream, push)
                if held is None:
                    return
        self._on_mirrored(held, push.generation)
        stream.send(wire.Done())

    def _receive_snapshot(self, stream: BulkStream, push: wire.Push) -> Holding | None:
        """Fills and seals the slot; None if the sender abandoned it."""
        store, generation, header = self._store, push.generation, decode_header(push.header, push.rank, push.step)
        size = header.payload_bytes if push.with_payload else 0
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
        """Ends all connections, and waits a few seconds at most for their threads."""
        self._closing = True
        await self._tasks.end()
        self._listener.close()
        with self._lock:
            served = dict(self._served)
        for stream in served:
            stream.cut()
        for thread in served.values():
            await asyncio.to_thread(thread.join, _JOIN_S)
