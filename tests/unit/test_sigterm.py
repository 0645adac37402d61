"""agent/workers.py: who is told to end, who is asked first, and for how long; proc.catches."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest
from support import present
from support.hosts import local_node
from support.stand_in import fake, stand_in

from deadpool_plugin.agent import workers as workers_module
from deadpool_plugin.agent.node import Process, Slot
from deadpool_plugin.agent.workers import Workers
from deadpool_plugin.core import api, local
from deadpool_plugin.host import proc
from deadpool_plugin.transport.unix import LocalPeer

LAUNCHER_DID = "the launcher of node 3 ended its processes (SIGTERM)"
HANDLES = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: None); print(flush=True); signal.pause()"
DOES_NOT = "import signal, sys; print(flush=True); signal.pause()"


@pytest.fixture
def running():
    """Starts a program and returns a slot in which it runs a rank (or rehearses one)."""
    started = []

    def start(code: str, rehearses: bool = False) -> Slot:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        started.append(process)
        present(process.stdout).readline()
        return Slot(
            0, rank=3, process=Process(order=1, rank=3, rehearses=rehearses, pid=process.pid, peer=stand_in(LocalPeer))
        )

    yield start
    for process in started:
        process.kill()
        process.wait()
        present(process.stdout).close()


def course(monkeypatch, slots, tell, seconds):
    """Return what is said and given up when `tell(monitor)` happens, within some seconds."""
    monkeypatch.setattr(workers_module, "TERM_GRACE_S", 0.05)
    monkeypatch.setattr(workers_module, "SIGTERM_S", 0.2)

    async def play():
        told = []

        def given_up(event):
            assert isinstance(event, api.NodeGivenUp)
            told.append(("given up", event.reason))

        reports = fake(emit=lambda note: told.append(("said", note.text)))
        tell(Workers(local_node(feed=given_up, slots=slots, node=3, reports=reports), lambda slot: None))
        at_once = list(told)
        await asyncio.sleep(seconds)
        return at_once, told[len(at_once) :]

    return asyncio.run(play())


def both(one):
    one.leaving(local.Leaving(signal.SIGTERM))
    one.told_to_end("it was told")
    one.told_to_end("it was told")


def test_a_script_that_handles_it_has_its_time_and_no_more(running, monkeypatch):
    at_once, then = course(monkeypatch, [running(HANDLES)], both, 1.0)
    assert [what for what, _ in at_once] == ["said"]
    assert then == [("given up", "it was told; the script, which handles SIGTERM itself, has not ended within 0.2 s")]


@pytest.mark.parametrize(("code", "rehearses"), [(DOES_NOT, False), (HANDLES, True)])
def test_a_host_whose_script_has_no_handler_is_given_up_at_once(running, monkeypatch, code, rehearses):
    at_once, then = course(monkeypatch, [running(code, rehearses)], both, 0.5)
    assert at_once == [("given up", LAUNCHER_DID)]
    assert then == [("given up", "it was told")] * 2


def test_a_supervisor_that_was_told_alone_has_lost_its_launcher(running, monkeypatch):
    at_once, then = course(monkeypatch, [running(HANDLES)], lambda one: one.leaving(local.Leaving(signal.SIGTERM)), 0.5)
    assert (at_once, then) == ([], [("given up", LAUNCHER_DID)])


def test_whoever_has_gone_catches_nothing():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert not proc.catches(child.pid, signal.SIGTERM)
