"""The whole thing: real launcher, supervisors, agents, workers, spares, and real losses."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = "deepspeed.launcher.launch"
pytestmark = pytest.mark.launcher


@pytest.mark.slow
def test_two_nodes_are_replaced_bit_for_bit(tmp_path):
    """Runs the demonstration; CI runs it with four nodes, too."""
    size = ["--nodes", "2", "--ranks-per-node", "2", "--pp", "1", "--spares", "2", "--steps", "20"]
    kills = ["--kill", "0@8:optimizer", "--kill", "1@14:backward"]
    command = [sys.executable, str(ROOT / "scripts" / "demo.py"), "--out", str(tmp_path), *size, *kills]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert ended.returncode == 0 and summary["bit_exact"], ended.stdout[-3000:]
    assert [(swap["node"], swap["lost_steps"]) for swap in summary["swaps"]] == [(0, 0), (1, 0)]
    for proof in ("survivor_pids_kept", "handles_kept", "storages_kept"):
        assert summary[proof]
    for picture in ("loss.png", "timeline.png", "events.jsonl", "summary.json"):
        assert (tmp_path / picture).stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", [["--stop-at", "12"], ["--kill-all", "12", "--store-every-s", "0"]], ids=["term", "kill"]
)
def test_a_job_that_has_ended_goes_on_bit_for_bit(tmp_path, end):
    """Every process of every host gets SIGTERM at once, and then nothing is lost; or SIGKILL."""
    size = ["--nodes", "2", "--ranks-per-node", "2", "--pp", "1", "--spares", "1", "--steps", "20"]
    command = [sys.executable, str(ROOT / "scripts" / "demo.py"), "--out", str(tmp_path), *size, *end]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert ended.returncode == 0 and summary["bit_exact"] and summary["resumed"], ended.stdout[-3000:]
    assert summary["steps_lost"] == 0 or end[0] == "--kill-all"


@pytest.mark.slow
def test_killed_parts_of_nodes_cost_these_nodes_only_until_no_spare_is_left(start):
    """Kills a launch.py, an agent, a supervisor: no orphan there, a swap; the third loss ends the job."""
    job = start(2, 1, 2, 100_000, "--tp", "2")
    holder = 1  # of rank 1
    job.wait_for(lambda: job.events("SpareReady"))
    for swaps, part in enumerate([LAUNCHER, "deadpool_plugin.launch.agent"], 1):
        steps = steps_done(job)
        job.wait_for(lambda steps=steps: steps_done(job) > steps + 10)
        kill(job, holder, part)
        job.wait_for(lambda swaps=swaps: len(job.events("SwapDone")) >= swaps)
        job.wait_for(lambda holder=holder: holder not in job.cluster.processes().values())
        [*_, planned] = job.events("SwapPlanned")
        assert list(planned["takers"]) == [str(holder)]
        holder = planned["takers"][str(holder)]
    steps = steps_done(job)
    job.wait_for(lambda: steps_done(job) > steps + 10)
    done = steps_done(job)
    kill(job, holder, "deadpool_plugin.run")
    codes = job.end()
    assert codes[0] not in (0, None), job.output()[-3000:]
    assert "exit code 86" in job.output()
    [stopped] = job.events("JobStopped")
    assert stopped["exit_code"] == 86 and list(stopped["lost_ranks"]) == [1]
    assert stopped["newest_committed"] >= done - 3, "the gate waits for it before a forward"
    assert not job.leftovers()


def test_an_unsupported_optimizer_is_one_clear_error(start):
    job = start(1, 2, 0, 5, "--optimizer", "sgd")
    codes = job.end()
    assert codes == [78]
    assert "SGD" in job.output() and "Traceback" not in job.output()
    assert not job.leftovers()


def steps_done(job):
    return max((event["step"] for event in job.events("StepDone")), default=0)


def kill(job, node, part):
    """SIGKILL a process; a launcher's command line names what it starts, too."""
    launchers = {pid for pid in job.pids(node, "") for word in ("deepspeed --", LAUNCHER) if word in command_of(pid)}
    [*_, pid] = [pid for pid in job.pids(node, part) if part == LAUNCHER or pid not in launchers]
    os.kill(pid, signal.SIGKILL)


def command_of(pid):
    """Nothing if it has gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""
