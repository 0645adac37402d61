"""The evidence from a GPU: what is kept of a check, what is tried again, what the table says, where faults strike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from faults.plan import Kill
from gpu import evidence, job, tests
from gpu.checks import Checks

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def fails():
    raise AssertionError("0.5 of it")


def test_what_held_is_not_done_again_and_what_failed_is(tmp_path):
    done = []
    for _ in range(2):
        checks = Checks("mirror", tmp_path)
        checks.run("rate", lambda: done.append("rate") or {"ratio": 0.98})
        checks.run("whole", fails)
        assert checks.failed == 1
    Checks("job", tmp_path).run("rate", lambda: done.append("another part's") or {})
    assert done == ["rate", "another part's"]
    lines = evidence.newest(tmp_path)
    assert [(line["part"], line["check"], line["ok"]) for line in lines] == [
        ("mirror", "rate", True), ("mirror", "whole", False), ("job", "rate", True),
    ]  # fmt: skip


def test_outcomes_of_tests_are_kept_and_those_that_held_are_left_out(tmp_path, inner):
    def outcomes():
        checks = Checks("tests", tmp_path)
        code = pytest.main(["-q", "-p", "no:cacheprovider", str(inner)], plugins=[tests.Outcomes(checks)])
        return code, {line["check"]: (line["ok"], line["problem"]) for line in evidence.newest(tmp_path)}

    code, found = outcomes()
    assert code == pytest.ExitCode.TESTS_FAILED
    assert found["test_held"] == (True, "") and found["test_left_out"] == (False, "Skipped: needs a GPU and NCCL")
    assert found["test_broke"] == (False, "assert 1 == 2")
    outcomes()
    lines = [json.loads(line)["check"] for line in (tmp_path / "checks.jsonl").read_text().splitlines()]
    assert (lines.count("test_held"), lines.count("test_broke"), lines.count("test_left_out")) == (1, 2, 2)


@pytest.fixture
def inner(tmp_path):
    path = tmp_path / "test_inner.py"
    path.write_text(
        "import pytest\n"
        "def test_held(): pass\n"
        "def test_broke(): assert 1 == 2\n"
        "@pytest.mark.skip('needs a GPU and NCCL')\n"
        "def test_left_out(): pass\n"
    )
    return path


def test_the_files_with_such_tests_are_found():
    assert [Path(path).name for path in tests.files()] == ["test_comm_nccl.py"]


def test_a_part_that_outlives_its_time_is_ended_and_said(tmp_path, monkeypatch):
    monkeypatch.setitem(evidence.LIMITS_S, "mirror", 0.5)
    monkeypatch.setattr(evidence, "command", lambda part, out: [sys.executable, "-c", "import time; time.sleep(600)"])
    evidence.run("mirror", tmp_path)
    (line,) = evidence.newest(tmp_path)
    assert not line["ok"] and "cut off after 0.5 s" in line["problem"]


def test_a_part_that_was_cut_off_counts_by_its_checks_once_it_has_some(tmp_path):
    checks = Checks("job", tmp_path)
    checks.keep({"part": "job", "check": "(whole)", "ok": False, "problem": "cut off", "figures": {}})
    checks.run("losses", dict)
    assert [line["check"] for line in evidence.newest(tmp_path)] == ["losses"]


def test_the_table_names_the_card_and_every_figure():
    facts = {"cards": ["NVIDIA X, 1 MiB, 580"], "nccl": "2.28.9", "versions": {"torch": "2.11.0"}}
    figures = {"ratio": 0.98765, "ready_s": [1.0, 0.5, 2.0, 3.0, 4.0], "ratio_95": [0.9, 1.1], "label": "PCIe"}
    lines = [{"part": "mirror", "check": "rate", "ok": True, "problem": "", "figures": figures}]
    text = evidence.table(facts, lines)
    assert text.startswith("NVIDIA X, 1 MiB, 580; NCCL 2.28.9")
    assert "| mirror | rate | held | ratio 0.9877, ready_s 0.5 to 4, ratio_95 0.9 to 1.1, label PCIe |" in text


def test_faults_strike_at_updates_where_steps_are_skipped():
    updates_by = [0, 1, 1, 2, 3, 4, 4, 5, 6]
    kills = job.planned([("rank", "forward", 1), ("node", "update", 2)], updates_by)
    assert kills == [Kill(0, -1, 3, "forward", "rank", 1, hold=2), Kill(1, -1, 8, "update", "node", 2, hold=5)]


@pytest.mark.parametrize("missing", ["torch", "megatron.core"])
def test_what_is_missing_is_said_before_anything_runs(tmp_path, monkeypatch, missing):
    there = evidence.there
    monkeypatch.setattr(evidence, "there", lambda name: name != missing and there(name))
    with pytest.raises(SystemExit, match=f"lacks {missing}"):
        evidence.surroundings()


def test_the_mirrors_part_runs_over_plain_memory_too(tmp_path):
    command = [sys.executable, str(SCRIPTS / "gpu" / "mirror.py"), "--out", str(tmp_path), "--device", "cpu"]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (tmp_path / "cpu" / "checks.jsonl").read_text().splitlines()]
    assert [line["check"] for line in lines if line["ok"]] == ["device-to-host rate", "step time with and without"]
