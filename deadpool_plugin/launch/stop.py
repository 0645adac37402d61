"""`deadpool stop`: ask a running job's members to end it everywhere, and wait until none is there.

Rules of this file: the job is found as `deadpool join` finds it; its secret is all the right one needs.
"""

from __future__ import annotations

import asyncio
import os
import time

from ..core.types import NodeId
from ..errors import TransportError
from ..transport.framing import ConnectionClosed
from ..transport.guests import Describe, Stop, Stopping, ask, expect
from ..transport.handshake import Credentials
from ..transport.rendezvous import Hello
from .join import ASK_S, FoundJob, Wish, find

LIMIT_S = 120.0
POLL_S = 0.2


def stop(wish: Wish) -> None:
    """End the job as Ctrl-C in its launcher does (exit code 130 everywhere); returns once no member answers any more.

    Raises: ConfigError; TransportError if no member is found, none takes the request, or some still answer after
    LIMIT_S.
    """
    job = find(wish)
    print(f"[deadpool] ending the job of {', '.join(_name(one) for one in job.description.hellos)}", flush=True)
    asyncio.run(_stop(job))


async def _stop(job: FoundJob) -> None:
    credentials = Credentials(job.secret, job.description.job)
    await _told(job.description.hellos, credentials)
    deadline = time.monotonic() + LIMIT_S
    there = {hello.node: hello for hello in job.description.hellos}
    while there := await _answering(there, credentials):
        if time.monotonic() > deadline:
            found = f"{', '.join(map(_name, there.values()))} did not end within {LIMIT_S:g} s"
            raise TransportError(found, remedy="look at what its processes do there (`deadpool watch` says the newest)")
        await asyncio.sleep(POLL_S)


async def _told(hellos: list[Hello], credentials: Credentials) -> None:
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


async def _answering(there: dict[NodeId, Hello], credentials: Credentials) -> dict[NodeId, Hello]:
    found = {}
    for node, hello in there.items():
        try:
            await ask(hello.control, credentials, Describe(), ASK_S)
            found[node] = hello
        except (ConnectionClosed, TransportError):  # gone, or its port is another's by now
            continue
    return found


def _name(hello: Hello) -> str:
    return f"node {hello.node} ({hello.host})"
