"""The asyncio side of unix.py: an agent's connections with the supervisors and workers of its node.

Rules of this file: everything on one event loop's thread, nothing blocks. A peer that breaks the protocol, or lets its
backlog overflow, is cut off.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic

import msgspec

from ..errors import CorruptFrame, PeerRefused
from .framing import FrameBuffer, pack_frame
from .unix import (
    LOCAL_FRAME_BYTES_MAX,
    READ_BYTES,
    M,
    check_same_user,
    close_descriptors,
    decoded,
    duplicates,
    receive,
    rights,
    take_descriptors,
)

LOCAL_BACKLOG_BYTES_MAX = 2 << 30
UNHEARD_MAX = 64
"""Connections that have said nothing yet; when one more comes, the oldest is ended."""
REFUSALS_SAID = 8
RETRY_S = 0.1


class Peer(Generic[M]):
    """The server's end of one connection. Thread: the event loop's only.

    `pid` is the process at the other end; `tag` is the owner's to use.
    """

    def __init__(self, sock: socket.socket, pid: int, server: Server[M]) -> None:
        self.pid = pid
        self.tag: object = None
        self._sock = sock
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._buffer = FrameBuffer(LOCAL_FRAME_BYTES_MAX)
        self._received: list[int] = []
        self._queue: deque[tuple[memoryview, list[int]]] = deque()
        self._queued_bytes = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self.closed = False
        self._loop.add_reader(sock, self._read)

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Queues `message` and duplicates of `fds`; dropped if the connection has ended (on_closed tells, once all that
        the other end had said is handled).

        Blocks: never.
        """
        if self.closed:
            return
        frame = memoryview(pack_frame(msgspec.msgpack.encode(message), LOCAL_FRAME_BYTES_MAX))
        try:
            copies = duplicates(fds)
        except OSError as error:  # too many open files: this process cannot be served, the others can
            self._server.refused(f"process {self.pid}", f"cannot send a descriptor to process {self.pid}: {error}")
            self._loop.call_soon(self._end)
            return
        self._drained.clear()
        self._queue.append((frame, copies))
        self._queued_bytes += len(frame)
        if self._queued_bytes > LOCAL_BACKLOG_BYTES_MAX:
            self._end()
        else:
            self._flush()

    async def drained(self) -> None:
        """Wait until nothing is queued any more: the other end reads it, or the connection has ended."""
        await self._drained.wait()

    def close(self) -> None:
        """Ends the connection at once; what is still queued is dropped, and on_closed is not called."""
        if not self.closed:
            self.closed = True
            self._drop_queue()
            self._loop.remove_reader(self._sock)
            self._server.peers.discard(self)
            self._server.unheard.pop(self, None)
            close_descriptors(self._received)
            self._sock.close()

    def _end(self) -> None:
        if not self.closed:
            self.close()
            self._server.on_closed(self)

    def _flush(self) -> None:
        try:
            while self._queue:
                frame, fds = self._queue[0]
                sent = self._sock.sendmsg([frame], rights(fds))
                close_descriptors(fds)
                self._queued_bytes -= sent
                if sent < len(frame):
                    self._queue[0] = (frame[sent:], [])
                else:
                    self._queue.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._flush)
        except OSError:  # what it said before it ended is still to be read, and its end
            self._drop_queue()
        else:
            self._loop.remove_writer(self._sock)
            self._drained.set()

    def _drop_queue(self) -> None:
        self._loop.remove_writer(self._sock)
        for _, fds in self._queue:
            close_descriptors(fds)
        self._queue.clear()
        self._queued_bytes = 0
        self._drained.set()

    def read_rest(self) -> None:
        """Handle what has arrived by now, the end of the connection included. Not to be called while one of this peer's
        messages is being handled.

        Blocks: never.
        """
        while not self.closed and self._read():
            pass

    def _read(self) -> bool:
        """Return whether there was anything to read."""
        try:
            data, fds = receive(self._sock, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:  # reset: the process died with bytes unread
            data, fds = b"", []
        except CorruptFrame as error:
            self._refuse(error)
            return True
        self._received.extend(fds)
        if not data:
            self._end()
            return True
        try:
            for body in self._buffer.feed(data):
                message = decoded(self._server.decode, body)
                self._server.unheard.pop(self, None)
                self._server.on_message(self, message, take_descriptors(self._received, message))
                if self.closed:
                    break
        except CorruptFrame as error:
            self._refuse(error)
        return True

    def _refuse(self, error: CorruptFrame) -> None:
        self._server.refused(f"process {self.pid}", f"local connection of process {self.pid}: {error}")
        self._end()


class Server(Generic[M]):
    """Accepts local connections for as long as the running event loop runs. Thread: the event loop's only.

    Args:
        sock: a listening socket (`listen_unix`).
        on_message: gets (peer, message, descriptors); the descriptors belong to the callee.
        on_closed: called once when a connection ends from the other side or by an error, not after `Peer.close`.
        on_refused: gets a sentence about a connection that was refused or broke the protocol.
    """

    def __init__(
        self,
        sock: socket.socket,
        decode: Callable[[bytes], M],
        on_message: Callable[[Peer[M], M, list[int]], None],
        on_closed: Callable[[Peer[M]], None],
        on_refused: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        self.peers: set[Peer[M]] = set()
        self.unheard: dict[Peer[M], None] = {}
        """Those that have said nothing yet, the oldest first."""
        self._refusals = 0
        self._refused: set[str] = set()
        self.decode = decode
        self.on_message = on_message
        self.on_closed = on_closed
        self._on_refused = on_refused
        self._sock = sock
        self._listen()

    def _listen(self) -> None:
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # too many open files: the connection waits, and so do we
            self.refused("", f"cannot accept a local connection: {error}; it is tried again")
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._sock)
            loop.call_later(RETRY_S, self._listen)
            return
        try:
            pid = check_same_user(sock, "the local socket")
        except PeerRefused as error:
            sock.close()
            self.refused("another user", str(error))
            return
        sock.setblocking(False)
        if len(self.unheard) >= UNHEARD_MAX:
            next(iter(self.unheard)).close()
        peer = Peer(sock, pid, self)
        self.peers.add(peer)
        self.unheard[peer] = None

    def refused(self, peer: str, reason: str) -> None:
        """Something was refused: said once for each of the first peers, and then at each power of ten."""
        self._refusals += 1
        is_new = peer not in self._refused and len(self._refused) < REFUSALS_SAID
        if is_new:
            self._refused.add(peer)
            self._on_refused(reason)
        elif self._refusals >= 10 and str(self._refusals).strip("0") == "1":
            self._on_refused(f"{self._refusals} local connections were refused by now, the last: {reason}")
