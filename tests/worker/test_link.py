"""A worker process whose line to its agent cannot be served ends as one that is lost, not as a script that failed."""

from __future__ import annotations

import os
import signal
import socket

import pytest
from support.stand_in import fake

from deadpool_plugin.comm.generations import Generations
from deadpool_plugin.core import local
from deadpool_plugin.errors import DeadpoolError, GenerationChanged
from deadpool_plugin.transport.unix import LocalConnection
from deadpool_plugin.worker.link import AgentLink, JobEnded


def cannot_be_aborted(generation):
    raise DeadpoolError("aborting 2 NCCL communicators failed", "an end", "kill this process")


def test_a_process_that_cannot_be_unblocked_kills_itself():
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        AgentLink(LocalConnection(theirs), Generations(explain_timeout_s=0.0)).start(fake(abort=cannot_be_aborted))
        signal.pause()
    theirs.close()
    LocalConnection(ours).send(local.Abort(1))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_a_good_end_in_the_midst_of_a_swap_ends_the_wait_for_its_plan():
    """The coordinator saw all scripts end, and was counted as lost in that moment."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            ours.close()
            generations = Generations(explain_timeout_s=0.0)
            code = swapped(AgentLink(LocalConnection(theirs), generations), generations)
        finally:
            os._exit(code)
    theirs.close()
    agent = LocalConnection(ours)
    assert agent.recv()[0] == local.WorkerMoved(3)
    agent.send(local.Abort(1))
    assert agent.recv()[0] == local.Unwound(1)
    agent.send(local.End(0))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def swapped(link: AgentLink, generations: Generations) -> int:
    link.start(fake(abort=generations.announce))
    generations.check_heard(0)
    link.send(local.WorkerMoved(3))
    with pytest.raises(GenerationChanged):
        generations.check_heard(1)  # was announced to it otherwise
    with pytest.raises(GenerationChanged):
        generations.check()
    with pytest.raises(GenerationChanged):
        link.wait_for_end()
    with pytest.raises(JobEnded):
        link.wait_for_join()
    return link.wait_for_end()
