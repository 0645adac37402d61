"""The standby process of a slot, as a real process: who goes first when memory is short, and what it cannot end."""

from __future__ import annotations

import functools
import os
import select
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest

from deadpool_plugin.config import Config
from deadpool_plugin.core import local
from deadpool_plugin.host.proc import look, spawn
from deadpool_plugin.launch import worker as program
from deadpool_plugin.launch.standby import Standby
from deadpool_plugin.launch.worker import become
from deadpool_plugin.transport.linux import PR_SET_CHILD_SUBREAPER, prctl
from deadpool_plugin.transport.unix import LocalConnection, listen_unix

LIMIT_S = 60.0


@pytest.fixture
def started(tmp_path):
    """`started(run, prepare)`: the agent's end of a standby process whose forked processes do `run`, its pid, and where
    they connect to."""
    pids, name = [], f"deadpool/test/{os.getpid()}/{tmp_path}"

    def start(run, prepare=lambda: None, ending_s=LIMIT_S):
        listener = listen_unix(name)

        def main():
            os.environ["DEADPOOL_SOCKET"] = name
            prepare()
            Standby(LocalConnection.to(name), 0, run, (), ending_s=ending_s).serve()

        pids.append(spawn(main, dict(os.environ), signal.SIGKILL))
        agent = LocalConnection(listener.accept()[0])
        assert heard(agent) == local.StandbyHello(0)
        return agent, pids[-1], listener

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def heard(agent):
    assert select.select([agent], [], [], LIMIT_S)[0], "nothing in time"
    return agent.recv()[0]


def order(number):
    return local.RunRank(rank=0, env={}, order=number)


def test_when_memory_is_short_a_worker_goes_and_not_its_agent(started, tmp_path):
    found = tmp_path / "pipe"
    os.mkfifo(found)

    def says_its_score(order):
        found.write_text(Path("/proc/self/oom_score_adj").read_text())

    agent, *_ = started(says_its_score)
    agent.send(order(1))
    assert int(found.read_text()) == 1000 >= int(Path("/proc/self/oom_score_adj").read_text())


def test_a_process_that_cannot_be_ended_is_named_and_the_standby_process_ends(started):
    """As one that a driver holds; here, nobody is killed."""

    def nobody_is_killed():
        pytest.MonkeyPatch().setattr(os, "kill", lambda pid, number: None)

    agent, pid, _ = started(lambda order: threading.Event().wait(), nobody_is_killed, ending_s=0.05)
    agent.send(order(1))
    agent.send(order(2))
    told = heard(agent)
    assert isinstance(told, local.CannotEnd) and "was killed and does not end (state " in told.reason
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_an_order_replaces_the_process_of_the_one_before(started, tmp_path):
    found = tmp_path / "pipe"
    os.mkfifo(found)

    def says_who_it_is(order):
        found.write_text(str(os.getpid()))
        threading.Event().wait()

    agent, *_ = started(says_who_it_is)
    agent.send(order(1))
    first = int(found.read_text())
    agent.send(order(2))
    second = int(found.read_text())
    assert first != second and not os.path.exists(f"/proc/{first}")


def waits(folder):
    """Return what forked processes do: write who they are, and whom they have started, and wait."""

    def run(order):
        if order.stands_in:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        daemon = subprocess.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE, check=True)
        (folder / f"{order.order}.new").write_text(f"{os.getpid()} {int(daemon.stdout)}")
        os.rename(folder / f"{order.order}.new", folder / str(order.order))
        threading.Event().wait()

    return run


