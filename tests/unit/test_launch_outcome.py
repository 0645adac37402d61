"""Conclusions of `deadpool launch` from what the nodes tell: exit code, and the hosts a scheduler should look at."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from deadpool_plugin import events
from deadpool_plugin.cli.main import main
from deadpool_plugin.launch import steward
from deadpool_plugin.launch.fate import UNREACHABLE, Fate

HOSTS = ["h1", "h2", "h3"]
FINISHED, CLEAN = events.JobFinished(), events.NodeEnded(exit_code=0)
LOST_2 = events.NodeLost(node=0, lost=(2,))
FINISHED_LATE = events.JobFinished(time=2.0)
ABANDONED = "the job is over, and no host says how it ended"


def test_what_an_outcome_is_made_of_is_kept_however_long_a_log_is():
    told = re.findall(r"case events\.(\w+)\(\)", inspect.getsource(Fate.add))
    assert len(told) > 5 and {*told} | {kind.__name__ for kind in steward.FateEvent.__args__} <= {
        kind.__name__ for kind in events.FATE
    }


def lost(*nodes, at=0.0):
    return events.SwapPlanned(restore_step=4, lost_nodes=nodes, time=at)


def stopped(code, at=1.0, **more):
    return events.JobStopped(exit_code=code, reason=f"reason {code}", time=at, **more)


def failed_late(node, code=3):
    return events.NodeEnded(exit_code=code, node=node)


def left(node, code, at=1.0):
    """As the log of a host whose processes were told to end (`pkill`)."""
    told = events.NodeJoined(host=f"n{node}", time=at), events.NodeFenced(time=at), failed_late(node, code)
    return [msgspec.structs.replace(event, node=node, time=at) for event in told]


@pytest.mark.parametrize(
    ("told", "launcher_code", "line"),
    [
        ({0: [FINISHED, CLEAN], 1: [FINISHED], 2: [FINISHED]}, 0, "the job finished; exit code 0; lost hosts: none"),
        ({0: [lost(1), FINISHED], 2: [FINISHED]}, 255, "the job finished; exit code 0; lost hosts: h2"),
        ({2: [lost(1), lost(0), FINISHED]}, 255, "the job finished; exit code 0; lost hosts: h1,h2"),
        ({0: [lost(1), FINISHED], 1: [lost(1)], 2: []}, 9, "the job finished; exit code 0; lost hosts: h2"),
        ({0: [FINISHED], 1: [events.NodeFenced(node=1)], 2: []}, 87, "the job finished; exit code 0; lost hosts: h2"),
        ({0: [FINISHED], 1: [FINISHED]}, 255, "the job finished; exit code 0; lost hosts: h3"),
        ({0: [stopped(86)], 1: [stopped(86)], 2: [stopped(86)]}, 86,
         "the job stopped: reason 86; exit code 86; lost hosts: none"),
        ({0: [stopped(86, at=2.0)], 1: [stopped(129, at=1.0)], 2: []}, 255,
         "the job stopped: reason 129; exit code 129; lost hosts: none"),
        ({0: [FINISHED], 1: [stopped(86, at=0.5)], 2: [FINISHED]}, 255,
         "the job finished; exit code 0; lost hosts: none"),
        ({0: [lost(2), stopped(3)], 1: [], 2: [stopped(129, at=0.5, node=2)]}, 255,
         "the job stopped: reason 3; exit code 3; lost hosts: h3"),
        ({0: [stopped(3, at=9.0, generation=2)], 1: [stopped(86, at=1.0, generation=1)], 2: []}, 255,
         "the job stopped: reason 3; exit code 3; lost hosts: none"),
        ({0: [LOST_2, stopped(86, node=0)], 1: [stopped(86, node=1)], 2: []}, 255,
         "the job stopped: reason 86; exit code 86; lost hosts: h3"),
        ({0: [LOST_2, stopped(86, node=0, generation=1)], 1: [stopped(86, node=1, generation=1)], 2: []}, 255,
         "the job stopped: reason 86; exit code 86; lost hosts: none"),
        ({0: [LOST_2, stopped(86, node=0)], 1: [], 2: [stopped(86, node=2), events.NodeLost(node=2, lost=(0, 1))]}, 255,
         "the job stopped: reason 86; exit code 86; lost hosts: h2"),
        ({0: [LOST_2, FINISHED], 1: [stopped(86, node=1)], 2: []}, 255,
         "the job finished; exit code 0; lost hosts: none"),
        ({0: [], 1: [], 2: []}, 78, "the job did not finish; exit code 78; lost hosts: none"),
        ({0: [], 1: [], 2: []}, 0, "the job did not finish; exit code 1; lost hosts: none"),
        ({}, 255, f"{UNREACHABLE}; exit code 75; lost hosts: none"),
        ({0: [events.NodeFenced(node=0)]}, 255, f"{UNREACHABLE}; exit code 75; lost hosts: none"),
        ({node: left(node, 87) for node in (0, 1, 2)}, 15, f"{ABANDONED}: node 0 (h1), node 1 (h2), node 2 (h3) left "
         "with 87; start again from the newest checkpoint; exit code 1; lost hosts: none"),
        ({0: left(0, 87), 1: [*left(1, 143), lost(2)]}, 15, f"{ABANDONED}: node 0 (h1) left with 87, node 1 (h2) left "
         "with 143; start again from the newest checkpoint; exit code 1; lost hosts: h3"),
        ({0: left(0, 87), 1: left(1, 87), 2: left(2, 87)[:-1]}, 15, f"{ABANDONED}: node 0 (h1), node 1 (h2) left "
         "with 87, node 2 (h3) left; start again from the newest checkpoint; exit code 1; lost hosts: none"),
        ({0: left(0, 87), 1: [*left(1, 87), events.SwapPlanned(restore_step=1, joined=(3,))], 2: left(2, 87)}, 255,
         f"{UNREACHABLE}; exit code 75; lost hosts: none"),
        ({node: [failed_late(node, 78)] for node in (0, 1, 2)}, 78,
         "the job did not finish; exit code 78; lost hosts: none"),
        ({1: []}, 255, "the job did not finish; exit code 255; lost hosts: h1,h3"),
        ({0: [FINISHED], 1: [FINISHED, failed_late(1)], 2: []}, 3,
         "training finished, but a script failed afterwards; exit code 3; lost hosts: none"),
        ({0: [lost(1), FINISHED], 1: [failed_late(1)], 2: []}, 3, "the job finished; exit code 0; lost hosts: h2"),
        ({0: [FINISHED], 1: [failed_late(1, 87)], 2: []}, 87, "the job finished; exit code 0; lost hosts: none"),
    ],
)  # fmt: skip
def test_the_last_line(told, launcher_code, line):
    found = Fate(told).outcome(HOSTS, launcher_code)
    assert str(found) == line and f"exit code {found.exit_code};" in line


def test_the_last_line_has_the_hosts_of_the_nodes_it_names():
    why = "script of rank 1 on node 1 ended with 3: ValueError; node 2 was lost (silent)"
    found = Fate({0: [events.JobStopped(exit_code=3, reason=why)], 1: [], 2: []}).outcome(HOSTS, 0)
    assert "rank 1 on node 1 (h2) ended" in found.what and "node 2 (h3) was lost" in found.what


def test_a_host_that_joined_and_was_lost_has_the_name_it_gave():
    told = {0: [lost(3), FINISHED], 1: [events.NodeJoined(node=3, host="late")], 2: []}
    assert Fate(told).outcome(HOSTS, 0).lost == ["late"]
    assert Fate({0: [lost(3), FINISHED], 1: [], 2: []}).outcome(HOSTS, 0).lost == ["node 3"]


# ---- from event logs


def write(folder, node, *said):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"events.{node}.jsonl").open("ab") as file:
        for event in said:
            file.write(events.encode(msgspec.structs.replace(event, node=node)))


def joined(host, at):
    return events.NodeJoined(host=host, time=at)


def test_the_command_tells_of_the_last_job(tmp_path, capsys):
    first = [joined("a", 1.0), events.WorldFormed(time=1.1), stopped(86, at=2.0)]
    second = [joined("a", 5.0), events.WorldFormed(time=5.1), lost(1, at=5.6), events.JobFinished(time=6.0)]
    write(tmp_path, 0, *first, *second)
    write(tmp_path, 1, joined("b", 1.0), stopped(86, at=2.0), joined("b", 5.0), events.SpareReady(time=5.5))
    write(tmp_path, 2, joined("c", 1.0), stopped(86, at=2.0))
    assert main(["outcome", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "[deadpool] the job finished; exit code 0; lost hosts: b\n"
    (tmp_path / "hosts").write_text("# active\nn0 slots=8\nn1 slots=8\n")
    assert main(["outcome", str(tmp_path), "--hostfile", str(tmp_path / "hosts")]) == 0
    assert capsys.readouterr().out.endswith("lost hosts: n1\n")


@pytest.mark.parametrize(
    ("command", "option", "remedy"),
    [("stop", [], "nothing, if that is the one"), ("join", ["--job"], "name a job that runs")],
)
def test_who_stops_or_joins_a_job_that_has_ended_is_told_how_it_ended(
    tmp_path, capsys, monkeypatch, command, option, remedy
):
    """Whoever does may come too late; its contacts and its secret have gone with it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    logs, config = tmp_path / "logs", tmp_path / "deadpool.yaml"
    config.write_text(f"output_dir: {logs}")
    write(logs, 0, joined("a", 1.0), events.WorldFormed(time=1.1))
    assert main([command, *option, str(logs)]) == 78
    assert "no node of a running job is named in" in capsys.readouterr().err
    write(logs, 0, lost(1, at=5.0), events.JobFinished(time=6.0))
    for words in ([*option, str(logs)], ["--deadpool-config", str(config)]):
        assert main([command, *words]) == 78
        said = capsys.readouterr().err
        assert re.search(r"ended .+ ago: the job finished; exit code 0; lost hosts: node 1; expected", said)
        assert f"to do: {remedy}" in said


