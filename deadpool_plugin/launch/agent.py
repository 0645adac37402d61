"""`python -m deadpool_plugin.launch.agent FD`: the node's agent, started by the supervisor of local rank 0.

FD is the listening Unix socket it serves; everything else is in the environment the supervisor passes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from typing import NoReturn

from ..agent.world import job_from
from ..config import load
from ..errors import DeadpoolError
from ..host.output import say
from ..plugin import run_agent
from . import job_files, roles


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
        launch = roles.from_environment()
        config = load(path := os.environ["DEADPOOL_CONFIG"])
        files = job_files.secret_files(config, path)
        job = job_from(os.environ, os.getcwd(), config.told(), files, job_files.launch_of(path))
        secret, tag = job_files.secret_of(config, path), os.environ["DEADPOOL_JOB_TAG"]
        exit_code = run_agent(launch.place, config, secret, listener, tag, job)
    except DeadpoolError as error:
        say(str(error), to=sys.stderr)
        return error.exit_code
    if job_files.is_put_in_place(path):
        with contextlib.suppress(OSError):
            job_files.exit_code_file(path, launch.place.node).write_text(str(exit_code))
    return exit_code


if __name__ == "__main__":
    serve(int(sys.argv[1]))
