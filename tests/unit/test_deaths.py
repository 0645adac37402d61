"""The agent's conclusions from the deaths of its node's processes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from support import present
from support.hosts import local_node
from support.stand_in import stand_in

from deadpool_plugin.agent.node import Process, Slot
from deadpool_plugin.agent.workers import Workers
from deadpool_plugin.core import api, local
from deadpool_plugin.host import proc
from deadpool_plugin.host.proc import Processes
from deadpool_plugin.transport.unix import LocalPeer


@pytest.fixture
def heard():
    """(workers, slot, what was heard in its order): rank 3 runs in the only slot."""
    order: list[api.Input | Slot] = []
    slot = Slot(0, rank=3, standby_pid=os.getpid())
    workers = Workers(local_node(feed=order.append, slots=[slot], node=1), order.append)
    slot.process = Process(order=1, rank=3, rehearses=False, in_training=True)
    return workers, slot, order


@pytest.mark.parametrize(("exit_code", "said"), [(-9, api.WorkerLost), (3, api.WorkerFailed), (0, api.WorkerFailed)])
def test_a_replacement_is_begun_before_the_controller_decides(heard, exit_code, said):
    """A node that is alone decides in the same step: what it orders must be the last word."""
    workers, slot, order = heard
    workers.ended(slot, slot.process, exit_code)
    workers.ended(slot, slot.process, exit_code)
    assert order[0] is slot and [type(one) for one in order[1:]] == [said]


@pytest.mark.parametrize(("pid", "killed"), [(0, []), (4242, [4242])])
def test_a_process_that_has_not_said_hello_yet_is_ended_by_the_next_order(heard, monkeypatch, pid, killed):
    workers, slot, order = heard
    ended: list[int] = []
    monkeypatch.setattr(workers._processes, "kill", ended.append)
    process = Process(order=2, rank=3, rehearses=False)
    slot.process, process.pid = process, pid or process.pid
    workers.kill(slot, process, "of no use any more")
    assert ended == killed and api.WorkerLost(3, "of no use any more") in order


def test_the_last_words_of_a_process_are_heard_before_it_is_said_why_it_ended(heard):
    """Its end may be known from /proc while what it said is unread."""
    workers, slot, order = heard

    class Unread:
        def read_rest(self):
            slot.process.failing = "ValueError: no such token"

    slot.process.peer = Unread()
    workers.ended(slot, slot.process, 1)
    assert order == [slot, api.WorkerFailed(3, 1, "ValueError: no such token")]


def test_all_its_stores_die_with_a_process(heard):
    """An inherited plan may name one that was offered before the newest."""
    workers, slot, order = heard
    workers.store_offer(slot, slot.process, local.StoreOffer("host:1"))
    workers.store_offer(slot, slot.process, local.StoreOffer("host:2"))
    workers.ended(slot, slot.process, -9)
    lost = [api.StoreLost("host:1"), api.StoreLost("host:2")]
    assert order[:4] == [api.StoreOffered("host:1"), api.StoreOffered("host:2"), *lost]
    workers._mark_ended(slot.process)
    assert [one for one in order if isinstance(one, api.StoreLost)] == lost


def test_a_process_that_only_rehearses_its_rank_says_so_with_its_store(heard):
    workers, slot, order = heard
    slot.process = Process(order=2, rank=3, rehearses=True)
    workers.store_offer(slot, slot.process, local.StoreOffer("host:3"))
    slot.process.took_over = True
    workers.store_offer(slot, slot.process, local.StoreOffer("host:4"))
    assert order == [api.StoreOffered("host:3", 0, stand_in=True), api.StoreOffered("host:4", 0)]


LAUNCHED = "ended where it was launched (Ctrl-C, a closed terminal or a signal; node 1 was told)"


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGINT, api.StopRequested(LAUNCHED, 130)),
        (signal.SIGHUP, api.NodeGivenUp("node 1 found the launcher gone (on_launcher_loss: stop)")),
        (signal.SIGTERM, api.NodeGivenUp("the launcher of node 1 ended its processes (SIGTERM)")),
    ],
)
def test_what_a_supervisor_was_told_to_end_by(heard, number, said):
    workers, slot, order = heard
    workers.leaving(local.Leaving(number))
    assert order == [said]


def test_a_standby_process_that_is_stopped_is_the_nodes_end(heard):
    """Whatever is ordered then comes to nothing, and nobody would say so."""
    workers, slot, order = heard
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    slot.standby_pid = child.pid
    child.send_signal(signal.SIGSTOP)

    async def until_said():
        workers._processes = watch = Processes("tag.", silent_after_s=0.0)
        watch.start()
        workers.supervisor(stand_in(LocalPeer), local.SupervisorHello(0, child.pid), [0])
        while not order:
            await asyncio.sleep(0.01)
        watch.close()

    try:
        asyncio.run(asyncio.wait_for(until_said(), 30))
    finally:
        child.kill()
        child.wait()
    assert f"standby process {child.pid} of local rank 0 had been stopped (state T)" in order[0].reason


def test_a_process_that_is_stopped_after_the_training_does_not_hold_its_host_for_ever(heard):
    workers, slot, order = heard
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    slot.process.pid = child.pid
    child.send_signal(signal.SIGSTOP)
    workers.end(0)
    try:
        workers._stopped(slot, slot.process, 10.0)
        assert child.wait(30) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()
    workers.ended(slot, slot.process, -9)
    assert workers.late_exit_code == 137 and order == [], "the script may have had work to do"


def test_the_end_of_what_rehearsed_another_rank_is_no_loss_of_the_slots_new_one(heard):
    workers, slot, order = heard
    slot.process = Process(order=2, rank=5, rehearses=True)
    workers.ended(slot, slot.process, -9)
    assert order == []
    slot.rank, slot.process = -1, None
    process = slot.stand_ins[5] = Process(order=3, rank=5, rehearses=True)
    workers.ended(slot, process, -9)
    assert order == [api.SpareFailed(0, 5, order[0].reason)]


def test_with_too_many_open_files_processes_are_still_seen():
    """A process of its own, because its descriptors are used up."""
    code = """
