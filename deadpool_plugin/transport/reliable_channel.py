"""Messages between two nodes, in order and once, over one connection after another.

A connection may end although both its ends live: something between them forgets it, a network is set up anew, a kernel
gives up too early. What was under way is lost with it. So messages are numbered, and kept until the other end has said
that it has them. A new connection begins with all that is kept, and what has come already is not delivered again.

Rules of this file: opens no connection and knows no message. Thread: the event loop's only.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import deque

from ..errors import CorruptFrame
from .framing import CONTROL_FRAME_BYTES_MAX, FrameProtocol, check_size
from .tasks import loop_time

_HEADER = struct.Struct("!QQ")  # this message's number, 0 for none; the number of the newest one received
ACKNOWLEDGE_EVERY = 64
"""Messages received before an acknowledgement of its own is sent; else it goes along with the next message."""


class ReliableChannel:
    """One node's end. `connection`: the one in use, None while there is none."""

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
        check_size(_HEADER.size + len(body), CONTROL_FRAME_BYTES_MAX)
        self._sent += 1
        self._kept.append(body)
        self._put(self._sent, body)

    def _put(self, number: int, body: bytes) -> None:
        if self.connection is not None and self.connection.send(_HEADER.pack(number, self._received) + body):
            self._unacknowledged = 0

    def receive(self, frame: bytes) -> bytes | None:
        """Return the message in a frame of `connection`, None if it is no new one. Raises: CorruptFrame."""
        if len(frame) < _HEADER.size:
            raise CorruptFrame(f"a frame of {len(frame)} bytes", f"at least {_HEADER.size}")
        number, known = _HEADER.unpack_from(frame)
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
        return frame[_HEADER.size :]
