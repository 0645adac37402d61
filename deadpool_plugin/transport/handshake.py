"""Mutual proof of the job's secret, and of being of one job, at the start of every TCP connection.

Rules of this file: each side sends magic, nonce, identity and job, then HMAC-SHA256 over its role, the purpose and both
greetings; both check the other's proof before anything else is read. The role keeps a proof from being reflected. The
purpose keeps a control connection from being taken for a bulk one. The job keeps two jobs of one user apart, whose
secret is often the same. Both sides send before they check, so both learn of a wrong secret or job by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import PeerRefused
from .framing import ConnectionClosed, recv_exact_async
from .sockets import remote_name
from .tasks import Tasks

_GREETING = struct.Struct("!8s32sI16s")  # magic with the protocol's version, nonce, identity, job
_MAGIC = b"deadpl-3"
_PROOF_BYTES = hashlib.sha256().digest_size
HANDSHAKE_TIMEOUT_S = 10.0
UNPROVEN_MIN, UNPROVEN_MAX, UNPROVEN_SHARE = 16, 512, 8
"""How many connections of a listener may be unproven: this part of the files the process may open, within the two."""
REFUSED_HOSTS_MAX = 32
"""Refused hosts that are told of: one that can forge addresses has more of them than we have memory."""
_RETRY_S = 0.1
_log = logging.getLogger(__name__)
ANY_JOB = "?"
"""The job of a host that wants to be told what job it has found."""


@dataclass
class Credentials:
    """The identity that a node proves. `job`: at most 16 characters; "" until its nodes have met."""

    secret: bytes = field(repr=False)
    job: str = ""

    def of(self, job: str) -> Credentials:
        """Return the same secret for `job`."""
        return Credentials(self.secret, job)


class Unproven:
    """The connections of one listener whose other end has proved nothing yet. Thread: any.

    Anybody who reaches the port can open them, and leave them open. So there are at most `limit`: when one more comes,
    the one that has waited longest is ended. An honest peer that is ended so tries again.

    Args: what: the kind of connections, for people.
    """

    def __init__(self, what: str, limit: int = 0) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] % (1 << 63)  # -1: as many as it likes
        self.limit = limit or max(UNPROVEN_MIN, min(UNPROVEN_MAX, files // UNPROVEN_SHARE))
        self._what = what
        self._waiting: dict[socket.socket, None] = {}
        self._open = 0
        self._changed = threading.Condition()
        self._complained: set[int | None] = set()

    @contextlib.contextmanager
    def held(self, sock: socket.socket) -> Iterator[None]:
        """Counts `sock` as long as it has proved nothing."""
        self.enter(sock)
        try:
            yield
        finally:
            self.leave(sock)

    def enter(self, sock: socket.socket) -> None:
        with self._changed:
            if len(self._waiting) >= self.limit:
                self._end_oldest()
            self._waiting[sock] = None
            self._open += 1

    def leave(self, sock: socket.socket) -> None:
        with self._changed:
            self._waiting.pop(sock, None)
            self._open -= 1
            self._changed.notify_all()

    def await_room(self, timeout_s: float) -> bool:
        """Wait until fewer than `limit` are left, for a listener with a thread for each. Returns: whether they are."""
        with self._changed:
            if len(self._waiting) >= self.limit:
                self._end_oldest()
            return self._changed.wait_for(lambda: self._open < self.limit, timeout_s)

    async def serve(
        self, listener: socket.socket, handle: Callable[[socket.socket], Coroutine[Any, Any, None]], tasks: Tasks
    ) -> None:
        """Starts `handle` for every connection that comes to `listener`, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # too many open files, or the peer gave up: neither ends the listener
                self.cannot_accept(error)
                await asyncio.sleep(_RETRY_S)
                continue
            tasks.start(handle(sock))
            await asyncio.sleep(0)  # accepting one that waits already does not let others run

    def cannot_accept(self, error: OSError) -> None:
        """Say that `accept` has failed, once for each reason, and free what the oldest holds."""
        if error.errno not in self._complained:
            self._complained.add(error.errno)
            _log.warning("cannot accept a %s connection: %s; it is tried again and not said again", self._what, error)
        with self._changed:
            self._end_oldest()

    def _end_oldest(self) -> None:
        """Shut the oldest one down; its reader meets the end, and closes it."""
        oldest = next(iter(self._waiting), None)
        if oldest is not None:
            del self._waiting[oldest]
            with contextlib.suppress(OSError):  # it has ended already
                oldest.shutdown(socket.SHUT_RDWR)


class Refusals:
    """The peers that a listener has refused, each host told of once. Thread: any; `tell` runs in the caller's."""

    def __init__(self, tell: Callable[[PeerRefused], None]) -> None:
        self._tell, self._lock = tell, threading.Lock()
        self.told: dict[str, str] = {}
        """Host -> what was said of it."""

    def add(self, error: PeerRefused) -> None:
        host = error.address.rpartition(":")[0]
        with self._lock:
            if host in self.told or len(self.told) >= REFUSED_HOSTS_MAX:
                return
            self.told[host] = str(error)
        self._tell(error)


