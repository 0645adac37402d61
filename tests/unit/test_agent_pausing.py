"""Pausing: what runs a rank stands still with all it has started, who looks after it does not, the watch waits."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest

from deadpool_plugin.agent import proc
from deadpool_plugin.agent.pausing import Pausing
from deadpool_plugin.agent.slots import Process, Slot
from deadpool_plugin.agent.watch import POLL_S, Watch

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def family():
    """(tag, a standby process, a worker, what the worker has started)."""
    tag = f"{os.getpid()}.{time.monotonic_ns()}."
    env = {**os.environ, proc.TAG: f"{tag}0."}
    standby = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env)
    worker = subprocess.Popen([sys.executable, "-c", PARENT], env=env, stdout=subprocess.PIPE, text=True)
    child = int(worker.stdout.readline())
    yield tag, standby, worker, child
    proc.sweep(tag)
    worker.stdout.close()
    standby.wait()
    worker.wait()


def stopped(*pids: int) -> list[bool]:
    return [bool((status := proc.look(pid)) and status.stopped) for pid in pids]


def wait_until(done, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def slot_of(standby, worker, rehearses: bool = False) -> Slot:
    process = Process(order=1, rank=0, rehearses=rehearses, pid=worker.pid, peer=object())
    return Slot(0, rank=0, standby_pid=standby.pid, process=process)


def test_a_rank_and_its_children_stand_still_and_go_on(family):
    tag, standby, worker, child = family
    pausing = Pausing(tag, [slot_of(standby, worker)], Watch(10.0))
    pausing.pause()
    wait_until(lambda: stopped(worker.pid, child) == [True, True])
    assert pausing.active and stopped(standby.pid) == [False]
    pausing.resume()
    wait_until(lambda: stopped(worker.pid, child) == [False, False])
    assert not pausing.active


def test_they_end_as_they_stand(family):
    tag, standby, worker, child = family
    pausing = Pausing(tag, [slot_of(standby, worker)], Watch(10.0))
    pausing.pause()
    pausing.kill()
    assert worker.wait(timeout=10) == -9
    wait_until(lambda: (status := proc.look(child)) is None or status.ending)
    assert standby.poll() is None


def test_a_slot_that_rehearses_is_left_alone(family):
    tag, standby, worker, _ = family
    pausing = Pausing(tag, [slot_of(standby, worker, rehearses=True)], Watch(10.0))
    pausing.pause()
    assert pausing.active and stopped(worker.pid) == [False]


def test_who_takes_a_rank_over_meanwhile_stands_still_too(family):
    tag, standby, worker, child = family
    slot = slot_of(standby, worker, rehearses=True)
    pausing = Pausing(tag, [slot], Watch(10.0))
    pausing.keep()
    pausing.pause()
    slot.process.took_over = True
    assert stopped(worker.pid, child) == [False, False]
    pausing.keep()
    wait_until(lambda: stopped(worker.pid, child) == [True, True])
    pausing.resume()
    wait_until(lambda: stopped(worker.pid, child) == [False, False])


def test_the_watch_does_not_take_it_for_stuck(family):
    tag, standby, worker, _ = family

    async def watched() -> list[str]:
        told: list[str] = []
        watch = Watch(silent_after_s=2 * POLL_S)
        watch.add(worker.pid, lambda code: told.append("ended"), lambda seconds: told.append("stuck"))
        watch.start()
        pausing = Pausing(tag, [slot_of(standby, worker)], watch)
        pausing.pause()
        await asyncio.sleep(10 * POLL_S)
        assert told == []
        watch.excuse(())  # as if somebody else had stopped it
        while not told:
            await asyncio.sleep(POLL_S)
        watch.close()
        return told

    assert asyncio.run(asyncio.wait_for(watched(), 20)) == ["stuck"]
