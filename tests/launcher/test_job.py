"""The whole thing: real launcher, supervisors, agents, workers, spares, and real losses."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import slow_but

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.launcher


@pytest.mark.slow
def test_two_nodes_are_replaced_bit_for_bit(tmp_path):
    """The first node (rehearsed), then one nobody had rehearsed, by the demonstration itself."""
    kills = ["--kill", "0@8:optimizer", "--kill", "2@14:backward", "--spares", "2", "--steps", "20"]
    command = [sys.executable, str(ROOT / "scripts" / "demo.py"), "--out", str(tmp_path), *kills]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert ended.returncode == 0 and summary["bit_exact"], ended.stdout[-3000:]
    assert [(swap["node"], swap["lost_steps"]) for swap in summary["swaps"]] == [(0, 0), (2, 0)]
    for proof in ("survivor_pids_kept", "handles_kept", "storages_kept"):
        assert summary[proof]
    for picture in ("loss.png", "timeline.png", "events.jsonl", "summary.json"):
        assert (tmp_path / picture).stat().st_size > 0


@pytest.mark.slow
def test_without_a_spare_the_job_ends_with_a_verdict(start):
    job = start(2, 1, 0, 200, "--tp", "2", faults=["1@6:forward"])
    codes = job.end()
    killed = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the launcher, or first what it had started
    assert codes[1] in killed and codes[0] not in (0, None)
    assert "exit code 86" in job.output()
    [stopped] = job.events("JobStopped")
    assert stopped["exit_code"] == 86 and list(stopped["lost_ranks"]) == [1]
    assert stopped["newest_committed"] >= 3, "before the forward of step 6 the gate waits for it"
    assert not job.leftovers()


@pytest.mark.parametrize(
    "victim",
    slow_but(["deadpool_plugin.launch.agent", "deadpool_plugin.run", "deepspeed.launcher.launch"], 0),
    ids=["agent", "supervisor", "launcher"],
)
def test_a_killed_part_of_a_node_costs_that_node_only(start, victim):
    """SIGKILL of an agent, a supervisor or launch.py alone: no orphan there, a swap elsewhere, the job finishes."""
    job = start(2, 1, 1, 150, "--tp", "2")
    job.wait_for(lambda: job.events("SpareReady") and len(job.events("StepDone")) > 10)
    [*_, pid] = [p for p in job.pids(1, victim) if "deepspeed --" not in command_of(p)]
    os.kill(pid, signal.SIGKILL)
    codes = job.end()
    assert codes[0] == 0 and codes[2] == 0, job.output()[-3000:]
    assert job.events("SwapDone")
    assert not job.leftovers()


@pytest.mark.slow
def test_an_unsupported_optimizer_is_one_clear_error(start):
    job = start(1, 2, 0, 5, "--optimizer", "sgd")
    codes = job.end()
    assert codes == [78]
    assert "SGD" in job.output() and "Traceback" not in job.output()
    assert not job.leftovers()


def command_of(pid):
    """Nothing if it has gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""
