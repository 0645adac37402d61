"""What the kernel does with our connections while a path loses everything."""

import asyncio
import ctypes
import platform
import re
import socket
import struct

from deadpool_plugin.transport import sockets
from deadpool_plugin.transport.framing import FrameProtocol

MESSAGES, DEAF_S = 20, 4.0
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27  # from asm-generic/socket.h


def deafen(sock: socket.socket) -> None:
    """Let the kernel drop every packet that comes for `sock`: a filter of one instruction, which keeps no byte."""
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(instruction)))


def test_what_is_lost_is_sent_again_within_a_second() -> None:
    async def run() -> int:
        loop, frames, links = asyncio.get_running_loop(), list[bytes](), list[FrameProtocol]()
        listener = sockets.listen_tcp("127.0.0.1")
        listener.setblocking(False)
        ours = await sockets.connected(listener.getsockname())
        theirs, _ = await loop.sock_accept(listener)
        for sock in (ours, theirs):
            sockets.tune(sock, 60.0)
            links.append(FrameProtocol(frames.append, lambda reason: None, lambda: None))
            await loop.create_connection(lambda: links[-1], sock=sock)
        for _ in range(MESSAGES):  # it learns how long a packet takes
            links[0].send(b"before")
            await asyncio.sleep(0.01)
        deafen(theirs)
        for _ in range(MESSAGES):
            links[0].send(b"meanwhile")
            await asyncio.sleep(DEAF_S / MESSAGES)
        told = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 12)
        theirs.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        while len(frames) < 2 * MESSAGES:
            await asyncio.sleep(0.01)
        for link in links:
            link.abort("the test is over")
        listener.close()
        return int(struct.unpack_from("8xI", told)[0])

    sent_again_after_us = asyncio.run(asyncio.wait_for(run(), 60.0))
    major, minor = re.findall(r"\d+", platform.release())[:2]
    if (int(major), int(minor)) >= (6, 15):
        assert sent_again_after_us <= 1_000_000
    else:  # six times at the same pace, and then doubled
        assert sent_again_after_us <= 4_000_000