def test_a_job_that_nobody_says_the_end_of(tmp_path, capsys):
    assert main(["outcome", str(tmp_path)]) == 78
    write(tmp_path, 0, joined("a", 1.0), events.WorldFormed(time=1.1))
    assert main(["outcome", str(tmp_path), "--otherwise", "9"]) == 9
    assert "did not finish; exit code 9" in capsys.readouterr().out


def test_a_job_that_runs_is_not_called_a_failure(tmp_path, capsys):
    now = time.time()
    steps = [events.StepDone(rank=0, step=step, time=now) for step in range(3)]
    write(tmp_path, 0, joined("a", now - 999), events.WorldFormed(time=now - 998), *steps)
    assert main(["outcome", str(tmp_path)]) == 75
    said = capsys.readouterr().out
    assert re.search(
        r"the job is still running \(last event \d+ s ago\); exit code 75; `deadpool watch .*` shows", said
    )
    assert main(["outcome", str(tmp_path), "--otherwise", "137"]) == 137, "its launcher has ended"


@pytest.mark.parametrize(("alive_at", "code"), [(0, 75), (200, 75), (301, 1)])
def test_a_job_that_waits_or_is_slow_is_none_for_as_long_as_it_says_so(tmp_path, capsys, alive_at, code):
    now = time.time()
    waits = events.WaitingForHost(time=now - 999, reason="no spare")
    write(tmp_path, 0, joined("a", now - 2000), events.WorldFormed(time=now - 1998), waits)
    write(tmp_path, 1, joined("b", now - 1999), events.Alive(time=now - alive_at))
    assert main(["outcome", str(tmp_path)]) == code
    assert ("still running" in capsys.readouterr().out) == (code == 75)


