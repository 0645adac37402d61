"""One message at a time on a connection that is no link yet: the rendezvous, and guests.

Rules of this file: a message is one frame, read to its last byte and no further (what follows may be a link's); the
socket does not block. Which messages exist is not known here.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec

from ..errors import CorruptFrame
from .framing import CONTROL_FRAME_BYTES_MAX, LENGTH, checked_length, pack_frame, why_unreadable
from .sockets import remote_name


def packed(message: msgspec.Struct) -> bytes:
    """Encode what `put` sends, to send it to many. Raises: TransportError if it is too long."""
    return pack_frame(msgspec.msgpack.encode(message), CONTROL_FRAME_BYTES_MAX)


async def put(sock: socket.socket, message: msgspec.Struct) -> None:
    """Raises: OSError; TransportError if it is too long."""
    await put_frame(sock, msgspec.msgpack.encode(message))


async def take(sock: socket.socket, kinds: Any) -> Any:
    """The next message.

    Raises: EOFError at the end of the connection; OSError; CorruptFrame if it is none of `kinds`.
    """
    body = await take_frame(sock)
    try:
        return msgspec.msgpack.decode(body, type=kinds)
    except msgspec.MsgspecError as error:
        raise CorruptFrame(
            f"{remote_name(sock)}: {why_unreadable(error, body, kinds)}", remedy="use one version on all hosts"
        ) from error


async def put_frame(sock: socket.socket, body: bytes) -> None:
    """Raises: OSError; TransportError if it is too long."""
    await asyncio.get_running_loop().sock_sendall(sock, pack_frame(body, CONTROL_FRAME_BYTES_MAX))


async def take_frame(sock: socket.socket) -> bytes:
    """Raises: EOFError at the end of the connection; OSError; CorruptFrame."""
    length = checked_length(await recv_exact_async(sock, LENGTH.size), CONTROL_FRAME_BYTES_MAX)
    return await recv_exact_async(sock, length)


async def recv_exact_async(sock: socket.socket, size: int) -> bytes:
    """Raises: EOFError at the end of the connection; OSError"""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        piece = await loop.sock_recv(sock, size - len(data))
        if not piece:
            raise EOFError("the other end closed the connection")
        data += piece
    return data
