"""The bulk connection: small messages and large data in frames, each with its checksum.

Rules of this file: blocking sockets with kernel time-outs (so that MSG_WAITALL receives straight into the arena);
4 MiB frames; data is verified frame by frame where it lies. After CorruptFrame a connection is of no more use.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import xxhash

from ..errors import CorruptFrame, TransportError
from ..transport.framing import ConnectionClosed
from ..transport.sockets import remote_name, tune
from .integrity import FRAME_BYTES, Sums

MESSAGE_BYTES_MAX = 16 << 20
BLOB_BYTES_MAX = 1 << 30
PURPOSE = "bulk"
_PREFIX = struct.Struct("!4sIQQ")  # kind, length, offset, xxh3 of the body
_MESSAGE, _DATA = b"DPms", b"DPda"
_NICE = 10
T = TypeVar("T")


class Request(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of what a client asks for."""


class Push(Request, frozen=True):
    """Followed, if the answer is Ready, by Records, the header as a blob, the payload, and Sealed (or Abandoned)."""

    rank: int
    step: int
    generation: int
    replicas: tuple[int, ...]
    header_bytes: int
    header_digest: int
    layout_hash: str
    with_payload: bool
    payload_bytes: int


class PushRecording(Request, frozen=True):
    """Followed by a blob."""

    rank: int
    generation: int


class GetRecording(Request, frozen=True):
    rank: int


class GetHistory(Request, frozen=True):
    rank: int
    first: int
    last: int


class GetHeader(Request, frozen=True):
    rank: int
    step: int


class GetPayload(Request, frozen=True):
    """Answered by Ready, the payload, and Sealed (or Abandoned)."""

    rank: int
    step: int
    layout_hash: str
    payload_bytes: int