class Handshake:
    """One side's part without IO: send `greeting`, `answer(theirs)` gives the proof to send, `check(theirs)`."""

    def __init__(self, credentials: Credentials, purpose: str, identity: int, *, dialling: bool, address: str) -> None:
        self.greeting = _GREETING.pack(_MAGIC, os.urandom(32), identity, credentials.job.encode())
        self._secret, self._job = credentials.secret, credentials.job
        self._purpose, self._dialling, self._address = purpose, dialling, address
        self._theirs = b""

    def _proof(self, role: bytes) -> bytes:
        dialler, listener = (self.greeting, self._theirs) if self._dialling else (self._theirs, self.greeting)
        return hmac.digest(self._secret, b"\0".join((role, self._purpose.encode(), dialler + listener)), "sha256")

    def recognise(self, start: bytes) -> bytes:
        """Return `start`, a peer's first bytes. Raises: PeerRefused if they begin no greeting of this protocol."""
        if start != _MAGIC:
            raise self._refusal("it does not speak this protocol or version")
        return start

    def answer(self, theirs: bytes) -> bytes:
        """Make our proof. Raises: PeerRefused as `recognise`."""
        self.recognise(theirs[: len(_MAGIC)])
        self._theirs = theirs
        return self._proof(b"dial" if self._dialling else b"listen")

    def check(self, proof: bytes) -> int:
        """Return the other side's identity.

        Raises: PeerRefused if it does not know the secret or is of another job; ConnectionClosed if one of us does not
        know its job yet: to be tried again.
        """
        if not hmac.compare_digest(proof, self._proof(b"listen" if self._dialling else b"dial")):
            raise self._refusal(
                "it does not prove the job's secret",
                "if it is to be in this job, copy this host's secret_file to it; if not, nothing",
            )
        ours, theirs = self._job, self._job_of_peer()
        if theirs == ours or ANY_JOB in (theirs, ours):
            return int(_GREETING.unpack(self._theirs)[2])
        if not (theirs and ours):
            who = "it has" if ours else "we have"
            raise ConnectionClosed(f"{self._address} is to try again: {who} not met the other nodes of the job yet")
        raise self._refusal(
            f"it is of job {theirs}, this is job {ours} with the same secret",
            "if that job should be over, end its processes there; if both run, do nothing: each has its own nodes",
        )

    def _job_of_peer(self) -> str:
        """Read which job the peer says it is of, "" before it has said so."""
        job: bytes = _GREETING.unpack(self._theirs)[3] if self._theirs else b""
        return job.rstrip(b"\0").decode(errors="replace")

    def _refusal(self, reason: str, remedy: str = "") -> PeerRefused:
        found = f"refused {self._address} ({self._purpose} connection): {reason}"
        return PeerRefused(found, remedy=remedy, address=self._address, job=self._job_of_peer())


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
    again because not both have met their job. Blocks: up to `timeout_s` for all of it, however its bytes come.
    """
    shake = Handshake(credentials, purpose, identity, dialling=dialling, address=remote_name(sock))
    sock.settimeout(timeout_s)
    deadline = time.monotonic() + timeout_s
    try:
        sock.sendall(shake.greeting)
        start = shake.recognise(_recv_exact(sock, len(_MAGIC), deadline))
        sock.sendall(shake.answer(start + _recv_exact(sock, _GREETING.size - len(_MAGIC), deadline)))
        peer = shake.check(_recv_exact(sock, _PROOF_BYTES, deadline))
    except (OSError, EOFError) as error:
        raise ConnectionClosed(f"the handshake with {remote_name(sock)} ended early: {error!r}") from error
    sock.settimeout(None)
    return peer


def _recv_exact(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Raises: OSError, TimeoutError among them; EOFError."""
    data = b""
    while len(data) < size:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("its time is up")
        sock.settimeout(left_s)
        piece = sock.recv(size - len(data))
        if not piece:
            raise EOFError("the other end closed the connection")
        data += piece
    return data


async def shake_hands_async(
    sock: socket.socket, credentials: Credentials, purpose: str, identity: int, *, dialling: bool
) -> int:
    """Do `shake_hands` with a non-blocking socket on the running event loop, within HANDSHAKE_TIMEOUT_S."""
    shake = Handshake(credentials, purpose, identity, dialling=dialling, address=remote_name(sock))
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await loop.sock_sendall(sock, shake.greeting)
            start = shake.recognise(await recv_exact_async(sock, len(_MAGIC)))
            theirs = start + await recv_exact_async(sock, _GREETING.size - len(_MAGIC))
            await loop.sock_sendall(sock, shake.answer(theirs))
            return shake.check(await recv_exact_async(sock, _PROOF_BYTES))
    except (OSError, EOFError) as error:
        raise ConnectionClosed(f"the handshake with {remote_name(sock)} ended early: {error!r}") from error
