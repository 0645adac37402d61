"""Messages and descriptors over Unix stream sockets, between an agent and the processes of its node.

Rules of this file: a frame is a 4-byte big-endian length and a msgpack body (core/local.py). Descriptors travel as
SCM_RIGHTS with the first byte of the frame whose message says `descriptors > 0`, so they are in hand before the frame
is complete. Names are abstract, so nothing has to be unlinked; both ends check that the other runs as the same user.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ..core.local import AnyLocalMessage, LocalMessage
from ..errors import CorruptFrame, PeerRefused, TransportError
from .framing import LENGTH, ConnectionClosed, FrameBuffer, checked_length, decoded, pack_frame
from .sockets import closed_on_error

LOCAL_FRAME_BYTES_MAX = 1 << 30
LOCAL_BACKLOG_BYTES_MAX = 2 << 30
DESCRIPTORS_MAX = 16
UNHEARD_MAX = 64
"""Connections that have said nothing yet; when one more comes, the oldest is ended."""
REFUSALS_SAID = 8
RETRY_S = 0.1
_READ_BYTES = 1 << 18
_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)
_UCRED = struct.Struct("3i")
_decoder = msgspec.msgpack.Decoder(AnyLocalMessage)
_log = logging.getLogger(__name__)


def listen_unix(name: str) -> socket.socket:
    """Listen at an abstract name, the job's own: the whole host sees it. Raises: TransportError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with closed_on_error(sock):
            sock.bind("\0" + name)
            sock.listen(256)
    except OSError as error:
        raise TransportError(f"cannot listen at the local socket @{name}: {error}; does another agent run?") from error
    return sock