AnyRequest = Push | PushRecording | GetRecording | GetHistory | GetHeader | GetPayload


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything else."""


class Ready(Reply, frozen=True):
    """Go on. `history_last`: newest step before the pushed one whose records are held."""

    history_last: int = -1


class Wait(Reply, frozen=True):
    """Not yet: room is being made here."""


class Done(Reply, frozen=True):
    pass


class Refused(Reply, frozen=True):
    """`generation`: the asked node is in another one than what was sent."""

    reason: str
    generation: bool = False


class Sealed(Reply, frozen=True):
    """Sender: the source did not change while it was sent."""


class Abandoned(Reply, frozen=True):
    """Sender: it did; throw away what was received."""

    reason: str


AnyReply = Ready | Wait | Done | Refused | Sealed | Abandoned


class RefusedByPeer(TransportError):
    """The other node answered, and said no."""


class InAnotherGeneration(RefusedByPeer):
    """It lives, and is in another generation: fenced for the next one, or not in this one yet."""


def lower_priority() -> None:
    """Puts the calling thread behind everything that trains or beats hearts."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class BulkStream:
    """One bulk connection after the handshake. Thread: one at a time, but `cut` from any.

    Args:
        silent_after_s: how long the other end may neither send nor accept a byte within an exchange.
    """

    def __init__(self, sock: socket.socket, silent_after_s: float) -> None:
        self.address = remote_name(sock)
        self._sock = sock
        self._silent_after_s = silent_after_s
        tune(sock, silent_after_s)
        sock.settimeout(None)
        limit = struct.pack("ll", int(silent_after_s), int(silent_after_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    # ---- bytes

    def _recv_exact(self, view: memoryview, *, idle: bool = False) -> None:
        start = 0
        while start < len(view):
            try:
                count = self._sock.recv_into(view[start:], 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                if idle and start == 0:
                    continue  # nobody owes us anything; a dead host ends by keepalive
                raise TransportError(f"{self.address} sent nothing for {self._silent_after_s:g} s") from error
            except OSError as error:
                raise ConnectionClosed(f"the bulk connection with {self.address} broke: {error}") from error
            if not count:
                raise ConnectionClosed(f"{self.address} closed the bulk connection")
            start += count

    def _send_frame(self, kind: bytes, offset: int, body: memoryview, *, more: bool = False) -> int:
        """Returns the checksum of `body`. `more`: something follows at once, do not wake the other end for this."""
        digest: int = xxhash.xxh3_64_intdigest(body)
        prefix = _PREFIX.pack(kind, len(body), offset, digest)
        try:
            sent = self._sock.sendmsg([prefix, body], (), socket.MSG_MORE if more else 0)
            while sent < len(prefix):
                sent += self._sock.send(prefix[sent:])
            while sent < len(prefix) + len(body):
                sent += self._sock.send(body[sent - len(prefix) :])
        except BlockingIOError as error:
            raise TransportError(f"{self.address} accepted nothing for {self._silent_after_s:g} s") from error
        except OSError as error:
            raise ConnectionClosed(f"the bulk connection with {self.address} broke: {error}") from error
        return digest

    def _recv_prefix(self, kind: bytes, *, idle: bool = False) -> tuple[int, int, int]:
        prefix = bytearray(_PREFIX.size)
        self._recv_exact(memoryview(prefix), idle=idle)
        found, length, offset, digest = _PREFIX.unpack(prefix)
        if found != kind:
            raise CorruptFrame(f"a frame of kind {found!r} from {self.address}", repr(kind))
        return length, offset, digest

    def _verify(self, body: memoryview, offset: int, digest: int) -> None:
        if xxhash.xxh3_64_intdigest(body) != digest:
            raise CorruptFrame(
                f"{len(body)} bytes at offset {offset} from {self.address} fail their checksum",
                remedy="they are not used; if it happens again, suspect the network card or memory of either host",
            )

    # ---- messages

    def send(self, message: Request | Reply, *, more: bool = False) -> None:
        self._send_frame(_MESSAGE, 0, memoryview(msgspec.msgpack.encode(message)), more=more)

    def recv(self, kind: type[T] | Any, *, idle: bool = False) -> T:
        """The next message; `idle` waits for it as long as the connection lives."""
        length, _, digest = self._recv_prefix(_MESSAGE, idle=idle)
        if length > MESSAGE_BYTES_MAX:
            raise CorruptFrame(f"a message of {length} bytes from {self.address}", f"at most {MESSAGE_BYTES_MAX}")
        body = bytearray(length)
        self._recv_exact(memoryview(body))
        self._verify(memoryview(body), 0, digest)
        try:
            message: T = msgspec.msgpack.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise CorruptFrame(f"a message from {self.address} cannot be read: {error}") from error
        return message

    def expect(self, *kinds: type[T]) -> T:
        """The reply, which must be of one of these kinds. Blocks: as long as the other end says Wait in time.

        Raises: RefusedByPeer with the other side's reason, InAnotherGeneration if it is that.
        """
        reply: object = self.recv(AnyReply)
        while isinstance(reply, Wait):
            reply = self.recv(AnyReply)
        if isinstance(reply, Refused | Abandoned):
            elsewhere = isinstance(reply, Refused) and reply.generation
            raise (InAnotherGeneration if elsewhere else RefusedByPeer)(f"{self.address} refused: {reply.reason}")
        if not isinstance(reply, kinds):
            raise CorruptFrame(f"{type(reply).__name__} from {self.address}", " or ".join(k.__name__ for k in kinds))
        return reply

    # ---- data

    def send_data(self, view: memoryview, *, more: bool = False) -> Sums:
        """Returns the checksums of its frames."""
        offsets = range(0, len(view), FRAME_BYTES)
        return tuple(
            self._send_frame(_DATA, offset, view[offset : offset + FRAME_BYTES], more=more) for offset in offsets
        )

    def recv_data(self, view: memoryview, check: Callable[[], None] = lambda: None) -> Sums:
        """Fills `view` with what the other side sends by `send_data`, verified; `check` may raise before each frame.

        Returns: the checksums of its frames.
        Raises: CorruptFrame.
        """
        sums: list[int] = []
        start = 0
        while start < len(view):
            check()
            length, offset, digest = self._recv_prefix(_DATA)
            if offset != start or not 0 < length <= len(view) - start:
                raise CorruptFrame(f"{length} bytes at offset {offset} from {self.address}", f"offset {start}")
            body = view[start : start + length]
            self._recv_exact(body)
            self._verify(body, offset, digest)
            sums.append(digest)
            start += length
        return tuple(sums)

    def send_blob(self, blob: bytes, *, more: bool = False) -> None:
        self._send_frame(_MESSAGE, 0, memoryview(len(blob).to_bytes(8, "big")), more=more or len(blob) > 0)
        self.send_data(memoryview(blob), more=more)

    def recv_blob(self) -> bytes:
        length, _, digest = self._recv_prefix(_MESSAGE)
        if length != 8:
            raise CorruptFrame(f"a size of {length} bytes from {self.address}", "8")
        size = bytearray(8)
        self._recv_exact(memoryview(size))
        self._verify(memoryview(size), 0, digest)
        if int.from_bytes(size, "big") > BLOB_BYTES_MAX:
            raise CorruptFrame(f"{int.from_bytes(size, 'big')} bytes from {self.address}", f"at most {BLOB_BYTES_MAX}")
        blob = bytearray(int.from_bytes(size, "big"))
        self.recv_data(memoryview(blob))
        return bytes(blob)

    # ---- end

    def cut(self) -> None:
        """Ends whatever the connection's thread waits for."""
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
