"""The supervisor of a local rank, as a real process: what it says of an agent that can say nothing any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPERVISES = """
import os, signal, socket, sys
from deadpool_plugin.launch.checks import place_of
from deadpool_plugin.launch.supervisor import Supervisor

def agent(fd):
    listener = socket.socket(fileno=fd)
    supervisor, _ = listener.accept()
    supervisor.recv(100)
    {ends}

Supervisor(place_of(), ["s.py"], "", signal.pause, lambda fd: lambda: agent(fd)).run()
"""
PLACE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1",
}  # fmt: skip


def supervised(ends):
    env = {**os.environ, **PLACE, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SUPERVISES.replace("{ends}", ends)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL (out of memory? see dmesg)"),
        ("os.kill(os.getpid(), signal.SIGBUS)", "killed by SIGBUS"),
        ("os._exit(3)", ""),
    ],
    ids=["killed", "crashed", "left"],
)
def test_an_agent_that_a_signal_ended_is_named(ends, said):
    ran = supervised(ends)
    assert ran.returncode != 0
    assert ran.stderr == (f"[deadpool] the agent of {os.uname().nodename} was {said}\n" if said else "")


SAYS = """
    import time
    from deadpool_plugin.core import local
    from deadpool_plugin.transport.unix import LocalConnection
    parent = os.getppid()
    os.kill(parent, signal.SIGSTOP)
    LocalConnection(supervisor).send(local.End({code}))
    if os.fork() == 0:
        supervisor.close()
        time.sleep(0.2)
        os.kill(parent, signal.SIGCONT)
    os._exit(0)"""


@pytest.mark.parametrize("code", [0, 86])
def test_an_agent_that_had_said_how_to_end_is_heard_however_late(code):
    """The supervisor of a busy host learns of its agent's end and of its last word at the same moment."""
    assert supervised(SAYS.format(code=code)).returncode == code
