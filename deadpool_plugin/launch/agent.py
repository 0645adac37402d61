"""`python -m deadpool_plugin.launch.agent FD`: the node's agent, started by the supervisor of local rank 0.

FD is the listening Unix socket it serves; everything else is in the environment the supervisor passes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from typing import NoReturn

from ..agent.links import meeting_s
from ..agent.process import Agent
from ..agent.world import job_from
from ..config import load
from ..errors import DeadpoolError
from ..host.machine import Machine, reachable
from ..host.output import StderrHandler, say
from ..transport.handshake import Credentials
from ..transport.linux import lock_memory
from . import checks, job_files


def serve(fd: int) -> NoReturn:
    """Be the agent until the node's end; also for a process that was forked instead of executed."""
    stderr = StderrHandler()
    logging.basicConfig(level=logging.WARNING, handlers=[stderr])
    os.set_inheritable(fd, False)
    gc.freeze()  # what was imported is no garbage: to look at all of it takes long, and would come in a swap
    # asyncio.run would wait for threads that a file system which hangs has not let go of.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        exit_code = loop.run_until_complete(run_agent(socket.socket(fileno=fd)))
    except DeadpoolError as error:
        say(str(error), to=sys.stderr)
        exit_code = error.exit_code
    stderr.close()
    sys.stderr.flush()
    os._exit(exit_code)  # a thread that still waits for a dead peer must not hold the node up


async def run_agent(listener: socket.socket) -> int:
    """Serve from the first connection to the last; the exit code. The process is to end after it."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)  # the supervisors say it
    place = checks.place_of()
    config = load(path := os.environ["DEADPOOL_CONFIG"])
    launch, beside = job_files.job_of(path), job_files.secret_beside(path)
    files = (*([str(beside)] if beside else []), config.told_secret_file)  # where others may find it
    job = job_from(os.environ, os.getcwd(), config.told(), files, launch)
    credentials = Credentials(job_files.secret_of(config, path))
    target = job.invitation.members[0] if job.invitation else (place.master_addr, place.master_port)
    where = await reachable(config, target, meeting_s(config))
    machine = Machine(place.node, where, config, credentials, listener, os.environ["DEADPOOL_JOB_TAG"])
    exit_code = await Agent(machine, place, config, credentials, job).run()
    if launch:
        with contextlib.suppress(OSError):
            job_files.exit_code_file(path, place.node).write_text(str(exit_code))
    return exit_code


if __name__ == "__main__":
    # A forked agent has its parent's pages, and would copy them all.
    lock_memory()
    serve(int(sys.argv[1]))
