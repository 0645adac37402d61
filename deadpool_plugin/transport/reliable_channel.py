"""Messages between two nodes, in order and once, over one connection after another.

A connection may end although both its ends live: something between them forgets it, a network is set up anew, a kernel
gives up too early. What was under way is lost with it. So messages are numbered, and kept until the other end has said
that it has them; a new connection begins with all that is kept, and what was heard already is not heard again.

Rules of this file: opens no connection and knows no message. Thread: the event loop's only.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque

from ..errors import CorruptFrame
from .framing import CONTROL_FRAME_BYTES_MAX, FrameProtocol, check_size

_HEADER = struct.Struct("!QQ")  # this message's number, 0 for none; the number of the newest one that was heard
SAY_SO_EVERY = 64
"""Messages that are heard before an acknowledgement of its own is sent; else it goes along with what is said anyway."""


class Line:
    """One node's end. `link`: the connection now, None while there is none; `up` is set while there is one."""

    def __init__(self) -> None:
        self.link: FrameProtocol | None = None
        self.up = asyncio.Event()
        self._since = 0.0
        self._said = self._heard = self._unmentioned = 0
        self._kept: deque[bytes] = deque()

    @property
    def age_s(self) -> float:
        """For how long `link` has been what it is."""
        return asyncio.get_running_loop().time() - self._since

    def carry(self, link: FrameProtocol | None, why: str = "") -> None:
        """From now on over `link`, and not over the one before, which is ended if it has not; without one what is said
        waits for the next."""
        before, self.link = self.link, link
        self._since = asyncio.get_running_loop().time()
        if before is not None:
            before.abort(why)
        if link is None:
            self.up.clear()
            return
        self.up.set()
        self._put(0, b"")
        for number, body in enumerate(self._kept, self._said - len(self._kept) + 1):
            self._put(number, body)

    def say(self, body: bytes) -> None:
        """Raises: TransportError if it is too long."""
        check_size(_HEADER.size + len(body), CONTROL_FRAME_BYTES_MAX)
        self._said += 1
        self._kept.append(body)
        self._put(self._said, body)

    def _put(self, number: int, body: bytes) -> None:
        if self.link is not None and self.link.send(_HEADER.pack(number, self._heard) + body):
            self._unmentioned = 0

    def hear(self, frame: bytes) -> bytes | None:
        """The message in a frame that has come over `link`; None if it is not new, or none. Raises: CorruptFrame."""
        if len(frame) < _HEADER.size:
            raise CorruptFrame(f"a frame of {len(frame)} bytes", f"at least {_HEADER.size}")
        number, known = _HEADER.unpack_from(frame)
        if known > self._said or number > self._heard + 1:
            found = f"message {number}, and that {known} of ours were heard"
            raise CorruptFrame(found, f"at most {self._heard + 1} and {self._said}")
        while self._said - len(self._kept) < known:
            self._kept.popleft()
        if number <= self._heard:
            return None
        self._heard = number
        self._unmentioned += 1
        if self._unmentioned >= SAY_SO_EVERY:
            self._put(0, b"")
        return frame[_HEADER.size :]
