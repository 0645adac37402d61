"""Length-prefixed frames on a byte stream: single ones, connections of them, and channels over many connections.

Rules of this file: a frame is a 4-byte big-endian length and that many bytes; which messages exist is not known here.
A length beyond the limit ends the stream (`CorruptFrame`), because there is no way to find the next frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar, get_args

import msgspec

from ..errors import CorruptFrame, TransportError
from .sockets import remote_name, unheard_s
from .tasks import loop_time

T = TypeVar("T")
LENGTH = struct.Struct("!I")
CONTROL_FRAME_BYTES_MAX = 16 << 20
CONTROL_BACKLOG_BYTES_MAX = 64 << 20
ACKNOWLEDGE_EVERY = 64
"""Messages received before an acknowledgement of its own is sent; else it goes along with the next message."""
_NUMBERS = struct.Struct("!QQ")  # this message's number, 0 for none; the number of the newest one received


class ConnectionClosed(TransportError):
    """The peer closed the stream, or died, or the link broke."""


@contextlib.asynccontextmanager
async def answered(timeout_s: float, failure: str) -> AsyncIterator[None]:
    """Give the block `timeout_s`. Raises: ConnectionClosed, `failure` and why, for a time-out, OSError or EOFError."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except (OSError, EOFError) as error:
        raise ConnectionClosed(f"{failure}: {str(error) or 'time-out'}") from error


def decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes | bytearray, where: str = "") -> T:
    """Decode a message. Raises: CorruptFrame, which names the message and its field."""
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        found = f"{where}{_named(error, body, decoder.type)} cannot be read: {error}"
        raise CorruptFrame(found, remedy="use one version on all hosts") from error


def _named(error: msgspec.MsgspecError, body: bytes | bytearray, kinds: Any) -> str:
    with contextlib.suppress(msgspec.MsgspecError, AttributeError, IndexError, KeyError, TypeError):
        if (place := re.search(r"`\$\[(\d+)\]", str(error))) is not None:
            for kind in get_args(kinds) or (kinds,):
                tag = kind.__struct_config__.tag
                if tag in (None, msgspec.msgpack.decode(body)[0]):
                    return f"{kind.__name__}.{kind.__struct_fields__[int(place[1]) - (tag is not None)]}"
    return f"a message of {len(body)} bytes"


def check_size(body_bytes: int, limit_bytes: int) -> None:
    """Raises: TransportError if no receiver accepts so many bytes."""
    if body_bytes > limit_bytes:
        raise TransportError(f"a message of {body_bytes} bytes exceeds the limit of {limit_bytes} bytes per frame")


def pack_frame(body: bytes, limit_bytes: int) -> bytes:
    """Make the frame of `body`. Raises: TransportError if that is larger than the receiver accepts."""
    check_size(len(body), limit_bytes)
    return LENGTH.pack(len(body)) + body


def checked_length(data: bytes | bytearray, limit_bytes: int, offset: int = 0) -> int:
    """Read the length of the frame at `offset`. Raises: CorruptFrame if it is beyond the limit."""
    (length,) = LENGTH.unpack_from(data, offset)
    if length > limit_bytes:
        raise CorruptFrame(
            f"a frame announces {length} bytes, at most {limit_bytes} are allowed: "
            "the peer runs another version, or the stream is damaged"
        )
    return int(length)


class FrameBuffer:
    """Cuts a byte stream that arrives in arbitrary pieces into frames."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the bodies that `data` completes; iterate to the end before the next call."""
        pending, start = self._pending, 0
        pending += data
        try:
            while len(pending) >= (body_at := start + LENGTH.size):
                end = body_at + checked_length(pending, self._limit_bytes, start)
                if len(pending) < end:
                    break
                start = end
                yield bytes(memoryview(pending)[body_at:end])
        finally:
            del pending[:start]


