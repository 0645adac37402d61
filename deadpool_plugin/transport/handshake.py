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
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import PeerRefused, TransportError
from .framing import ConnectionClosed, answered, put, recv_exact, take
from .sockets import Address, closed_on_error, connected, remote_name, tune
from .tasks import Tasks

T = TypeVar("T")
_GREETING = struct.Struct("!8s32sI16s")  # magic with the protocol's version, nonce, identity, job
_MAGIC = b"deadpl-4"
_PROOF_BYTES = hashlib.sha256().digest_size
HANDSHAKE_TIMEOUT_S = 10.0
UNPROVEN_MIN, UNPROVEN_MAX, UNPROVEN_SHARE = 16, 4096, 8
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
        return Credentials(self.secret, job)


async def shake_hands(
    sock: socket.socket, credentials: Credentials, purpose: str, identity: int, *, dialling: bool
) -> int:
    """Proves secret and job to the other end of a fresh connection, which does not block. Returns: its identity.

    Raises: PeerRefused if the other end does not know the secret or is of another job; ConnectionClosed if it hangs up
    or takes too long, or is to be tried again because one of us does not know its job yet.
    """
    address, loop, our_job, their_job = remote_name(sock), asyncio.get_running_loop(), credentials.job, ""
    ours, theirs = _GREETING.pack(_MAGIC, os.urandom(32), identity, our_job.encode()), b""

    def proof(of_dialler: bool) -> bytes:
        role, greetings = b"dial" if of_dialler else b"listen", ours + theirs if dialling else theirs + ours
        return hmac.digest(credentials.secret, b"\0".join((role, purpose.encode(), greetings)), "sha256")

    def refusal(reason: str, remedy: str = "") -> PeerRefused:
        found = f"refused {address} ({purpose} connection): {reason}"
        return PeerRefused(found, remedy=remedy, address=address, job=their_job)

    async with answered(HANDSHAKE_TIMEOUT_S, f"the handshake with {address} ended early"):
        await loop.sock_sendall(sock, ours)
        theirs = await recv_exact(sock, len(_MAGIC))
        if theirs != _MAGIC:
            raise refusal("it does not speak this protocol or version")
        theirs += await recv_exact(sock, _GREETING.size - len(_MAGIC))
        peer, their_job = _GREETING.unpack(theirs)[2], theirs[-16:].rstrip(b"\0").decode(errors="replace")
        await loop.sock_sendall(sock, proof(dialling))
        their_proof = await recv_exact(sock, _PROOF_BYTES)
    if not hmac.compare_digest(their_proof, proof(not dialling)):
        raise refusal(
            "it does not prove the job's secret",
            "if it is to be in this job, copy this host's secret_file to it; if not, nothing",
        )
    if their_job == our_job or ANY_JOB in (their_job, our_job):
        return int(peer)
    if not (their_job and our_job):
        who = "it has" if our_job else "we have"
        raise ConnectionClosed(f"{address} is to try again: {who} not met the other nodes of the job yet")
    raise refusal(
        f"it is of job {their_job}, this is job {our_job} with the same secret",
        "if that job should be over, end its processes there; if both run, do nothing: each has its own nodes",
    )


async def dialled(
    address: Address, credentials: Credentials, purpose: str, identity: int, silent_after_s: float = HANDSHAKE_TIMEOUT_S
) -> tuple[socket.socket, int]:
    """Connect and shake hands. Returns: the connection, which does not block; the peer's identity.
    Raises: OSError, and as `shake_hands`."""
    sock = await connected(address)
    with closed_on_error(sock):
        tune(sock, silent_after_s)
        return sock, await shake_hands(sock, credentials, purpose, identity, dialling=True)


async def asked(
    address: Address, credentials: Credentials, purpose: str, identity: int, question: object, kinds: type[T] | Any
) -> T:
    """Put one question on a connection of its own. Raises: OSError, EOFError, TransportError."""
    sock, _ = await dialled(address, credentials, purpose, identity)
    with sock:
        await put(sock, question)
        return await take(sock, kinds)


class Listener:
    """A TCP listener, whose connections are handled once they have proved secret and job.

    Anybody who reaches the port can open connections, and leave them open. So few may be without a proof at a time:
    one more ends the oldest. An honest peer that is ended so tries again. Thread: the event loop's only.

    Args: handle: gets each proven connection, its own from then on, and the peer's identity; on_refused: gets each
        refused peer, once per host.
    """

    def __init__(
        self,
        sock: socket.socket,
        purpose: str,
        credentials: Credentials,
        identity: int,
        handle: Callable[[socket.socket, int], Coroutine[Any, Any, None]],
        on_refused: Callable[[PeerRefused], None],
        silent_after_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        sock.setblocking(False)
        self.address: Address = sock.getsockname()[:2]
        self._sock, self._purpose, self._credentials, self._identity = sock, purpose, credentials, identity
        self._handle, self._on_refused, self._silent_after_s = handle, on_refused, silent_after_s
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] % (1 << 63)  # -1: as many as it likes
        self._unproven_max = max(UNPROVEN_MIN, min(UNPROVEN_MAX, files // UNPROVEN_SHARE))
        self._unproven: dict[socket.socket, None] = {}
        self._complained: set[int | None] = set()
        self.refused: dict[str, str] = {}  # host -> what was said of it

    async def serve(self, tasks: Tasks) -> None:
        """Accepts connections for ever, each of which is one of `tasks`."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as error:  # too many open files, or the peer gave up: neither ends the listener
                if error.errno not in self._complained:
                    self._complained.add(error.errno)
                    said = "cannot accept a %s connection: %s; it is tried again and not said again"
                    _log.warning(said, self._purpose, error)
                self._end_oldest()
                await asyncio.sleep(_RETRY_S)
                continue
            tasks.start(self._welcome(sock))
            await asyncio.sleep(0)  # accepting one that waits already does not let others run

    async def _welcome(self, sock: socket.socket) -> None:
        try:
            with closed_on_error(sock), self.unproven(sock):
                sock.setblocking(False)
                tune(sock, self._silent_after_s)
                peer = await shake_hands(sock, self._credentials, self._purpose, self._identity, dialling=False)
            await self._handle(sock, peer)
        except PeerRefused as error:
            host = error.address.rpartition(":")[0]
            if host not in self.refused and len(self.refused) < REFUSED_HOSTS_MAX:
                self.refused[host] = str(error)
                self._on_refused(error)
        except (TransportError, OSError, EOFError) as error:  # it hung up, and tries again, or is of another version
            _log.info("a %s connection ended early: %s", self._purpose, error)

    @contextlib.contextmanager
    def unproven(self, sock: socket.socket) -> Iterator[None]:
        """Counts `sock` as one that has proved nothing."""
        if len(self._unproven) >= self._unproven_max:
            self._end_oldest()
        self._unproven[sock] = None
        try:
            yield
        finally:
            self._unproven.pop(sock, None)

    def _end_oldest(self) -> None:
        oldest = next(iter(self._unproven), None)
        if oldest is not None:
            del self._unproven[oldest]
            with contextlib.suppress(OSError):  # it has ended already
                oldest.shutdown(socket.SHUT_RDWR)  # its reader meets the end, and closes it

    def close(self) -> None:
        self._sock.close()
