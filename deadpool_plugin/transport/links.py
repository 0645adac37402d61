"""The beginning of a control link: a handshake, and a word of who was dialled whether there is to be a link.

Rules of this file: it keeps nothing and decides nothing; whatever raises has closed the connection. Thread: the event
loop's only.
"""

from __future__ import annotations

import asyncio
import socket

from ..core.types import NodeId
from ..errors import PeerRefused
from .exchange import put_frame, take_frame
from .framing import ConnectionClosed
from .handshake import HANDSHAKE_TIMEOUT_S, Credentials, shake_hands_async
from .join_protocol import PURPOSE
from .sockets import Address, closed_on_error, connected, remote_name, tune

_WELCOME, _NOT_WANTED = b"welcome", b"not wanted"


class NotWanted(PeerRefused):
    """A node of this job counts us as lost, or does not know us."""


async def dial(
    peer: NodeId, address: Address, node: NodeId, credentials: Credentials, silent_after_s: float
) -> socket.socket:
    """A connection to `peer`, which knows that it is `node` that dials, and wants the link.

    Raises: NotWanted, PeerRefused, ConnectionClosed, OSError.
    """
    sock = await connected(address)
    with closed_on_error(sock):
        tune(sock, silent_after_s)
        found, where = await shake_hands_async(sock, credentials, PURPOSE, node, dialling=True), remote_name(sock)
        if found != peer:
            raise PeerRefused(f"{where} says it is node {found}", f"node {peer}", address=where)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                word = await take_frame(sock)
        except (TimeoutError, EOFError) as error:
            raise ConnectionClosed(f"node {peer} did not let us in: {error!r}") from error
        if word != _WELCOME:
            raise NotWanted(f"node {peer} at {where} wants no link with node {node}", address=where)
    return sock


async def greet(sock: socket.socket, node: NodeId, credentials: Credentials, silent_after_s: float) -> NodeId:
    """Identify the peer that has dialled `node` over `sock`, GUEST included.

    Raises: PeerRefused, ConnectionClosed, OSError.
    """
    with closed_on_error(sock):
        sock.setblocking(False)
        tune(sock, silent_after_s)
        return await shake_hands_async(sock, credentials, PURPOSE, node, dialling=False)


async def welcome(sock: socket.socket, peer: NodeId) -> None:
    """Tells `peer`, which has dialled, that there is to be a link. Raises: ConnectionClosed, OSError."""
    with closed_on_error(sock):
        if _has_ended(sock):
            raise ConnectionClosed(f"node {peer} gave the handshake up")
        await put_frame(sock, _WELCOME)


async def turn_away(sock: socket.socket) -> None:
    """Tells who has dialled that there is to be no link. Raises: OSError."""
    with sock:
        await put_frame(sock, _NOT_WANTED)


def _has_ended(sock: socket.socket) -> bool:
    """Return whether the other end of a non-blocking connection has closed it, and all is read. Raises: OSError."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
