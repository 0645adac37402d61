"""The steward of one host, as a real process: what it puts in place, whom it ends and when, what it tells."""

from __future__ import annotations

import asyncio
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import cast

import msgspec
import pytest
from support import present
from support.stand_in import fake

from deadpool_plugin import events
from deadpool_plugin.agent.links import versions
from deadpool_plugin.config import Config
from deadpool_plugin.errors import ConfigError
from deadpool_plugin.host import files, proc
from deadpool_plugin.launch import agent, job_files, steward
from deadpool_plugin.launch.steward import job_processes

SECRET = b"a secret that is long enough"
LIMIT_S = 30.0
ASKED_BY = {signal.SIGHUP, signal.SIGINT}
SAYS_ITS_SIGNAL = "import signal; print('up', flush=True); print(signal.sigwait({1, 2}).name)"
HEARS_NOTHING = "import signal; print('up', flush=True); signal.pause()"
IS_THE_LAUNCHER = "deepspeed.launcher.launch"


class Host:
    """A steward, and the processes of its job."""

    def __init__(self, directory, patience_s=20.0, **changes):
        settings = f"output_dir: {directory / 'logs'}\npatience_s: {patience_s}\n"
        word = steward.Prepare(job_files.new_job(), 1, settings, SECRET, ["s.py"], versions())
        self.word = msgspec.structs.replace(word, **{**changes, "config": settings + changes.get("config", "")})
        self.folder, self.log = job_files.folder_of(self.word.job), directory / "logs" / "events.1.jsonl"
        (directory / "s.py").touch()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deadpool_plugin.launch.steward"], cwd=directory, env=environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.stdin, self.stdout = present(self.process.stdin), present(self.process.stdout)
        self.jobs: list[subprocess.Popen[str]] = []
        self.say(self.word)
        self.ready = self.hear()

    def say(self, word):
        self.stdin.write(steward.encode(word))
        self.stdin.flush()

    def hear(self):
        assert select.select([self.stdout], [], [], LIMIT_S)[0], "the steward says nothing"
        self.stdout.readline()
        word = steward.decode(self.stdout.readline())
        return self.hear() if isinstance(word, steward.Running) else word

    def hear_next(self, word=None, within_s=LIMIT_S):
        """The next word, whatever it is; None if there is none. The launcher is not silent meanwhile."""
        deadline = time.monotonic() + within_s
        while not select.select([self.stdout], [], [], 0.1)[0]:
            if time.monotonic() > deadline:
                return None
            if word is not None:
                self.say(word)
        self.stdout.readline()
        return steward.decode(self.stdout.readline())

    def start(self, code, *words):
        """A process of the job, known by the configuration it is given."""
        command = [sys.executable, "-c", code, *words, "-m", "deadpool_plugin.run", f"{self.folder}/config.yaml"]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKED_BY)  # what comes early waits for it
        try:
            job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.jobs.append(job)
        assert present(job.stdout).readline() == "up\n"
        return job

    def ended(self):
        assert self.process.wait(LIMIT_S) == 0
        assert not self.folder.exists()

    def close(self):
        processes: list[subprocess.Popen[str] | subprocess.Popen[bytes]] = [*self.jobs, self.process]
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # of a steward that was killed


def environment():
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    return {**os.environ, "PYTHONPATH": root}


@pytest.fixture
def host(tmp_path):
    hosts = []

    def make(**changes):
        hosts.append(Host(tmp_path, **changes))
        return hosts[-1]

    yield make
    for one in hosts:
        one.close()


def test_only_the_owner_reads_what_it_puts_in_place_and_nothing_stays(host):
    one = host()
    assert one.ready == steward.Ready(os.uname().nodename)
    assert one.folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in one.folder.iterdir()} == {
        "config.yaml": 0o600, "secret": 0o600,
    }  # fmt: skip
    assert (one.folder / "secret").read_bytes() == SECRET
    assert (one.folder / "config.yaml").read_text() == one.word.config
    one.say(steward.Order(leave=True))
    assert one.hear() == steward.Told([], 0)
    one.ended()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"command": ["other.py"]}, "there is no file other.py"),
        ({"versions": {**versions(), "torch": "1.0"}}, "1.0 where it was launched"),
    ],
)
def test_what_would_stop_the_job_is_said_before_it_starts(host, change, said):
    one = host(**change)
    assert said in one.ready.problem
    assert one.process.wait(LIMIT_S) == 78 and not one.folder.exists()


def test_a_folder_of_somebody_else_is_not_used(host, tmp_path):
    job = job_files.new_job()
    job_files.folder_of(job).symlink_to(tmp_path)
    try:
        one = host(job=job)
        assert "cannot be written" in one.ready.problem or "belongs to another user" in one.ready.problem
        assert not (tmp_path / "secret").exists()
    finally:
        job_files.folder_of(job).unlink()


