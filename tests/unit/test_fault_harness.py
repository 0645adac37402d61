"""Verdicts of scripts/faults/job.py on jobs that held, and on jobs that did not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.stand_in import fake

from deadpool_plugin import events
from deadpool_plugin.agent.reports import Reports
from deadpool_plugin.mirror.transfers import BulkTransfers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from clusters.forked_node import require_cuda_in_forks
from faults import hooks, many
from faults.job import Job, Verdict
from faults.plan import INJECTED, Kill

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LOST = "script of rank 3 ended with 1: "


@pytest.mark.parametrize(
    ("reason", "kind", "holds"),
    [
        (f"{LOST}AssertionError: not inside a step", "rank", False),
        (f"{LOST}Injected: {INJECTED}", "raise", True),
        ("process 7 killed by SIGKILL", "rank", True),
        (f"{LOST}AcceleratorError: CUDA error: device-side assert triggered", "assert", True),
        (f"{LOST}DistBackendError: NCCL error: unhandled cuda error", "assert", True),
        (f"{LOST}DistBackendError: NCCL error: unhandled cuda error", "rank", False),
    ],
)
def test_a_script_that_raises_by_itself_fails_the_job_although_its_process_is_replaced(tmp_path, reason, kind, holds):
    job = Job(tmp_path / "job", [], 4, 1, 0, [Kill(0, -1, 1, "forward", kind)])
    job.cluster.output.mkdir()
    event = {"event": "RankLost", "rank": 3, "reason": reason, "time": 1.0, "node": 3, "generation": 1}
    (job.cluster.output / "events.3.jsonl").write_text(json.dumps(event) + "\n")
    job.tail.read()
    verdict = Verdict([])  # of the fault itself nothing is asked here
    job._judge(verdict, None)
    assert verdict.holds is holds
    assert verdict.difference == ("" if holds else reason)


def test_a_process_lost_that_nothing_struck_fails_a_job_which_may_lose_no_other(tmp_path):
    job = Job(tmp_path / "job", [], 4, 1, 0, [Kill(0, -1, 1, "forward", "rank")], only_struck=True)
    by_its_agent = {"index": 0, "pid": 5, "rank": 3, "kind": "rank", "time": 1.0}
    (job.folder / "faults.jsonl").write_text(json.dumps(by_its_agent) + "\n")
    own, other = "process 7 killed by SIGKILL", "process 71 had not left its call after 12 s and was killed"
    job.tail.events = [{"event": "RankLost", "rank": 3, "reason": reason, "time": 2.0} for reason in (own, other)]
    verdict = Verdict([])
    job._judge(verdict, None)
    assert verdict.difference == other


def test_what_a_survivor_keeps_of_late_swaps_is_said_whatever_the_early_ones_left():
    def samples(**late):
        growing = {"device_kib": 0, "descriptors": 10, "threads": 3}
        for name in many.SURVIVORS.values():
            for swap in range(8):
                slope = {quantity: swap * late.get(quantity, 0) for quantity in growing}
                more = {quantity: value + slope[quantity] + min(swap, 2) for quantity, value in growing.items()}
                yield {"process": name, **more}

    assert many.kept(list(samples())) == []
    assert many.kept(list(samples(descriptors=1))) == [
        f"{name}: 2 more descriptors in 2 swaps" for name in many.SURVIVORS.values()
    ]
    assert many.kept([]) == [f"{name}: 0 samples, expected one for each swap" for name in many.SURVIVORS.values()]


@pytest.mark.parametrize(
    ("samples", "more"),
    [
        ([44, 59, 44, 44, 62, 73, 44, 48, 48], 0),  # helper threads, met at random
        ([82, 88, 88, 88, 88, 88, 88, 88], 0),  # a communicator that was not made yet
        ([88, 88, 88, 88, 88, 88, 88, 82], -6),
        ([1, 3, 5, 7], 4),
        ([1, 3, 5, 7, 40], 4),
    ],
)
def test_only_what_every_swap_leaves_counts_as_gained(samples, more):
    assert many.gained(samples) == more


RANK = """
import os, signal, sys
if os.environ["RANK"] == "1":
    sys.exit(int(sys.argv[1]))
if len(sys.argv) > 2:
    signal.pause()
"""
RUN = """
import sys
from pathlib import Path
from run_plain import run_ranks
script, logs, deadline_s, *words = sys.argv[1:]
sys.exit(run_ranks(2, Path(logs), [script, *words], deadline_s=float(deadline_s)) % 256)
"""


@pytest.mark.parametrize(
    ("words", "deadline_s", "code"), [(["0"], 60.0, 0), (["3", "pauses"], 60.0, 3), (["0", "pauses"], 0.1, 256 - 9)]
)
def test_plain_ranks_end_with_the_first_that_fails_and_all_at_the_deadline(tmp_path, words, deadline_s, code):
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-c", RUN, str(tmp_path / "rank.py"), str(tmp_path), str(deadline_s), *words]
    assert subprocess.run(command, cwd=SCRIPTS).returncode == code


def test_threads_that_make_forks_dangerous_are_named():
    code = "import threading; from clusters import processes; processes.require_one_thread(); "
    code += "threading.Thread(target=threading.Event().wait, daemon=True).start(); processes.require_one_thread()"
    done = subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS, capture_output=True, text=True)
    assert "threads ['python" in done.stderr and "after the imports" in done.stderr


def test_a_card_that_forks_could_not_use_is_said(monkeypatch):
    def initialised(by_imports, cards=1):
        cuda = SimpleNamespace(_is_in_bad_fork=lambda: by_imports, device_count=lambda: cards)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

    initialised(False)
    require_cuda_in_forks(1)
    initialised(True)
    with pytest.raises(RuntimeError, match="initialised by the imports"):
        require_cuda_in_forks(1)
    initialised(False, cards=0)
    with pytest.raises(RuntimeError, match="torch sees 0 NVIDIA cards here; expected 2"):
        require_cuda_in_forks(2)


def test_an_event_that_an_agent_reports_is_a_place_for_faults(monkeypatch):
    monkeypatch.setattr(Reports, "emit", lambda self, event: None)
    monkeypatch.setattr(BulkTransfers, "_records", lambda *arguments: [])
    reached = []
    hooks.hook_agent(fake(strike_if_due=lambda phase, *_: reached.append(phase)))
    Reports.emit(object.__new__(Reports), events.SwapPlanned(restore_step=3))
    assert reached == ["on:SwapPlanned"]