def test_a_job_has_not_ended_while_scripts_are_at_work_after_the_training(tmp_path):
    now = time.time()
    for node in (0, 1):
        write(tmp_path, node, joined(f"n{node}", now - 90), events.JobFinished(time=now - 60))
    write(tmp_path, 2, joined("n2", now - 90), lost(3, at=now - 70), events.JobFinished(time=now - 60))
    write(tmp_path, 3, joined("n3", now - 90))
    for node, code in ((0, 0), (1, 3)):
        assert main(["outcome", str(tmp_path)]) == 75
        write(tmp_path, node, events.NodeEnded(exit_code=code, time=now - 50))
    assert main(["outcome", str(tmp_path)]) == 75
    assert main(["outcome", str(tmp_path), "--otherwise", "1"]) == 3, "its launcher has ended"
    write(tmp_path, 2, events.NodeEnded(exit_code=0, time=now - 40))
    assert main(["outcome", str(tmp_path)]) == 3


def test_a_half_that_gives_up_is_not_the_end_of_the_other_one(tmp_path):
    """Which has gone on without it, or waits for a host."""
    now = time.time()
    gave_up = [joined("b", now - 90), stopped(86, at=now - 20), events.NodeEnded(exit_code=86, time=now - 19)]
    starts = [joined("a", now - 90), events.WorldFormed(time=now - 89)]
    for name, goes_on in (("swapped", lost(1, at=now - 40)), ("waits", events.WaitingForHost(time=now - 40))):
        write(tmp_path / name, 0, *starts, goes_on)
        write(tmp_path / name, 1, *gave_up)
        assert main(["outcome", str(tmp_path / name)]) == 75, name
    assert main(["outcome", str(tmp_path / "waits"), "--otherwise", "9"]) == 86, "its launcher has ended"
    write(tmp_path / "waits", 0, stopped(86, at=now - 10))
    assert main(["outcome", str(tmp_path / "waits")]) == 86


