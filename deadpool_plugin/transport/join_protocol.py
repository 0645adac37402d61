"""The questions of a host that is no member yet (a guest) on a control connection, and the members' answers.

Rules of this file: a guest, whose identity in the handshake is `GUEST`, asks and is answered, one frame each; nothing
of it reaches the controller but the wish that the job ends. Only an `Announce` answered by `Admitted` makes a link of
its connection (mesh.py), from the next byte on, and it never replaces one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..core.types import Generation, NodeId
from ..errors import TransportError
from .framing import answered
from .handshake import HANDSHAKE_TIMEOUT_S, Credentials, asked
from .rendezvous import Hello
from .sockets import Address, Port

PURPOSE = "control"
GUEST: NodeId = 0xFFFFFFFF
"""The identity of a guest."""


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
    """Answer: `node` was never used in this job, and the answering node promises it to nobody else."""

    node: NodeId


class Admitted(Guest, frozen=True):
    """The link is made. `hellos`: as in JobDescription."""

    hellos: list[Hello]


class Stopping(Guest, frozen=True):
    """The job is being ended."""


class Busy(Guest, frozen=True):
    """Answer: ask again in a moment. `arrives`: the answering node is about to join itself, or to meet the others."""

    reason: str
    arrives: bool = False


class NotAdmitted(Guest, frozen=True, tag="Refused"):
    """Answer: not with this node id; `for_good`: with no other either."""

    reason: str
    for_good: bool = False


Question = Describe | Reserve | Announce | Stop
Answer = JobDescription | Reserved | Admitted | Stopping | Busy | NotAdmitted


async def ask(
    address: Address,
    credentials: Credentials,
    question: Describe | Reserve | Stop,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> Answer:
    """Put one question to the member at `address`, on a connection of its own.
    Raises: ConnectionClosed if nobody answers there in time; PeerRefused if it does not share secret and job."""
    async with answered(timeout_s, f"nobody answers at {address[0]}:{address[1]}"):
        return await asked(address, credentials, PURPOSE, GUEST, question, Answer)


def expect(answer: Answer, kind: type[Any], where: str) -> Any:
    """Return `answer`, which must be a `kind`. Raises: TransportError with the reason why not."""
    if not isinstance(answer, kind):
        reason = answer.reason if isinstance(answer, Busy | NotAdmitted) else f"it answers {type(answer).__name__}"
        raise TransportError(f"the member at {where} does not help: {reason}", remedy="try again, or another member")
    return answer