def lives(pid):
    return (status := look(pid)) is not None and not status.ending


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def test_stand_ins_live_beside_the_process_that_runs_the_rank(started, tmp_path):
    agent, pid, _ = started(waits(tmp_path))
    begun = {}

    def fork(number, stands_in):
        agent.send(local.RunRank(0, {}, number, stands_in, stands_in))
        until(lambda: (tmp_path / str(number)).exists())
        begun[number] = [int(word) for word in (tmp_path / str(number)).read_text().split()]

    def gone(*numbers):
        until(lambda: not any(lives(pid) for number in numbers for pid in begun[number]))
        for number in begun.keys() - {*numbers}:
            assert all(map(lives, begun[number])), f"{number} lives on, with its daemon"

    fork(1, False)
    fork(2, True)
    fork(3, True)
    gone()
    agent.send(local.EndProcess(2))
    gone(2)
    agent.send(local.RunsRank(3))
    gone(1, 2)  # it has taken the place of the first one
    fork(4, True)
    os.kill(begun[3][0], signal.SIGKILL)
    assert heard(agent) == local.WorkerExited(3, -signal.SIGKILL)
    gone(1, 2, 3)
    os.kill(begun[4][0], signal.SIGKILL)
    assert heard(agent) == local.WorkerExited(4, -signal.SIGKILL)
    gone(1, 2, 3, 4)
    fork(5, True)
    fork(6, False)
    agent.send(local.End(0))
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    gone(1, 2, 3, 4, 5, 6)


def test_what_stands_in_is_forked_when_all_is_imported(started, tmp_path, monkeypatch):
    """What is imported before the fork is shared. What is to run the rank does not wait for it."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "slow_to_import.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    )
    (folder / "imported_last.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))

    def run(order):
        (tmp_path / f"{order.order}.new").write_text(str("imported_last" in sys.modules))
        os.rename(tmp_path / f"{order.order}.new", tmp_path / str(order.order))
        threading.Event().wait()

    agent, *_ = started(run)
    agent.send(local.Imports(b"cut off"))  # which costs nothing but time
    agent.send(local.Imports(zlib.compress(b"slow_to_import\nimported_last")))
    for number in (1, 2, 3):
        agent.send(local.RunRank(0, {}, number, True, True))
    agent.send(local.EndProcess(2))
    time.sleep(0.5)
    assert not (tmp_path / "1").exists(), "it would import for itself"
    (tmp_path / "go").touch()
    until((tmp_path / "3").exists)
    assert {(tmp_path / number).read_text() for number in "13"} == {"True"} and not (tmp_path / "2").exists()


def test_a_fork_writes_little_of_the_memory_that_the_processes_share(started, tmp_path):
    """A page that the standby process writes is one that each process forked before has alone from then on."""

    def private_mib(pid):
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(row.split()[1]) for row in rows if row.startswith("Private_Dirty")) / 1024

    agent, pid, _ = started(waits(tmp_path))
    alone = []
    for number in range(1, 5):
        agent.send(local.RunRank(0, {}, number, True, True))
        until((tmp_path / str(number)).exists)
        alone.append(private_mib((tmp_path / "1").read_text().split()[0]))
    agent.send(local.End(0))  # it ends the daemons, too
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert alone[-1] - alone[0] < 1.0, alone


@pytest.mark.parametrize("order", [local.RunRank(3, {}, 1), local.RunRank(3, {}, 1, True)], ids=["runs", "rehearses"])
def test_the_agent_hears_why_a_process_ends_before_its_script_begins(started, order):
    """Its output goes to files, and their disk may be full."""

    def breaks():
        def start(*_):
            raise OSError(28, "No space left on device\nand more")

        program.start_live = program.start_following = start

    agent, _, listener = started(functools.partial(become, Config(), 0, ["script.py"]), breaks)
    agent.send(order)
    worker = LocalConnection(listener.accept()[0])
    assert isinstance(heard(worker), local.WorkerHello)
    stacks, (file,) = worker.recv()
    assert isinstance(stacks, local.StackFile)
    os.close(file)
    if order.rehearses:
        output, (pipe,) = worker.recv()
        assert isinstance(output, local.RehearsalOutput)
        worker.send(local.Recording(3, b""))
    why = "OSError: [Errno 28] No space left on device and more"
    why += " (an error of a file system (No space left on device))"
    assert worker.recv()[0] == local.Failing(3, why, of_host=True)
    assert heard(agent) == local.WorkerExited(1, 1)
    if order.rehearses:
        assert b"Traceback" in os.read(pipe, 1 << 16)
        os.close(pipe)
