"""A worker process whose line to its agent cannot be served ends as one that is lost, not as a script that failed."""

from __future__ import annotations

import os
import signal
import socket

from deadpool_plugin.errors import DeadpoolError
from deadpool_plugin.transport import local
from deadpool_plugin.transport.local import LocalConnection
from deadpool_plugin.worker.link import AgentLink


def cannot_be_aborted(generation):
    raise DeadpoolError("aborting 2 NCCL communicators failed", "an end", "kill this process")


def test_a_process_that_cannot_be_unblocked_kills_itself():
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        link = AgentLink(LocalConnection(theirs))
        link.on_abort = cannot_be_aborted
        link.start()
        signal.pause()
    theirs.close()
    LocalConnection(ours).send(local.Abort(1))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
