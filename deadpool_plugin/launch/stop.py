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
from ..transport.guests import Busy, Describe, Stop, Stopping, ask, expect
from ..transport.handshake import Credentials
from ..transport.rendezvous import Hello
from .join import ASK_S, FoundJob, Wish, find

LIMIT_S = 120.0
POLL_S = 0.2


class Presence(Enum):
    """What a member's control port says."""

    THERE = "answers"
    SILENT = "does not answer"
    GONE = "nobody, or somebody else, is there"


def stop(wish: Wish) -> list[str]:
    """End the job as Ctrl-C in its launcher does (exit code 130 everywhere); returns once no member is there any more.

    Returns: the hosts that gave no answer at all: lost ones, or ones out of reach from here, which hear of it from the
    others if those reach them.
    Raises: ConfigError; TransportError if no member is found, none takes the request, or some are still there after
    LIMIT_S.
    """
    job = find(wish)
    print(f"[deadpool] ending the job of {_listed(job.description.hellos)}", flush=True)
    return asyncio.run(_stop(job))


async def _stop(job: FoundJob) -> list[str]:
    credentials = Credentials(job.secret, job.description.job)
    await _told(job.description.hellos, credentials)
    deadline, rest = time.monotonic() + LIMIT_S, job.description.hellos
    while True:
        states = await asyncio.gather(*(_look(hello, credentials) for hello in rest))
        there = [hello for hello, state in zip(rest, states, strict=True) if state is Presence.THERE]
        rest = [hello for hello, state in zip(rest, states, strict=True) if state is not Presence.GONE]
        if not there:
            return [_name(hello) for hello in rest]
        if time.monotonic() > deadline:
            found = f"{_listed(there)} did not end within {LIMIT_S:g} s"
            raise TransportError(found, remedy="look at what its processes do there (`deadpool watch` says the newest)")
        await asyncio.sleep(POLL_S)


async def _told(hellos: Sequence[Hello], credentials: Credentials) -> None:
    """The first member that takes the request tells all others. Raises: TransportError."""
    reasons = []
    for hello in hellos:
        try:
            answer = await ask(hello.control, credentials, Stop(os.uname().nodename), ASK_S)
            expect(answer, Stopping, _name(hello))
            return
        except TransportError as error:
            reasons.append(str(error))
    raise TransportError(f"no member took the request: {'; '.join(reasons)}", remedy="ask again in a moment")


async def _look(hello: Hello, credentials: Credentials) -> Presence:
    try:
        answer = await ask(hello.control, credentials, Describe(), ASK_S)
    except ConnectionClosed as error:
        return Presence.SILENT if isinstance(error.__cause__, asyncio.TimeoutError) else Presence.GONE
    except TransportError:  # its port is another's by now
        return Presence.GONE
    arrives = isinstance(answer, Busy) and answer.arrives  # at a job that has ended: it will find nobody
    return Presence.GONE if arrives else Presence.THERE


def _listed(hellos: Sequence[Hello]) -> str:
    return ", ".join(_name(hello) for hello in hellos)


def _name(hello: Hello) -> str:
    return f"node {hello.node} ({hello.host})"