async def recv_exact(sock: socket.socket, size: int) -> bytes:
    """Raises: EOFError at the end of the connection; OSError."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        piece = await loop.sock_recv(sock, size - len(data))
        if not piece:
            raise EOFError("the other end closed the connection")
        data += piece
    return data


async def put(sock: socket.socket, message: object) -> None:
    """Raises: OSError; TransportError if it is too long."""
    frame = pack_frame(msgspec.msgpack.encode(message), CONTROL_FRAME_BYTES_MAX)
    await asyncio.get_running_loop().sock_sendall(sock, frame)


async def take(sock: socket.socket, kinds: type[T] | Any) -> T:
    """Reads one message to its last byte and no further: what follows may be a link's.
    Raises: EOFError at the end of the connection; OSError; CorruptFrame if it is too long, or none of `kinds`."""
    length = checked_length(await recv_exact(sock, LENGTH.size), CONTROL_FRAME_BYTES_MAX)
    decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kinds)
    return decoded(decoder, await recv_exact(sock, length), f"{remote_name(sock)}: ")


class FrameProtocol(asyncio.Protocol):
    """One framed connection on an event loop. `aborted`: it was ended here.

    Args: on_frame: gets each body, and may raise CorruptFrame, which ends the connection; on_lost: gets the reason once
        the connection has ended; on_made: called when `send` begins to work, before the first frame.
    """

    def __init__(
        self, on_frame: Callable[[bytes], None], on_lost: Callable[[str], None], on_made: Callable[[], None]
    ) -> None:
        self._on_frame, self._on_lost, self._on_made = on_frame, on_lost, on_made
        self._buffer = FrameBuffer(CONTROL_FRAME_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._reason = ""
        self._leaving = self.aborted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._on_made()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._buffer.feed(data):
                if self._transport is None or self._transport.is_closing() or self._leaving:
                    return
                self._on_frame(body)
        except CorruptFrame as error:
            self.abort(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost(self._reason or (str(exc) if exc else "the peer closed the connection"))

    def send(self, body: bytes) -> bool:
        """Queues one frame; False if the connection is over, as when the backlog overflows. Blocks: never."""
        if self._transport is None or self._transport.is_closing() or self._leaving:
            return False
        if self._transport.get_write_buffer_size() > CONTROL_BACKLOG_BYTES_MAX:
            self.abort(f"more than {CONTROL_BACKLOG_BYTES_MAX} bytes are waiting to be sent: the peer does not read")
            return False
        self._transport.write(pack_frame(body, CONTROL_FRAME_BYTES_MAX))
        return True

    @property
    def unheard_s(self) -> tuple[float, float]:
        """How long ago the other end's kernel last sent data, and anything; infinite without a connection."""
        with contextlib.suppress(OSError):
            if self._transport is not None and (sock := self._transport.get_extra_info("socket")) is not None:
                return unheard_s(sock)
        return math.inf, math.inf

    def close(self) -> None:
        """Sends what is queued and nothing more. The connection has ended when the peer has closed it, too."""
        # Bytes that the peer still sends are read and dropped. A socket that is closed with bytes in it resets the
        # connection, and a peer that meets the reset when it writes never reads our last words.
        if self._transport is not None and not self._leaving:
            self._leaving = True
            # Not `write_eof` while bytes are queued: nobody would get an error of asyncio's later shutdown.
            self._transport.set_write_buffer_limits(high=0)
            if not self._transport.get_write_buffer_size():
                self._end_writing()

    def resume_writing(self) -> None:
        if self._leaving:  # what was queued is sent
            asyncio.get_running_loop().call_soon(self._end_writing)

    def _end_writing(self) -> None:
        if self._transport is not None:
            try:
                self._transport.write_eof()
            except OSError as error:  # the peer has reset it, and the event loop is yet to notice
                self.abort(str(error))

    def abort(self, reason: str) -> None:
        """Ends the connection at once; `on_lost` gets `reason`."""
        self._reason = self._reason or reason
        self.aborted = True
        if self._transport is not None:
            self._transport.abort()


class ReliableChannel:
    """One node's end of messages that arrive in order and once, over one `connection` after another.

    A connection may end although both its ends live: something between them forgets it, or a kernel gives up too early.
    So messages are numbered, and kept until the other end has said that it has them. A new connection begins with all
    that is kept. Thread: the event loop's only.
    """

    def __init__(self) -> None:
        self.connection: FrameProtocol | None = None
        self._up = asyncio.Event()
        self._since = 0.0
        self._sent = self._received = self._unacknowledged = 0
        self._kept: deque[bytes] = deque()

    @property
    def age_s(self) -> float:
        """How long `connection` has been in use, or missing."""
        return loop_time() - self._since

    async def is_up_within(self, limit_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._up.wait()
        return self._up.is_set()

    def use(self, connection: FrameProtocol | None, why: str = "") -> None:
        """Ends the connection in use, if it has not ended, and goes on over `connection`; None: waits for the next."""
        before, self.connection = self.connection, connection
        self._since = loop_time()
        if before is not None:
            before.abort(why)
        if connection is None:
            self._up.clear()
            return
        self._up.set()
        self._put(0, b"")
        for number, body in enumerate(self._kept, self._sent - len(self._kept) + 1):
            self._put(number, body)

    def send(self, body: bytes) -> None:
        """Raises: TransportError if it is too long."""
        check_size(_NUMBERS.size + len(body), CONTROL_FRAME_BYTES_MAX)
        self._sent += 1
        self._kept.append(body)
        self._put(self._sent, body)

    def _put(self, number: int, body: bytes) -> None:
        if self.connection is not None and self.connection.send(_NUMBERS.pack(number, self._received) + body):
            self._unacknowledged = 0

    def receive(self, frame: bytes) -> bytes | None:
        """Return the message in a frame of `connection`, None if it is no new one. Raises: CorruptFrame."""
        if len(frame) < _NUMBERS.size:
            raise CorruptFrame(f"a frame of {len(frame)} bytes", f"at least {_NUMBERS.size}")
        number, known = _NUMBERS.unpack_from(frame)
        if known > self._sent or number > self._received + 1:
            found = f"message {number}, and that {known} of ours were heard"
            raise CorruptFrame(found, f"at most {self._received + 1} and {self._sent}")
        while self._sent - len(self._kept) < known:
            self._kept.popleft()
        if number <= self._received:
            return None
        self._received = number
        self._unacknowledged += 1
        if self._unacknowledged >= ACKNOWLEDGE_EVERY:
            self._put(0, b"")
        return frame[_NUMBERS.size :]
