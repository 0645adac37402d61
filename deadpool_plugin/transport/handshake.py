"""Mutual proof of the job's secret, and of being of one job, at the start of every TCP connection.

Rules of this file: each side sends magic, nonce, identity and job, then HMAC-SHA256 over its role, the purpose and both
greetings; both check the other's proof before anything else is read. The role keeps a proof from being reflected,
the purpose keeps a control connection from being taken for a bulk one, the job keeps two jobs of one user apart, whose
secret is often the same (a port is soon another one's). Both sides send before they check, so both learn of a wrong
secret or job by themselves. The secret is never sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
import struct
from dataclasses import dataclass, field

from ..errors import PeerRefused
from .exchange import recv_exact_async
from .framing import ConnectionClosed
from .sockets import remote_name

_GREETING = struct.Struct("!8s32sI16s")  # magic with the protocol's version, nonce, identity, job
_MAGIC = b"deadpl-3"
_PROOF_BYTES = hashlib.sha256().digest_size
HANDSHAKE_TIMEOUT_S = 10.0
ANY_JOB = "?"
"""The job of a host that wants to be told what job it has found."""


@dataclass
class Credentials:
    """What a node says and proves of itself. `job`: at most 16 characters; "" until its nodes have met."""

    secret: bytes = field(repr=False)
    job: str = ""

    def of(self, job: str) -> Credentials:
        """The same secret, for `job`."""
        return Credentials(self.secret, job)


class Handshake:
    """One side's part without IO: send `greeting`, `answer(theirs)` gives the proof to send, `check(theirs)`."""

    def __init__(self, credentials: Credentials, purpose: str, identity: int, *, dialling: bool, address: str) -> None:
        self.greeting = _GREETING.pack(_MAGIC, os.urandom(32), identity, credentials.job.encode())
        self._secret, self._job = credentials.secret, credentials.job
        self._purpose = purpose
        self._dialling = dialling
        self._address = address
        self._theirs = b""

    def _proof(self, role: bytes) -> bytes:
        dialler, listener = (self.greeting, self._theirs) if self._dialling else (self._theirs, self.greeting)
        return hmac.digest(self._secret, b"\0".join((role, self._purpose.encode(), dialler + listener)), "sha256")

    def recognise(self, start: bytes) -> None:
        """Raises: PeerRefused if what a peer sends first is no greeting of this protocol."""
        if start != _MAGIC:
            raise self.refusal("it does not speak this protocol or version")

    def answer(self, theirs: bytes) -> bytes:
        """Our proof. Raises: PeerRefused as `recognise`."""
        self.recognise(theirs[: len(_MAGIC)])
        self._theirs = theirs
        return self._proof(b"dial" if self._dialling else b"listen")

    def check(self, proof: bytes) -> int:
        """The other side's identity.

        Raises: PeerRefused if it does not know the secret or is of another job; ConnectionClosed if one of us does not
        know its job yet: to be tried again.
        """
        if not hmac.compare_digest(proof, self._proof(b"listen" if self._dialling else b"dial")):
            raise self.refusal(
                "it does not prove the job's secret", "use the same secret_file content on every host of the job"
            )
        _, _, identity, job = _GREETING.unpack(self._theirs)
        self._check_job(job.rstrip(b"\0").decode(errors="replace"))
        return int(identity)

    def _check_job(self, theirs: str) -> None:
        ours = self._job
        if theirs == ours or ANY_JOB in (theirs, ours):
            return
        if not (theirs and ours):
            who = "it has" if ours else "we have"
            raise ConnectionClosed(f"{self._address} is to try again: {who} not met the other nodes of the job yet")
        raise self.refusal(
            f"it is of job {theirs}, this is job {ours} with the same secret",
            "end what is left there of a job that should be over; if both run, nothing: each has its own nodes",
        )

    def refusal(self, reason: str, remedy: str = "") -> PeerRefused:
        found = f"refused {self._address} ({self._purpose} connection): {reason}"
        return PeerRefused(found, remedy=remedy, address=self._address)


def shake_hands(
    sock: socket.socket,
    credentials: Credentials,
    purpose: str,
    identity: int,
    *,
    dialling: bool,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> int:
    """Proves secret and job to the other end of a fresh connection and returns its identity (a node id).

    Raises: PeerRefused, with the address; ConnectionClosed if the other end hangs up, stays silent, or is to be tried
    again because not both have met their job.
    Blocks: up to `timeout_s` per message.
    """
    shake = Handshake(credentials, purpose, identity, dialling=dialling, address=remote_name(sock))
    sock.settimeout(timeout_s)
    try:
        sock.sendall(shake.greeting)
        start = _recv_exact(sock, len(_MAGIC))
        shake.recognise(start)
        sock.sendall(shake.answer(start + _recv_exact(sock, _GREETING.size - len(_MAGIC))))
        peer = shake.check(_recv_exact(sock, _PROOF_BYTES))
    except (OSError, EOFError) as error:
        raise ConnectionClosed(f"the handshake with {remote_name(sock)} ended early: {error!r}") from error
    sock.settimeout(None)
    return peer


def _recv_exact(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise EOFError("the other end closed the connection")
        data += piece
    return data


async def shake_hands_async(
    sock: socket.socket,
    credentials: Credentials,
    purpose: str,
    identity: int,
    *,
    dialling: bool,
) -> int:
    """`shake_hands` for a non-blocking socket on the running event loop; HANDSHAKE_TIMEOUT_S covers the whole of it."""
    shake = Handshake(credentials, purpose, identity, dialling=dialling, address=remote_name(sock))
    loop = asyncio.get_running_loop()

    async def exchange() -> int:
        await loop.sock_sendall(sock, shake.greeting)
        start = await recv_exact_async(sock, len(_MAGIC))
        shake.recognise(start)
        rest = await recv_exact_async(sock, _GREETING.size - len(_MAGIC))
        await loop.sock_sendall(sock, shake.answer(start + rest))
        return shake.check(await recv_exact_async(sock, _PROOF_BYTES))

    try:
        return await asyncio.wait_for(exchange(), HANDSHAKE_TIMEOUT_S)
    except (OSError, EOFError, asyncio.TimeoutError) as error:
        raise ConnectionClosed(f"the handshake with {remote_name(sock)} ended early: {error!r}") from error
