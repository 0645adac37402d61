"""The beginning of a control connection: a link between members, or the questions of a host that is none yet (a guest).

Rules of this file: a connection begins with the handshake. A member that has dialled is then told whether it is to be
a link. A guest, whose identity is `GUEST`, asks and is answered, one frame each; nothing of it reaches the controller
but the wish that the job ends. Only an `Announce` answered by `Admitted` makes a link of its connection, from the next
byte on, and it never replaces one. Whatever raises has closed the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from ..core.types import Generation, NodeId
from ..errors import PeerRefused, TransportError
from .framing import ConnectionClosed, put, take
from .handshake import HANDSHAKE_TIMEOUT_S, Credentials, dialled
from .rendezvous import Hello
from .sockets import Address, Port, closed_on_error, remote_name

PURPOSE = "control"
GUEST: NodeId = 0xFFFFFFFF
"""The identity of a guest."""


class NotWanted(PeerRefused):
    """A node of this job counts us as lost, or does not know us."""


class Guest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of questions and answers."""


class Describe(Guest, frozen=True):
    """Question: which job is this?"""


class Reserve(Guest, frozen=True):
    """Question: which node id may I have?"""


class Announce(Guest, frozen=True):
    """Question: may I join as `hello.node`, and this connection be a control link?"""

    hello: Hello


class Stop(Guest, frozen=True):
    """Request to end the job on all hosts. `host`: where a person asked for it."""

    host: str


class JobDescription(Guest, frozen=True):
    """Answer: all that a host must know to run the job's command as the other hosts do.

    `command` is what supervisor 0 of the answering node was given, the launcher's own words included. `config` is the
    text of its configuration, `environment` what the deepspeed launcher exports to all hosts. `hellos` has every node
    known to be there, hosts about to join included; `members` those of `generation`. `job` is its id.
    """

    node: NodeId
    command: list[str]
    directory: str
    config: str
    environment: dict[str, str]
    master_addr: str
    master_port: Port
    generation: Generation
    members: tuple[NodeId, ...]
    hellos: list[Hello]
    job: str


class Reserved(Guest, frozen=True):
    """Answer: `node` was never used in this job, and is promised to nobody else by the answering node."""

    node: NodeId


class Admitted(Guest, frozen=True):
    """The link is made. `hellos`: as in JobDescription."""

    hellos: list[Hello]


class Stopping(Guest, frozen=True):
    """The job is being ended."""


class Busy(Guest, frozen=True):
    """Answer: ask again in a moment. `arrives`: who answers is about to join itself, or to meet the others."""

    reason: str
    arrives: bool = False


class NotAdmitted(Guest, frozen=True, tag="Refused"):
    """Answer: not with this node id; `for_good`: with no other either."""

    reason: str
    for_good: bool = False


Question = Describe | Reserve | Announce | Stop
Answer = JobDescription | Reserved | Admitted | Stopping | Busy | NotAdmitted
OnGuest = Callable[[Question], Answer]


async def dial(
    peer: NodeId, address: Address, node: NodeId, credentials: Credentials, silent_after_s: float
) -> socket.socket:
    """Connect to `peer`, which knows that `node` dials, and wants the link.

    Raises: NotWanted, PeerRefused, ConnectionClosed, OSError.
    """
    sock, found = await dialled(address, credentials, PURPOSE, node, silent_after_s)
    with closed_on_error(sock):
        where = remote_name(sock)
        if found != peer:
            raise PeerRefused(f"{where} says it is node {found}", f"node {peer}", address=where)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                is_wanted: bool = await take(sock, bool)
        except (TimeoutError, EOFError) as error:
            raise ConnectionClosed(f"node {peer} did not let us in: {error!r}") from error
        if not is_wanted:
            raise NotWanted(f"node {peer} at {where} wants no link with node {node}", address=where)
    return sock


async def welcome(sock: socket.socket, peer: NodeId) -> None:
    """Tells `peer`, which has dialled, that there is to be a link. Raises: ConnectionClosed, OSError."""
    with closed_on_error(sock):
        with contextlib.suppress(BlockingIOError):  # it waits for our word
            if not sock.recv(1, socket.MSG_PEEK):
                raise ConnectionClosed(f"node {peer} gave the handshake up")
        await put(sock, True)


async def turn_away(sock: socket.socket) -> None:
    """Tells the dialler that there is to be no link. Raises: OSError."""
    with sock:
        await put(sock, False)


async def ask(
    address: Address,
    credentials: Credentials,
    question: Describe | Reserve | Stop,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> Answer:
    """Put one question to the member at `address`, on a connection of its own.

    Raises: ConnectionClosed if nobody answers there in time; PeerRefused if it does not share secret and job.
    """
    try:
        async with asyncio.timeout(timeout_s):
            sock, _ = await dialled(address, credentials, PURPOSE, GUEST)
            with sock:
                await put(sock, question)
                return await take(sock, Answer)
    except (OSError, EOFError) as error:
        raise ConnectionClosed(f"nobody answers at {address[0]}:{address[1]} ({str(error) or 'time-out'})") from error


async def serve(
    sock: socket.socket, answer: OnGuest, may_link: Callable[[NodeId], bool]
) -> tuple[Hello, Admitted] | None:
    """Answer a guest until it leaves, which closes the connection (None), or is to be admitted.

    Returns: the hello of a guest that is to be admitted, and the answer still to be sent.

    Args: may_link: whether there is neither a link to a node nor a reason to have none.
    """
    with closed_on_error(sock):
        while True:
            try:
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    question: Question = await take(sock, Question)
            except (OSError, EOFError):
                sock.close()
                return None
            if isinstance(question, Announce) and not may_link(question.hello.node):
                await put(sock, NotAdmitted(f"node {question.hello.node} is or was a node of this job"))
                continue
            reply = answer(question)
            if isinstance(question, Announce) and isinstance(reply, Admitted):
                return question.hello, reply
            await put(sock, reply)


def nobody_joins(_: Question) -> Answer:
    """Answer guests where no host may join."""
    return NotAdmitted("no host can join here")


def expect(answer: Answer, kind: type[Any], where: str) -> Any:
    """Return `answer`, which must be a `kind`. Raises: TransportError with the reason why not."""
    if not isinstance(answer, kind):
        reason = answer.reason if isinstance(answer, Busy | NotAdmitted) else f"it answers {type(answer).__name__}"
        raise TransportError(f"the member at {where} does not help: {reason}", remedy="try again, or another member")
    return answer
