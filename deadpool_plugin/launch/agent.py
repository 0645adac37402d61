"""`python -m deadpool_plugin.launch.agent FD`: the node's agent, started by the supervisor of local rank 0.

FD is the listening Unix socket it serves; everything else is in the environment the supervisor passes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from typing import NoReturn

from ..agent.links import meeting_s
from ..agent.process import Agent
from ..agent.world import Job, Place, job_from
from ..config import Config, load
from ..errors import DeadpoolError
from ..host.machine import Machine, reachable
from ..host.output import say
from ..transport.handshake import Credentials
from . import checks, job_files


def serve(fd: int) -> NoReturn:
    """Be the agent until the node's end; also for a process that was forked instead of executed."""
    logging.basicConfig(level=logging.WARNING, format="[deadpool] %(message)s", stream=sys.stderr)
    exit_code = _serve(fd)
    sys.stderr.flush()
    os._exit(exit_code)  # a thread that still waits for a dead peer must not hold the node up


def _serve(fd: int) -> int:
    listener = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    try:
        place = checks.place_of()
        config = load(path := os.environ["DEADPOOL_CONFIG"])
        files, launch = job_files.secret_files(config, path), job_files.job_of(path)
        job = job_from(os.environ, os.getcwd(), config.told(), files, launch)
        credentials = Credentials(job_files.secret_of(config, path))
        exit_code = run_agent(place, config, credentials, listener, os.environ["DEADPOOL_JOB_TAG"], job)
    except DeadpoolError as error:
        say(str(error), to=sys.stderr)
        return error.exit_code
    if launch:
        with contextlib.suppress(OSError):
            job_files.exit_code_file(path, place.node).write_text(str(exit_code))
    return exit_code


def run_agent(
    place: Place, config: Config, credentials: Credentials, listener: socket.socket, job_tag: str, job: Job
) -> int:
    """Serve from the first connection to the last; the exit code. The process is to end after it."""

    async def run() -> int:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)  # the supervisors say it
        target = job.invitation.members[0] if job.invitation else (place.master_addr, place.master_port)
        where = await reachable(config, target, meeting_s(config))
        machine = Machine(place.node, where, config, credentials, listener, job_tag)
        return await Agent(machine, place, config, credentials, job).run()

    # asyncio.run would wait for threads that a file system which hangs has not let go of.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(run())


if __name__ == "__main__":
    serve(int(sys.argv[1]))
