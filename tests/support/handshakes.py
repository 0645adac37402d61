"""Handshakes of tests and attacks that block."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from deadpool_plugin.transport.handshake import Credentials, shake_hands


def shake(sock: socket.socket, credentials: Credentials, purpose: str, identity: int, **options: Any) -> int:
    """Do `shake_hands` with a socket that blocks."""
    sock.setblocking(False)
    peer = asyncio.run(shake_hands(sock, credentials, purpose, identity, **options))
    sock.setblocking(True)
    return peer