def test_a_job_that_all_hosts_have_left_is_over_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    now = time.time()
    write(tmp_path, 0, events.WorldFormed(node_of=(0, 1, 2), spares=(3,)), *left(0, 87), FINISHED)  # of another job
    write(tmp_path, 0, events.WorldFormed(time=now - 91, node_of=(0, 0, 1, 1), spares=(2,)), *left(0, 87, now - 90))
    write(tmp_path, 1, *left(1, 143, now - 90))
    write(tmp_path, 2, joined("n2", now - 90))
    assert main(["outcome", str(tmp_path)]) == 75, "one is left"
    assert "still running" in capsys.readouterr().out
    write(tmp_path, 2, *left(2, 87, now - 8)[1:])
    line = (
        f"{ABANDONED}: node 0 (n0), node 2 (n2) left with 87, node 1 (n1) left with 143; start again from the newest "
        "checkpoint; exit code 1; lost hosts: none\n"
    )
    for words in ([], ["--otherwise", "143"]):
        assert main(["outcome", str(tmp_path), *words]) == 1
        assert capsys.readouterr().out == f"[deadpool] {line}"
    assert main(["watch", str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith(line)


def test_a_host_without_a_last_word_is_lost_though_nobody_had_the_time_to_say_so(tmp_path, capsys, monkeypatch):
    """Power failure of one host, Ctrl-C within `patience_s`: the launcher's line names it, too."""
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    (tmp_path / "hosts").write_text("h1\nh2\nh3\n")
    why, now = "ended where it was launched (Ctrl-C)", time.time()
    for ago, code in ((400, 130), (20, 130), (5, 75)):
        logs, at = tmp_path / str(ago), now - ago
        write(logs, 0, events.WorldFormed(time=at - 9, node_of=(0, 1), spares=(2,)))
        for node in (0, 1, 2):
            write(logs, node, joined(f"h{node + 1}", at - 9))
        for node in (0, 2):
            stop = events.JobStopped(exit_code=130, reason=why, time=at)
            write(logs, node, stop, events.NodeEnded(exit_code=130, time=at))
        line = f"the job stopped: {why}; exit code 130; lost hosts: h2\n"
        for words in ([], ["--hostfile", str(tmp_path / "hosts")]):
            assert main(["outcome", str(logs), *words]) == code
            assert capsys.readouterr().out.endswith(line) == (code == 130), "within seconds it may have a last word"
    assert main(["watch", str(tmp_path / "400")]) == 130
    assert capsys.readouterr().out.endswith(line)


def test_a_host_that_has_said_nothing_since_it_joined_is_named(tmp_path, capsys):
    """A spare that is lost before it is ready."""
    write(tmp_path, 1, joined("late", 1.0))
    write(tmp_path, 0, events.WorldFormed(time=1.1, node_of=(0,), spares=(1,)), joined("h1", 1.2), lost(1, at=2.0))
    write(tmp_path, 0, events.JobFinished(time=3.0))
    assert main(["outcome", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "[deadpool] the job finished; exit code 0; lost hosts: late\n"


def test_a_host_that_left_early_makes_no_lost_ones_of_those_that_nobody_says_the_end_of(tmp_path, capsys):
    write(tmp_path, 0, events.WorldFormed(node_of=(0, 1), spares=(2,)), joined("h1", 1.0), lost(1, at=2.0))
    write(tmp_path, 1, *left(1, 87))
    write(tmp_path, 2, joined("h3", 1.0))
    assert main(["outcome", str(tmp_path)]) == 1
    assert "the job did not finish; exit code 1; lost hosts: n1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "code", "line"),
    [
        ([], 75, "every host that writes to this folder has left the job, which may still run on others: run this"),
        (["--otherwise", "9"], 9, "the job did not finish; exit code 9"),
    ],
)
def test_nobody_is_sent_from_the_command_to_the_command(tmp_path, capsys, more, code, line):
    """Of the members, node 1 writes elsewhere."""
    write(tmp_path, 0, events.WorldFormed(node_of=(0, 1)), *left(0, 87))
    assert main(["outcome", str(tmp_path), *more]) == code
    said = capsys.readouterr().out
    assert line in said and "deadpool outcome" not in said


SRUN = """#!/bin/bash
echo "$@" > srun.txt
while [ "$1" != bash ]; do shift; done
for node in 0 1 2; do SLURM_NODEID=$node "$@" & done
wait
exit 137
"""


def test_under_slurm_every_node_has_a_launcher_of_its_own(tmp_path):
    """configs/slurm.sbatch with stand-ins for Slurm's commands and deepspeed."""
    programs = {
        "srun": SRUN, "scontrol": "#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n",
        "deepspeed": "#!/bin/sh\ncat \"$2\" >> hosts.txt; echo \"$@\" >> deepspeed.txt\n"
        "cat \"$config\" >> config.txt\n",
        "python": f"#!/bin/sh\nexec {sys.executable} \"$@\"\n",
        "deadpool": f"#!/bin/sh\nexec {sys.executable} -m deadpool_plugin \"$@\"\n",
    }  # fmt: skip
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "deadpool.yaml").write_text("output_dir: logs\npatience_s: 7")
    logs = tmp_path / "deadpool-logs" / "7"
    write(logs, 0, joined("n1", 1.0), events.WorldFormed(time=1.1), lost(1, at=1.5), FINISHED_LATE)
    write(logs, 2, joined("n3", 1.0), FINISHED_LATE)
    root = Path(__file__).resolve().parents[2]
    slurm = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "64"
    }  # fmt: skip
    env = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(root)}
    env.pop("MASTER_PORT", None)  # which other tests set
    script = ["bash", str(root / "configs" / "slurm.sbatch"), "train.py", "--name", "two words"]
    done = subprocess.run(script, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[deadpool] the job finished; exit code 0; lost hosts: n2\n"), (
        done.stderr
    )
    options = {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--cpus-per-task=64"}
    assert options <= set((tmp_path / "srun.txt").read_text().split())
    lines = sorted(line.split(maxsplit=2)[2] for line in (tmp_path / "deepspeed.txt").read_text().splitlines())
    said = "--no_ssh --node_rank {} --master_addr n1 --master_port 29500 --module deadpool_plugin.run train.py "
    config = f"--name two words --deadpool-config {tmp_path}/deadpool.7.yaml"
    assert lines == [said.format(node) + config for node in range(3)]
    told = (tmp_path / "config.txt").read_text()
    assert sorted(told.split("\n")) == sorted(["patience_s: 7", f"output_dir: {logs}"] * 3 + [""])
    assert not (tmp_path / "deadpool.7.yaml").exists()
    assert (tmp_path / "hosts.txt").read_text() == "n1 slots=4\nn2 slots=4\nn3 slots=4\n" * 3
    assert not list(tmp_path.glob("hosts.7.*"))


def test_without_a_hostfile_an_id_that_nobody_had_is_no_host(tmp_path, capsys):
    """`deadpool join` takes an id, and may be ended before it has said a word."""
    for node, host in ((0, "h1"), (2, "h3")):
        told = [events.NodeJoined(node=node, host=host, ranks=(node,), spare=False), events.JobFinished(node=node),
                events.NodeEnded(node=node, exit_code=0)]  # fmt: skip
        (tmp_path / f"events.{node}.jsonl").write_bytes(b"".join(map(events.encode, told)))
    (tmp_path / "events.1.jsonl").touch()
    assert main(["outcome", str(tmp_path)]) == 0
    assert "lost hosts: none" in capsys.readouterr().out