def _check_same_user(sock: socket.socket, where: str) -> int:
    """Return the other end's process id. Raises: OSError; PeerRefused if it is another user's."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.geteuid():
        raise PeerRefused(f"refused process {pid} at {where}: it runs as user {uid}, expected user {os.geteuid()}")
    return int(pid)


def close_descriptors(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _packed(message: LocalMessage) -> memoryview:
    return memoryview(pack_frame(msgspec.msgpack.encode(message), LOCAL_FRAME_BYTES_MAX))


def _send(sock: socket.socket, frame: memoryview, fds: Sequence[int]) -> int:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    return sock.sendmsg([frame], rights)


def _receive(sock: socket.socket, size: int, fds: list[int]) -> bytes:
    """Read up to `size` bytes; descriptors that come with them are added to `fds`. Raises: OSError, CorruptFrame."""
    data, ancillary, message_flags, _ = sock.recvmsg(size, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    fds += found
    if message_flags & socket.MSG_CTRUNC:
        raise CorruptFrame(f"descriptors were lost: more than {DESCRIPTORS_MAX} in one frame, or too many open files")
    return data


def _message(body: bytes, fds: list[int]) -> tuple[AnyLocalMessage, list[int]]:
    """Decode a message, and take its descriptors out of `fds`. Raises: CorruptFrame."""
    message: AnyLocalMessage = decoded(_decoder, body)
    count = getattr(message, "descriptors", 0)
    if len(fds) < count:
        raise CorruptFrame(f"{type(message).__name__} came with {len(fds)} descriptors, expected {count}")
    taken = fds[:count]
    del fds[:count]
    return message, taken


class LocalConnection:
    """The blocking end of a connection, a supervisor's or worker's; it never reads beyond one frame, for `select`.
    Thread: `send` from any thread; `recv` from one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock, self._send_lock = sock, threading.Lock()

    @classmethod
    def to(cls, name: str) -> LocalConnection:
        """Connects to the listener `name`, which must be the same user's. Raises: ConnectionClosed, PeerRefused."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with closed_on_error(sock):
                sock.connect("\0" + name)
                _check_same_user(sock, f"@{name}")
        except OSError as error:
            raise ConnectionClosed(f"nobody answers at the local socket @{name}: {error}") from error
        return cls(sock)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: LocalMessage, fds: Sequence[int] = ()) -> None:
        """Sends `message` and duplicates of `fds` (the caller keeps its own). Raises: ConnectionClosed.
        Blocks: while the other end does not read."""
        frame = _packed(message)
        try:
            with self._send_lock:
                sent = _send(self._sock, frame, fds)
                if sent < len(frame):  # even an empty send fails once the receiver has closed
                    self._sock.sendall(frame[sent:])
        except OSError as error:
            raise ConnectionClosed(f"the local connection is closed: {error}") from error

    def recv(self) -> tuple[AnyLocalMessage, list[int]]:
        """Receive a message and its descriptors, which then belong to the caller. Blocks: until it is here.
        Raises: ConnectionClosed at the end of the stream."""
        fds: list[int] = []
        try:
            length = checked_length(self._recv_exact(LENGTH.size, fds), LOCAL_FRAME_BYTES_MAX)
            return _message(self._recv_exact(length, fds), fds)
        except OSError as error:
            raise ConnectionClosed(f"the local connection broke: {error}") from error
        finally:
            close_descriptors(fds)

    def _recv_exact(self, size: int, fds: list[int]) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = _receive(self._sock, min(size - len(data), _READ_BYTES), fds)
            if not piece:
                raise ConnectionClosed("the other end of the local connection closed it")
            data += piece
        return bytes(data)

    def close(self) -> None:
        """Ends the connection, also for a `recv` blocked in another thread."""
        with contextlib.suppress(OSError):  # the other end is gone already
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class LocalPeer:
    """The agent's end of one connection; a peer that breaks the protocol, or lets its backlog overflow, is cut off.
    `pid` is the process at the other end; `tag` is the owner's to use. Thread: the event loop's only."""

    def __init__(self, sock: socket.socket, pid: int, server: LocalServer) -> None:
        self.pid, self._sock, self._server = pid, sock, server
        self.tag: object = None
        self._loop = asyncio.get_running_loop()
        self._buffer = FrameBuffer(LOCAL_FRAME_BYTES_MAX)
        self._received: list[int] = []
        self._queue: deque[tuple[memoryview, list[int]]] = deque()
        self._queued_bytes = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self.closed = False
        self._loop.add_reader(sock, self._read)

    def send(self, message: LocalMessage, fds: Sequence[int] = ()) -> None:
        """Queues `message` and duplicates of `fds`; drops them if the connection has ended. Blocks: never."""
        if self.closed:
            return
        frame, copies = _packed(message), list[int]()
        try:
            copies.extend(map(os.dup, fds))
        except OSError as error:  # too many open files: this process cannot be served, the others can
            close_descriptors(copies)
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
        """Drops what is still queued and ends the connection; on_closed is not called."""
        if not self.closed:
            self.closed = True
            self._drop_queue()
            self._loop.remove_reader(self._sock)
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
                sent = _send(self._sock, frame, fds)
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
        """Handle what has arrived by now, the end included. Not within `on_message` of this peer. Blocks: never."""
        while not self.closed and self._read():
            pass

    def _read(self) -> bool:
        """Return whether there was anything to read."""
        try:
            try:
                data = _receive(self._sock, _READ_BYTES, self._received)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:  # reset: the process died with bytes unread
                data = b""
            if not data:
                self._end()
            for body in self._buffer.feed(data):
                message, fds = _message(body, self._received)
                self._server.unheard.pop(self, None)
                self._server.on_message(self, message, fds)
                if self.closed:
                    break
        except CorruptFrame as error:
            self._server.refused(f"process {self.pid}", f"local connection of process {self.pid}: {error}")
            self._end()
        return True


class LocalServer:
    """Accepts local connections for as long as the running event loop runs. Thread: the event loop's only.

    Args: on_message: gets a message and its descriptors, which then belong to it; on_closed: called once when a
        connection ends from the other side or by an error, not after `LocalPeer.close`.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[LocalPeer, AnyLocalMessage, list[int]], None],
        on_closed: Callable[[LocalPeer], None],
    ) -> None:
        sock.setblocking(False)
        self.unheard: dict[LocalPeer, None] = {}
        """Those that have said nothing yet, the oldest first."""
        self._refusals = 0
        self._refused: set[str] = set()
        self._sock = sock
        self.on_message, self.on_closed = on_message, on_closed
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
            pid = _check_same_user(sock, "the local socket")
        except PeerRefused as error:
            sock.close()
            self.refused("another user", str(error))
            return
        sock.setblocking(False)
        if len(self.unheard) >= UNHEARD_MAX:
            next(iter(self.unheard)).close()
        self.unheard[LocalPeer(sock, pid, self)] = None

    def refused(self, peer: str, reason: str) -> None:
        """Say that something was refused: once for each of the first peers, and then at each power of ten."""
        self._refusals += 1
        if peer not in self._refused and len(self._refused) < REFUSALS_SAID:
            self._refused.add(peer)
            _log.warning(reason)
        elif self._refusals >= 10 and str(self._refusals).strip("0") == "1":
            _log.warning("%d local connections were refused by now, the last: %s", self._refusals, reason)
