import asyncio
import errno
import select
import socket
import struct

import pytest
from hypothesis import given, strategies as st

from deadpool_plugin.errors import CorruptFrame, TransportError
from deadpool_plugin.transport.framing import FrameBuffer, FrameProtocol, pack_frame


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 17), min_size=1))
def test_frames_survive_any_chunking(bodies: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(pack_frame(body, 40) for body in bodies)
    buffer, found, start, turn = FrameBuffer(40), [], 0, 0
    while start < len(stream):
        size = sizes[turn % len(sizes)]
        found += list(buffer.feed(stream[start : start + size]))
        start, turn = start + size, turn + 1
    assert found == bodies


def test_frames_before_a_damaged_length_are_delivered() -> None:
    buffer, found = FrameBuffer(10), []
    with pytest.raises(CorruptFrame, match="announces 1000 bytes, at most 10"):
        for body in buffer.feed(pack_frame(b"good", 10) + (1000).to_bytes(4, "big")):
            found.append(body)
    assert found == [b"good"]


def test_a_body_beyond_the_limit_is_not_sent() -> None:
    with pytest.raises(TransportError, match="11 bytes exceeds the limit of 10"):
        pack_frame(b"x" * 11, 10)


def test_nothing_is_sent_before_the_connection_is_made() -> None:
    assert not FrameProtocol(lambda body: None, lambda reason: None, lambda: None).send(b"")


def test_a_connection_that_the_peer_has_reset_is_closed_like_any_other() -> None:
    """A host that dies resets its connections, and they may be dropped here before the event loop has heard of it."""

    async def close_what_was_reset() -> str:
        ended = asyncio.get_running_loop().create_future()
        protocol = FrameProtocol(lambda body: None, ended.set_result, lambda: None)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sock = socket.create_connection(listener.getsockname())
            peer, _ = listener.accept()
        await asyncio.get_running_loop().create_connection(lambda: protocol, sock=sock)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        reset = select.poll()
        reset.register(sock, 0)
        assert reset.poll(20_000)
        protocol.close()
        return str(await asyncio.wait_for(ended, 10.0))

    assert "not connected" in asyncio.run(close_what_was_reset())


def test_a_reset_while_the_last_words_are_sent_is_an_error_of_this_connection_only() -> None:
    class ResetAfterTheLastWord(socket.socket):
        def shutdown(self, how: int) -> None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    async def close_with_bytes_queued() -> tuple[str, bytes, list[str]]:
        loop = asyncio.get_running_loop()
        ended, unhandled = loop.create_future(), list[str]()
        loop.set_exception_handler(lambda _, context: unhandled.append(str(context)))
        protocol = FrameProtocol(lambda body: None, ended.set_result, lambda: None)
        body = bytes(8 << 20)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sock = ResetAfterTheLastWord(socket.AF_INET, socket.SOCK_STREAM)
            sock.connect(listener.getsockname())
            peer, _ = listener.accept()
        transport, _ = await loop.create_connection(lambda: protocol, sock=sock)
        assert protocol.send(body)
        assert transport.get_write_buffer_size()
        protocol.close()
        reader, writer = await asyncio.open_connection(sock=peer)
        received = await reader.readexactly(4 + len(body))
        async with asyncio.timeout(10.0):
            reason = str(await ended)
        writer.close()
        return reason, received[4:], unhandled

    reason, received, unhandled = asyncio.run(close_with_bytes_queued())
    assert "not connected" in reason
    assert received == bytes(8 << 20)
    assert not unhandled
