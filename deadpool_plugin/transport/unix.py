"""Messages and descriptors over Unix stream sockets, within one node.

Rules of this file: descriptors travel as SCM_RIGHTS with the first byte of the frame whose message says
`descriptors > 0`, so they are in hand before the frame is complete. Abstract names: nothing to unlink, and both
ends check that the other runs as the same user. Which messages exist is not known here (see local.py);
the server's side is unix_server.py.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from ..errors import CorruptFrame, PeerRefused, TransportError
from .framing import LENGTH, ConnectionClosed, checked_length, pack_frame
from .sockets import closed_on_error

M = TypeVar("M")

LOCAL_FRAME_BYTES_MAX = 1 << 30
DESCRIPTORS_MAX = 16
READ_BYTES = 1 << 18
_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)
_UCRED = struct.Struct("3i")


def listen_unix(name: str) -> socket.socket:
    """A listening abstract Unix socket; `name` must be the job's own (it is visible to the whole host)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with closed_on_error(sock):
            sock.bind("\0" + name)
            sock.listen(256)
    except OSError as error:
        raise TransportError(f"cannot listen at the local socket @{name}: {error}; does another agent run?") from error
    return sock


def connect_unix(name: str) -> socket.socket:
    """A connected socket to the listener `name` of the same user."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with closed_on_error(sock):
            sock.connect("\0" + name)
            check_same_user(sock, f"@{name}")
    except OSError as error:
        raise ConnectionClosed(f"nobody answers at the local socket @{name}: {error}") from error
    return sock


def check_same_user(sock: socket.socket, where: str) -> int:
    """The process id of the other end, which must run as this process's user."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.geteuid():
        raise PeerRefused(f"refused process {pid} at {where}: it runs as user {uid}, expected user {os.geteuid()}")
    return int(pid)


def rights(fds: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


def receive(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    data, ancillary, message_flags, _ = sock.recvmsg(size, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if message_flags & socket.MSG_CTRUNC:
        close_descriptors(fds)
        raise CorruptFrame(f"descriptors were lost: more than {DESCRIPTORS_MAX} in one frame, or too many open files")
    return data, list(fds)


def take_descriptors(fds: list[int], message: object) -> list[int]:
    """Those of `fds` that came with `message`, which are taken out. Raises: CorruptFrame."""
    count = getattr(message, "descriptors", 0)
    if len(fds) < count:
        raise CorruptFrame(f"{type(message).__name__} came with {len(fds)} descriptors, expected {count}")
    taken = fds[:count]
    del fds[:count]
    return taken


def duplicates(fds: Sequence[int]) -> list[int]:
    """All of them or none. Raises: OSError."""
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError:
        close_descriptors(copies)
        raise
    return copies


def close_descriptors(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def decoded(decode: Callable[[bytes], M], body: bytes) -> M:
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
                sent = self._sock.sendmsg([frame], rights(fds))
                if sent < len(frame):  # even an empty send fails once the receiver has closed
                    self._sock.sendall(frame[sent:])
        except OSError as error:
            raise ConnectionClosed(f"the local connection is closed: {error}") from error

    def recv(self) -> tuple[M, list[int]]:
        """The next message and its descriptors, which then belong to the caller.

        Raises: ConnectionClosed at the end of the stream. Blocks: until the message is here.
        """
        fds: list[int] = []
        try:
            prefix = self._recv_exact(LENGTH.size, fds)
            message = decoded(self._decode, self._recv_exact(checked_length(prefix, LOCAL_FRAME_BYTES_MAX), fds))
            return message, take_descriptors(fds, message)
        finally:
            close_descriptors(fds)

    def _recv_exact(self, size: int, fds: list[int]) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece, received = receive(self._sock, min(size - len(data), READ_BYTES))
            except OSError as error:
                raise ConnectionClosed(f"the local connection broke: {error}") from error
            fds += received
            if not piece:
                raise ConnectionClosed("the other end of the local connection closed it")
            data += piece
        return bytes(data)

    def close(self) -> None:
        """Ends the connection; a `recv` blocked in another thread raises ConnectionClosed."""
        with contextlib.suppress(OSError):  # the other end is gone already
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
