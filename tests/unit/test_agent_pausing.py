"""Pausing: what runs a rank stands still with all it has started, who looks after it does not, the watch waits."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
from support import present
from support.hosts import host, local_node
from support.stand_in import stand_in

from deadpool_plugin.agent.node import Process, Slot
from deadpool_plugin.agent.workers import Workers
from deadpool_plugin.host import proc
from deadpool_plugin.host.proc import POLL_S, Processes
from deadpool_plugin.transport.unix import LocalPeer

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def families():
    """A job's tag, and what makes a local rank's (standby process, worker, what the worker has started)."""
    tag, made = f"{os.getpid()}.{time.monotonic_ns()}.", []

    def make(local_rank: int):
        env = {**os.environ, proc.TAG: f"{tag}{local_rank}."}
        standby = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env)
        worker = subprocess.Popen([sys.executable, "-c", PARENT], env=env, stdout=subprocess.PIPE, text=True)
        made.append((standby, worker))
        return standby, worker, int(present(worker.stdout).readline())

    yield tag, make
    proc.sweep(tag)
    for standby, worker in made:
        present(worker.stdout).close()
        standby.wait()
        worker.wait()


@pytest.fixture
def family(families):
    """(tag, a standby process, a worker, what the worker has started)."""
    tag, make = families
    return tag, *make(0)


def stopped(*pids: int) -> list[bool]:
    return [bool((status := proc.look(pid)) and status.stopped) for pid in pids]


def wait_until(done, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def slot_of(standby, worker, rehearses: bool = False, number: int = 0) -> Slot:
    process = Process(order=1, rank=number, rehearses=rehearses, pid=worker.pid, peer=stand_in(LocalPeer))
    return Slot(number, rank=number, standby_pid=standby.pid, process=process)


def monitor_of(tag: str, *slots: Slot) -> Workers:
    return Workers(local_node(host(processes=Processes(tag, 10.0)), slots=slots), lambda slot: None)


def test_a_rank_and_its_children_stand_still_and_go_on(family):
    tag, standby, worker, child = family
    monitor = monitor_of(tag, slot_of(standby, worker))
    monitor.pause()
    wait_until(lambda: stopped(worker.pid, child) == [True, True])
    assert monitor.paused and stopped(standby.pid) == [False]
    monitor.resume()
    wait_until(lambda: stopped(worker.pid, child) == [False, False])
    assert not monitor.paused


def test_all_ranks_stand_still_before_anybody_looks_for_their_children(families, monkeypatch):
    tag, make = families
    people, tagged, asked = [make(number) for number in range(3)], proc.tagged, []
    workers, children = [one[1].pid for one in people], [one[2] for one in people]

    def looked(wanted: str) -> list[int]:
        wait_until(lambda: all(stopped(*workers)))
        asked.append(wanted)
        return tagged(wanted)

    monkeypatch.setattr(proc, "tagged", looked)
    slots = [slot_of(standby, worker, number=number) for number, (standby, worker, _) in enumerate(people)]
    monitor_of(tag, *slots).pause()
    wait_until(lambda: all(stopped(*workers, *children)))
    assert {*asked} == {tag} and not any(stopped(*(one[0].pid for one in people)))


def test_beside_ranks_that_stand_still_one_that_rehearses_goes_on(families):
    tag, make = families
    (standby, worker, child), (other_standby, other, its_child) = make(0), make(1)
    slots = [slot_of(standby, worker), slot_of(other_standby, other, rehearses=True, number=1)]
    monitor = monitor_of(tag, *slots)
    monitor.pause()
    wait_until(lambda: stopped(worker.pid, child) == [True, True])
    assert stopped(standby.pid, other_standby.pid, other.pid, its_child) == [False] * 4


def test_they_end_as_they_stand(family):
    tag, standby, worker, child = family
    monitor = monitor_of(tag, slot_of(standby, worker))
    monitor.pause()
    monitor.end(1)
    assert worker.wait(timeout=10) == -9
    wait_until(lambda: (status := proc.look(child)) is None or status.ending)
    assert standby.poll() is None


def test_a_slot_that_rehearses_is_left_alone(family):
    tag, standby, worker, _ = family
    monitor = monitor_of(tag, slot_of(standby, worker, rehearses=True))
    monitor.pause()
    assert monitor.paused and stopped(worker.pid) == [False]


def test_who_takes_a_rank_over_meanwhile_stands_still_too(family):
    tag, standby, worker, child = family
    slot = slot_of(standby, worker, rehearses=True)
    monitor = monitor_of(tag, slot)
    monitor.pause()
    present(slot.process).took_over = True
    assert stopped(worker.pid, child) == [False, False]
    monitor.pause()
    wait_until(lambda: stopped(worker.pid, child) == [True, True])
    monitor.resume()
    wait_until(lambda: stopped(worker.pid, child) == [False, False])


def test_the_watch_does_not_take_it_for_stuck(family):
    tag, standby, worker, _ = family

    async def watched() -> list[str]:
        told: list[str] = []
        watch = Processes(tag, silent_after_s=2 * POLL_S)
        watch.watch(worker.pid, lambda code: told.append("ended"), lambda seconds: told.append("stuck"))
        watch.start()
        watch.pause({0: worker.pid}, {0: standby.pid})
        await asyncio.sleep(10 * POLL_S)
        assert told == []
        watch.resume()
        worker.send_signal(signal.SIGSTOP)  # as somebody else does it
        while not told:
            await asyncio.sleep(POLL_S)
        watch.close()
        return told

    assert asyncio.run(asyncio.wait_for(watched(), 20)) == ["stuck"]