import os, resource
from deadpool_plugin.host import proc
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
proc.reserve.keep()
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for _ in range(5):
    assert proc.look(os.getpid()).state == "R"
    assert os.getppid() in [pid for pid, _ in proc.environments()]
    assert proc.children(os.getppid())
print("seen")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "seen\n", done.stderr


def test_a_look_that_fails_for_another_reason_is_not_repeated():
    reserve, looks = proc.SpareDescriptor(), []

    def look():
        looks.append(1)
        raise FileNotFoundError(errno.ENOENT, "it has gone")

    reserve.keep()
    with pytest.raises(FileNotFoundError):
        reserve.call(look)
    assert looks == [1]
    os.close(reserve._fd)


def test_a_watch_without_descriptors_looks_again_and_says_so_once(monkeypatch, caplog):
    looks = iter([OSError(errno.EMFILE, "too many open files")] * 5 + [proc.ProcessStatus("Z", True, -9)])

    def look(pid):
        found = next(looks)
        if isinstance(found, OSError):
            raise found
        return found

    async def scenario():
        monkeypatch.setattr(proc.StatFile, "is_running", lambda self: False)
        monkeypatch.setattr(proc, "look", look)
        watching, seen = Processes("tag.", 1.0), asyncio.get_running_loop().create_future()
        watching.watch(1, seen.set_result, lambda seconds: None)
        watching.start()
        try:
            return await asyncio.wait_for(seen, 30)
        finally:
            watching.close()

    assert asyncio.run(scenario()) == -9
    assert ["too many open files" in record.getMessage() for record in caplog.records] == [True]


def test_a_look_that_fails_otherwise_is_the_last_one(monkeypatch):
    """The agent ends by it, and would say so again with each look."""

    def look(pid):
        raise OSError(errno.EIO, "a broken /proc")

    async def scenario():
        monkeypatch.setattr(proc.StatFile, "is_running", lambda self: False)
        monkeypatch.setattr(proc, "look", look)
        watching, loop = Processes("tag.", 1.0), asyncio.get_running_loop()
        failed = []
        loop.set_exception_handler(lambda loop, context: failed.append(context["exception"]))
        watching.start()
        look_to_come = watching._timer
        watching.watch(1, lambda code: None, lambda seconds: None)
        while not failed:
            await asyncio.sleep(0.01)
        assert watching._timer is look_to_come and len(failed) == 1
        watching.close()

    asyncio.run(scenario())


TWO_THREADS = """
import ctypes, sys, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("begun", flush=True)
sys.stdin.readline()
ctypes.CDLL(None).syscall(60, 0)  # exit(2) ends this thread only
"""


def test_a_process_has_left_when_its_last_thread_has():
    """One that still waits in a driver may hold a device, though the process looks like a zombie."""
    processes = Processes("tag.", 10.0)
    process = subprocess.Popen([sys.executable, "-c", TWO_THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"begun\n" and not processes.has_left(process.pid)
    process.stdin.write(b"\n")
    process.stdin.flush()
    while present(proc.look(process.pid)).state != "Z":
        time.sleep(0.01)
    assert not processes.has_left(process.pid)
    process.kill()
    while not processes.has_left(process.pid):
        time.sleep(0.01)
    process.communicate()
    assert processes.has_left(process.pid), "nobody is there"
