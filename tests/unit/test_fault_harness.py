"""What scripts/faults/job.py takes for a job that held, and for one that did not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from faults.job import Job, Verdict
from faults.plan import INJECTED

LOST = "script of rank 3 ended with 1: "


@pytest.mark.parametrize(
    ("reason", "holds"),
    [
        (f"{LOST}AssertionError: not inside a step", False),
        (f"{LOST}Injected: {INJECTED}", True),
        ("process 7 killed by SIGKILL", True),
    ],
)
def test_a_script_that_raises_by_itself_fails_the_job_although_its_process_is_replaced(tmp_path, reason, holds):
    job = Job(tmp_path / "job", [], 4, 1, 0, [])
    job.cluster.output.mkdir()
    event = {"event": "RankLost", "rank": 3, "reason": reason, "time": 1.0, "node": 3, "generation": 1}
    (job.cluster.output / "events.3.jsonl").write_text(json.dumps(event) + "\n")
    job.tail.read()
    verdict = Verdict([])
    job._judge(verdict, None)
    assert verdict.holds is holds
    assert verdict.difference == ("" if holds else reason)
