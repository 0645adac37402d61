"""A middlebox between the ends of TCP connections, which may forget them."""

from __future__ import annotations

import asyncio
import socket
import struct

from deadpool_plugin.transport.sockets import Address

_RESET = struct.pack("ii", 1, 0)


class _Side(asyncio.Protocol):
    """One end's connection with the relay."""

    def __init__(self, passage: Passage) -> None:
        self._passage = passage
        self.transport: asyncio.Transport | None = None
        self._early = bytearray()

    @property
    def _other(self) -> _Side:
        return self._passage.target if self is self._passage.dialler else self._passage.dialler

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._passage.is_cut:
            self.reset()
        transport.write(bytes(self._early))

    def write(self, data: bytes) -> None:
        if self.transport is None:
            self._early += data
        else:
            self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        if self._passage.is_cut:
            return
        self._passage.is_greeted = True
        self._other.write(self._passage.bounded(data))
        if self._passage.left == 0:
            self._passage.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._passage.is_cut and self._other.transport is not None:
            self._other.transport.close()

    def reset(self) -> None:
        """End it as a host does that knows nothing of it."""
        if self.transport is not None and not self.transport.is_closing():
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()


class Passage:
    """A connection through the relay. `left`: bytes of either end's it passes on before it is cut, None without end.
    `is_greeted`: an end has sent something."""

    def __init__(self, left: int | None) -> None:
        self.left = left
        self.is_cut = self.is_greeted = False
        self.dialler, self.target = _Side(self), _Side(self)

    def bounded(self, data: bytes) -> bytes:
        if self.left is None:
            return data
        data = data[: self.left]
        self.left -= len(data)
        return data

    def cut(self, *, dialler: bool = True, target: bool = True) -> None:
        """Reset both ends, or one: the other one is not told, and nothing passes any more."""
        self.is_cut = True
        for side, is_told in ((self.dialler, dialler), (self.target, target)):
            if is_told:
                side.reset()


class Relay:
    """Passes connections on to `target`. `cut_after`: each of the next ones is reset after so many bytes of
    either end's. `is_deaf`: connections are accepted, and that is all. Thread: the event loop's only."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self.passages: list[Passage] = []
        self.cut_after: list[int] = []
        self.is_deaf = False
        self._dials: set[asyncio.Task[None]] = set()

    async def open(self) -> Address:
        self._server = await asyncio.get_running_loop().create_server(self._accepted, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return host, port

    def _accepted(self) -> asyncio.Protocol:
        passage = Passage(self.cut_after.pop(0) if self.cut_after else None)
        self.passages.append(passage)
        if not self.is_deaf:
            task = asyncio.get_running_loop().create_task(self._dial(passage))
            self._dials.add(task)
            task.add_done_callback(self._dials.discard)
        return passage.dialler

    async def _dial(self, passage: Passage) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: passage.target, *self._target)
        except OSError:
            passage.cut()

    def cut(self, *, dialler: bool = True, target: bool = True) -> None:
        """Cut all that pass now."""
        for passage in self.passages:
            if not passage.is_cut:
                passage.cut(dialler=dialler, target=target)

    async def close(self) -> None:
        self._server.close()
        await asyncio.gather(*self._dials, return_exceptions=True)
        for passage in self.passages:
            passage.cut()
