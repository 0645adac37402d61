"""`python -m deadpool_plugin.launch.agent FD`: the node's agent, started by the supervisor of local rank 0.

FD is the listening Unix socket it serves; everything else is in the environment the supervisor passes on.
"""

from __future__ import annotations

import logging
import os
import socket
import sys

from ..config import load
from ..errors import DeadpoolError
from ..plugin import run_agent
from . import roles
from .secret import ensure


def main() -> int:
    """Entry point; the exit code."""
    logging.basicConfig(level=logging.WARNING, format="[deadpool] %(message)s", stream=sys.stderr)
    listener = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(listener.fileno(), False)
    try:
        launch = roles.from_environment()
        config = load(os.environ["DEADPOOL_CONFIG"])
        return run_agent(launch.place, config, ensure(config), listener, os.environ["DEADPOOL_JOB"])
    except DeadpoolError as error:
        print(f"[deadpool] {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # a thread that still waits for a dead peer must not hold the node up
