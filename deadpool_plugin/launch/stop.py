"""`deadpool stop`: ask a running job's members to end it everywhere, and wait until none is there.

Rules of this file: the job is found as `deadpool join` finds it; its secret is all the right one needs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from enum import Enum

from ..errors import TransportError
from ..transport.framing import ConnectionClosed
from ..transport.handshake import Credentials
from ..transport.join_protocol import Stop, Stopping, ask
from ..transport.rendezvous import Hello
from .join import ASK_S, FoundJob

LIMIT_S = 120.0
POLL_S = 0.2


class Presence(Enum):
    """Answer of a member that was asked to end the job."""

    THERE = "it ends the job"
    SILENT = "it does not answer"
    GONE = "no agent of this job answers there"


def stop(job: FoundJob) -> list[str]:
    """End the job as Ctrl-C in its launcher does (exit code 130 everywhere); returns once no member is there any more.

    Returns: the hosts that gave no answer at all: lost ones, or ones out of reach from here, which hear of it from the
    others if those reach them.
    Raises: TransportError if no member takes the request, or some are still there after LIMIT_S.
    """
    print(f"[deadpool] ending the job of {_listed(job.description.hellos)}", flush=True)
    return asyncio.run(_stop(job))


async def _stop(job: FoundJob) -> list[str]:
    """Each member tells all others; whoever is still there is told again, because it may not have been reached."""
    credentials = Credentials(job.secret, job.description.job)
    deadline, rest, told = time.monotonic() + LIMIT_S, job.description.hellos, False
    while True:
        states = await asyncio.gather(*(_tell(hello, credentials) for hello in rest))
        there = [hello for hello, state in zip(rest, states, strict=True) if state is Presence.THERE]
        rest = [hello for hello, state in zip(rest, states, strict=True) if state is not Presence.GONE]
        told = told or bool(there)
        if not told:
            raise TransportError("no member took the request", remedy="ask again in a moment")
        if not there:
            return [_name(hello) for hello in rest]
        if time.monotonic() > deadline:
            found = f"{_listed(there)} did not end within {LIMIT_S:g} s"
            raise TransportError(found, remedy="look at what its processes do there (`deadpool watch` says the newest)")
        await asyncio.sleep(POLL_S)


async def _tell(hello: Hello, credentials: Credentials) -> Presence:
    try:
        answer = await ask(hello.control, credentials, Stop(os.uname().nodename), ASK_S)
    except ConnectionClosed as error:
        answered = error.__cause__ is None or isinstance(error.__cause__, (ConnectionError, EOFError))
        return Presence.GONE if answered else Presence.SILENT
    except TransportError:  # its port is another's by now
        return Presence.GONE
    return Presence.THERE if isinstance(answer, Stopping) else Presence.GONE  # who arrives just now finds nobody


def _listed(hellos: Sequence[Hello]) -> str:
    return ", ".join(_name(hello) for hello in hellos)


def _name(hello: Hello) -> str:
    return f"node {hello.node} ({hello.host})"