def test_it_tells_of_this_job_only(host, tmp_path):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "events.1.jsonl"
    log.write_bytes(events.encode(events.JobStopped(exit_code=86, node=1)))
    one = host()
    fate: list[steward.FateEvent] = [
        events.SwapPlanned(restore_step=3, lost_nodes=(0,), node=1),
        events.JobFinished(node=1),
    ]
    said = (fate[0], events.StepDone(rank=0, step=4), events.StepCommitted(step=4), events.Alive(), fate[1])
    with log.open("ab") as file:
        file.write(b"".join(map(events.encode, said)))
        file.write(b'{"event":"JobStopped","exit{"event":"JobStopped"}\n{"event":"JobFin')
    one.say(steward.Order(leave=True))
    assert one.hear() == steward.Told(fate, 0)
    one.ended()


@pytest.mark.parametrize("exit_code", [0, 3])
def test_it_tells_how_the_agent_ended_though_no_log_could_be_written(host, exit_code):
    one = host()
    job_files.exit_code_file(f"{one.folder}/config.yaml", 1).write_text(str(exit_code))
    one.say(steward.Order(leave=True))
    ended = events.NodeEnded(exit_code=exit_code, node=1)
    assert one.hear() == steward.Told([ended] if exit_code else [events.JobFinished(node=1), ended], 0)
    one.ended()


@pytest.mark.parametrize("put_in_place", [True, False])
def test_an_agent_leaves_its_exit_code_where_its_steward_looks_for_it(monkeypatch, tmp_path, put_in_place):
    folder = tmp_path / ("deadpool-0-x" if put_in_place else "configs")
    folder.mkdir()
    (folder / "config.yaml").touch()
    place = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_SIZE": "1", "MASTER_ADDR": "h"}
    told = {"DEADPOOL_CONFIG": str(folder / "config.yaml"), "DEADPOOL_JOB_TAG": "1.2."}
    for name, value in {**place, "MASTER_PORT": "1", **told}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job_files, "SHM", tmp_path)
    monkeypatch.setattr(job_files, "secret_of", lambda config, path: SECRET)
    monkeypatch.setattr(agent, "Machine", lambda *everything: None)

    async def says(answer):
        return answer

    monkeypatch.setattr(agent, "reachable", lambda *everything: says(("", "")))
    monkeypatch.setattr(agent, "Agent", lambda *everything: fake(run=lambda: says(3)))
    with socket.socket(socket.AF_UNIX) as listener:
        assert asyncio.run(agent.run_agent(listener)) == 3
    assert {path.name for path in folder.iterdir()} == {"config.yaml", *(["exit_code.2"] if put_in_place else [])}


def test_told_to_stop_it_asks_first_and_kills_who_does_not_listen(host):
    one = host()
    asked, deaf = one.start(SAYS_ITS_SIGNAL), one.start(HEARS_NOTHING)
    launcher = one.start(HEARS_NOTHING, IS_THE_LAUNCHER)
    bystander = subprocess.Popen([sys.executable, "-c", "input()", IS_THE_LAUNCHER], stdin=subprocess.PIPE)
    assert job_processes(one.folder).keys() == {asked.pid, deaf.pid, launcher.pid}
    one.say(steward.Order(grace_s=60.0))
    assert asked.communicate(timeout=LIMIT_S)[0] == "SIGINT\n"
    assert deaf.poll() is launcher.poll() is None
    one.say(steward.Order(grace_s=0.0))
    assert deaf.wait(LIMIT_S) == launcher.wait(LIMIT_S) == -signal.SIGKILL
    assert one.hear() == steward.Told([], 2)
    one.ended()
    assert bystander.poll() is None
    bystander.communicate(b"\n")


def test_asked_to_leave_it_waits_for_the_end_of_a_job_that_goes_on(host):
    one = host()
    job = one.start(SAYS_ITS_SIGNAL)
    one.say(steward.Order(leave=True))
    with pytest.raises(subprocess.TimeoutExpired):
        one.process.wait(1.5)
    assert job.poll() is None
    job.kill()
    job.wait()
    assert one.hear() == steward.Told([], 0)
    one.ended()


def test_it_says_that_the_job_runs_and_has_formed_and_not_that_it_stands_still(host, tmp_path):
    one = host(patience_s=0.5)
    job = one.start(SAYS_ITS_SIGNAL)
    one.say(steward.Order())
    assert one.hear_next() == steward.Running(formed=False)
    one.log.write_bytes(events.encode(events.NodeJoined(host="h", ranks=(0,), spare=False, node=1)))
    while not (word := one.hear_next(steward.Order())).formed:
        assert word == steward.Running(formed=False)
    job.send_signal(signal.SIGSTOP)
    while one.hear_next(steward.Order(), 2.0) is not None:  # those on their way
        pass
    job.send_signal(signal.SIGCONT)
    assert one.hear_next(steward.Order()) == steward.Running(formed=True)


