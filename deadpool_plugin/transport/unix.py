"""Messages and descriptors over Unix stream sockets, within one node.

Rules of this file: descriptors travel as SCM_RIGHTS with the first byte of the frame whose message says
`descriptors > 0`, so they are in hand before the frame is complete. Abstract names: nothing to unlink, and both
ends check that the other runs as the same user. Which messages exist is not known here (see local.py).
"""

from __future__ import annotations

import array
import asyncio
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from ..errors import CorruptFrame, PeerRefused, TransportError
from .framing import LENGTH, ConnectionClosed, FrameBuffer, checked_length, pack_frame

M = TypeVar("M")

LOCAL_FRAME_BYTES_MAX = 1 << 30
LOCAL_BACKLOG_BYTES_MAX = 2 << 30
DESCRIPTORS_MAX = 16
_READ_BYTES = 1 << 18
_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)
_UCRED = struct.Struct("3i")


def listen_unix(name: str) -> socket.socket:
    """A listening abstract Unix socket; `name` must be the job's own (it is visible to the whole host)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind("\0" + name)
        sock.listen(256)
    except OSError as error:
        sock.close()
        raise TransportError(f"cannot listen at the local socket @{name}: {error}; does another agent run?") from error
    return sock


def connect_unix(name: str) -> socket.socket:
    """A connected socket to the listener `name` of the same user."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect("\0" + name)
        check_same_user(sock, f"@{name}")
    except OSError as error:
        sock.close()
        raise ConnectionClosed(f"nobody answers at the local socket @{name}: {error}") from error
    except PeerRefused:
        sock.close()
        raise
    return sock


def check_same_user(sock: socket.socket, where: str) -> int:
    """The process id of the other end, which must run as this process's user."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.geteuid():
        raise PeerRefused(f"refused process {pid} at {where}: it runs as user {uid}, expected user {os.geteuid()}")
    return int(pid)


def _rights(fds: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


def _receive(sock: socket.socket, size: int, flags: int) -> tuple[bytes, list[int]]:
    data, ancillary, message_flags, _ = sock.recvmsg(size, _ANCILLARY_BYTES, flags | socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if message_flags & socket.MSG_CTRUNC:
        close_descriptors(fds)
        raise CorruptFrame(f"descriptors were lost: more than {DESCRIPTORS_MAX} in one frame, or too many open files")
    return data, list(fds)


def _take(fds: deque[int] | list[int], message: object) -> list[int]:
    count = getattr(message, "descriptors", 0)
    if len(fds) < count:
        raise CorruptFrame(f"{type(message).__name__} came with {len(fds)} descriptors, expected {count}")
    taken, rest = list(fds)[:count], list(fds)[count:]
    fds.clear()
    fds.extend(rest)
    return taken


def close_descriptors(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _decoded(decode: Callable[[bytes], M], body: bytes) -> M:
    try:
        return decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptFrame(f"cannot read a message of {len(body)} bytes: {error}") from error


class Connection(Generic[M]):
    """The blocking end: used by supervisors and workers.

    Thread: `send` from any thread; `recv` from one thread at a time. Never reads beyond one frame, so `fileno`
    may be given to a selector.
    """

    def __init__(self, sock: socket.socket, decode: Callable[[bytes], M]) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._decode = decode
        self._send_lock = threading.Lock()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Sends `message` and duplicates of `fds` (the caller keeps its own).

        Blocks: while the other end does not read.
        """
        frame = memoryview(pack_frame(msgspec.msgpack.encode(message), LOCAL_FRAME_BYTES_MAX))
        try:
            with self._send_lock:
                sent = self._sock.sendmsg([frame], _rights(fds))
                self._sock.sendall(frame[sent:])
        except OSError as error:
            raise ConnectionClosed(f"the local connection is closed: {error}") from error

    def recv(self, timeout_s: float | None = None) -> tuple[M, list[int]]:
        """The next message and its descriptors, which then belong to the caller.

        Args:
            timeout_s: how long to wait for the frame to begin; None waits for ever.
        Raises: ConnectionClosed at the end of the stream; TimeoutError.
        """
        if timeout_s is not None:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            if not poll.poll(timeout_s * 1000):
                raise TimeoutError(f"no local message within {timeout_s} s")
        fds: list[int] = []
        try:
            prefix = self._recv_exact(LENGTH.size, fds)
            message = _decoded(self._decode, self._recv_exact(checked_length(prefix, LOCAL_FRAME_BYTES_MAX), fds))
            return message, _take(fds, message)
        finally:
            close_descriptors(fds)

    def _recv_exact(self, size: int, fds: list[int]) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece, received = _receive(self._sock, min(size - len(data), _READ_BYTES), 0)
            except OSError as error:
                raise ConnectionClosed(f"the local connection broke: {error}") from error
            fds += received
            if not piece:
                raise ConnectionClosed("the other end of the local connection closed it")
            data += piece
        return bytes(data)

    def close(self) -> None:
        """Ends the connection; a `recv` blocked in another thread raises ConnectionClosed."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end is gone already
            pass
        self._sock.close()


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
        self._received: deque[int] = deque()
        self._queue: deque[tuple[memoryview, list[int]]] = deque()
        self._queued_bytes = 0
        self.closed = False
        self._loop.add_reader(sock, self._on_readable)

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Queues `message` and duplicates of `fds`; dropped if the connection has ended (on_closed tells).

        Blocks: never.
        """
        if self.closed:
            return
        frame = memoryview(pack_frame(msgspec.msgpack.encode(message), LOCAL_FRAME_BYTES_MAX))
        self._queue.append((frame, [os.dup(fd) for fd in fds]))
        self._queued_bytes += len(frame)
        if self._queued_bytes > LOCAL_BACKLOG_BYTES_MAX:
            self._end()
        else:
            self._flush()

    def close(self) -> None:
        """Ends the connection after one attempt to send what is queued; on_closed is not called."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._server.peers.discard(self)
            close_descriptors(list(self._received))
            for _, fds in self._queue:
                close_descriptors(fds)
            self._sock.close()

    def _end(self) -> None:
        if not self.closed:
            self.close()
            self._server.on_closed(self)

    def _flush(self) -> None:
        try:
            while self._queue:
                frame, fds = self._queue[0]
                sent = self._sock.sendmsg([frame], _rights(fds))
                close_descriptors(fds)
                self._queued_bytes -= sent
                if sent < len(frame):
                    self._queue[0] = (frame[sent:], [])
                else:
                    self._queue.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._flush)
        except OSError:
            self._end()
        else:
            self._loop.remove_writer(self._sock)

    def _on_readable(self) -> None:
        try:
            data, fds = _receive(self._sock, _READ_BYTES, 0)
            self._received.extend(fds)
            if not data:
                self._end()
                return
            for body in self._buffer.feed(data):
                message = _decoded(self._server.decode, body)
                self._server.on_message(self, message, _take(self._received, message))
                if self.closed:
                    return
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, CorruptFrame) as error:
            self._server.on_refused(f"local connection of process {self.pid}: {error}")
            self._end()


class Server(Generic[M]):
    """Accepts local connections on the running event loop. Thread: the event loop's only.

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
        self.decode = decode
        self.on_message = on_message
        self.on_closed = on_closed
        self.on_refused = on_refused
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        try:
            pid = check_same_user(sock, "the local socket")
        except PeerRefused as error:
            sock.close()
            self.on_refused(str(error))
            return
        sock.setblocking(False)
        self.peers.add(Peer(sock, pid, self))

    def close(self) -> None:
        """Stops listening and ends all connections."""
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for peer in list(self.peers):
            peer.close()