def test_the_launchers_own_tools_are_not_the_job(host, monkeypatch):
    """pdsh names the folder, too, where the launcher is on a host of the job."""
    one = host()
    monkeypatch.setenv("DEADPOOL_TAG", f"launch.{one.word.job}.")
    tool = one.start(SAYS_ITS_SIGNAL)
    assert not job_processes(one.folder)
    one.say(steward.Order(leave=True, grace_s=0.0))
    assert one.hear() == steward.Told([], 0) and tool.poll() is None
    one.ended()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_steward_that_is_ended_takes_the_secret_with_it(host, number):
    one = host()
    one.process.send_signal(number)
    assert one.process.wait(LIMIT_S) == 128 + number and not one.folder.exists()


def test_so_does_one_that_is_told_twice(host):
    """As systemd does when it ends a login: SIGTERM and at once SIGHUP."""
    for _ in range(5):
        one = host()
        one.process.send_signal(signal.SIGTERM)
        one.process.send_signal(signal.SIGHUP)
        assert one.process.wait(LIMIT_S) in (128 + signal.SIGTERM, 128 + signal.SIGHUP) and not one.folder.exists()


def test_nothing_stays_where_not_everything_could_be_written(monkeypatch):
    job, put = job_files.new_job(), files.put
    monkeypatch.setattr(files, "put", lambda path, *more: put(path if path.name == "secret" else path / "x", *more))
    with pytest.raises(ConfigError, match="cannot be written"), job_files.installed(job, "spares: 1", SECRET):
        raise AssertionError("not reached")
    assert not job_files.folder_of(job).exists()


def test_without_a_launcher_the_job_goes_on_and_its_secret_stays_as_long(host):
    one = host()
    job = one.start(SAYS_ITS_SIGNAL)
    one.process.stdin.close()
    with pytest.raises(subprocess.TimeoutExpired):
        one.process.wait(1.5)
    assert job.poll() is None and (one.folder / "secret").exists()
    job.terminate()
    job.wait()
    one.ended()


@pytest.mark.parametrize(("policy", "pauses"), [("continue", [0.5, 5.0, 5.0, 5.0]), ("stop", [0.5, 0.5, 0.5, 0.5])])
def test_without_a_launcher_all_processes_are_looked_at_less_often(monkeypatch, tmp_path, policy, pauses):
    """Unless it waits for the job's end, to kill who does not end."""
    asked, job = [], [{os.getpid()}, {os.getpid()}, {os.getpid()}, {os.getpid()}, set()]

    class Closed:
        closed, heard_at = True, 0.0

        def next(self, timeout_s):
            asked.append(timeout_s)

    monkeypatch.setattr(steward, "job_processes", lambda folder: job.pop(0))
    monkeypatch.setattr(proc, "look", lambda pid: None)
    monkeypatch.setattr(steward, "supervisors", lambda folder: set())
    steward.Steward(
        cast(steward.Ear, Closed()), tmp_path, Config(on_launcher_loss=policy, output_dir=tmp_path), 0
    ).serve()
    assert asked == pauses


def test_without_a_launcher_the_job_stops_if_it_shall(host):
    one = host(config="on_launcher_loss: stop\n")
    job = one.start(SAYS_ITS_SIGNAL)
    one.process.stdin.close()
    assert job.communicate(timeout=LIMIT_S)[0] == "SIGHUP\n"
    one.ended()


def test_a_launcher_that_is_slow_before_the_job_starts_is_waited_for(host):
    one = host(patience_s=0.5)
    with pytest.raises(subprocess.TimeoutExpired):
        one.process.wait(2.0)
    job = one.start(SAYS_ITS_SIGNAL)
    job.kill()
    one.process.stdin.close()
    job.wait()
    one.ended()


def test_a_silence_before_the_job_starts_is_not_held_against_it(monkeypatch, tmp_path):
    job, words = [set(), set(), {os.getpid()}, {os.getpid()}, set()], [None, None, None, steward.Order()]

    class Slow:
        closed, heard_at = False, -math.inf

        def next(self, timeout_s):
            return words.pop(0)

    monkeypatch.setattr(steward, "job_processes", lambda folder: job.pop(0))
    monkeypatch.setattr(proc, "look", lambda pid: None)
    monkeypatch.setattr(steward, "supervisors", lambda folder: pytest.fail("it is told to end"))
    steward.Steward(
        cast(steward.Ear, Slow()), tmp_path, Config(on_launcher_loss="stop", output_dir=tmp_path), 0
    ).serve()
    assert not words and not job


def test_a_silent_launcher_is_a_lost_one(host):
    """Its connection still stands: its host has vanished."""
    one = host(config="on_launcher_loss: stop\n", patience_s=4.0)
    one.say(steward.Order())
    job = one.start(SAYS_ITS_SIGNAL)
    assert job.communicate(timeout=LIMIT_S)[0] == "SIGHUP\n"
    one.ended()


def test_words_that_are_not_ours_are_passed_over():
    assert steward.decode(b"Welcome to h1!\n") is None
    assert steward.decode(steward.encode(steward.Order(grace_s=1.5))) == steward.Order(grace_s=1.5)
