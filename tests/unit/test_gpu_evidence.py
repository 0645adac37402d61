"""The evidence from a GPU: what is kept of a check, what is tried again, what the table says, where faults strike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from fakecuda import run
from faults.plan import Kill
from gpu import evidence, job, tests
from gpu.checks import NOT_HELD, Checks, newest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
HERE = Path(__file__).resolve().relative_to(SCRIPTS.parent)
FACTS: dict[str, object] = {"cards": ["NVIDIA X, 1 MiB, 580"], "nccl": "2.28.9", "versions": {"torch": "2.11.0"}}
FACTS |= {"commit": "abc", "stand_in": False, "reconfigure": evidence.said_of_reconfigure(False, "2.11.0")}


def fails(figures):
    figures["ratio"] = 0.5
    raise AssertionError("0.5 of it")


def outcomes(out, of=""):
    return {(line["part"], line["check"]): line["problem"] for line in newest(out, of)}


def test_what_held_is_not_done_again_and_what_failed_is(tmp_path):
    done = []
    for _ in range(2):
        checks = Checks("mirror", tmp_path)
        assert checks.run({"rate": lambda figures: done.append("rate"), "whole": fails}) == checks.failed == 1
    Checks("job", tmp_path).run({"rate": lambda figures: done.append("another part's")})
    assert done == ["rate", "another part's"]
    assert outcomes(tmp_path) == {
        ("mirror", "rate"): "", ("mirror", "whole"): "AssertionError: 0.5 of it", ("job", "rate"): "",
    }  # fmt: skip


def test_a_check_that_fails_keeps_its_figures(tmp_path):
    Checks("mirror", tmp_path).run({"whole": fails})
    (line,) = newest(tmp_path, "")
    assert not line["ok"] and line["figures"] == {"ratio": 0.5}


class Died(BaseException):
    """As a part that is killed: nothing of it runs any more."""


def dies(figures):
    raise Died


def test_what_was_planned_and_not_run_and_what_was_begun_and_did_not_end_have_failed(tmp_path):
    with pytest.raises(Died):
        Checks("job", tmp_path).run({"losses": lambda figures: None, "many": dies, "twice": lambda figures: None})
    assert outcomes(tmp_path) == {("job", "losses"): "", ("job", "many"): "did not end", ("job", "twice"): "not run"}
    assert not any(line["ok"] for line in newest(tmp_path, "") if line["check"] != "losses")


def test_what_did_not_end_is_tried_last(tmp_path):
    checks, order = Checks("job", tmp_path), []
    checks.begin("hangs")
    checks.end("failed", "it did not hold")
    names = ("hangs", "failed", "new")

    def check(name, figures):
        order.append(name)

    Checks("job", tmp_path).run({name: partial(check, name) for name in names})
    assert order == ["new", "failed", "hangs"]


def test_lines_of_another_machine_or_commit_do_not_count(tmp_path):
    here, there = evidence.name_of(FACTS), evidence.name_of(FACTS | {"commit": "def"})
    Checks("job", tmp_path, there).run({"losses": lambda figures: None})
    done = []
    Checks("job", tmp_path, here).run({"losses": lambda figures: done.append(here), "many": fails})
    assert done == [here] and list(outcomes(tmp_path, there)) == [("job", "losses")]
    assert list(outcomes(tmp_path, here)) == [("job", "losses"), ("job", "many")]


def test_outcomes_of_tests_are_kept_and_those_that_held_are_left_out(tmp_path, inner):
    def run():
        checks = Checks("tests", tmp_path)
        code = pytest.main(["-q", "-p", "no:cacheprovider", str(inner)], plugins=[tests.Outcomes(checks)])
        return code, {line["check"]: line for line in newest(tmp_path, "")}

    code, found = run()
    assert code == pytest.ExitCode.TESTS_FAILED
    assert found["test_held"]["ok"] and found["test_held"]["figures"] == {"seconds": 0.5}
    problems = {name: line["problem"] for name, line in found.items() if not line["ok"]}
    assert problems == {
        "test_left_out": "Skipped: needs a GPU and NCCL", "test_broke": "assert 1 == 2",
        "test_child": "RuntimeError: unhandled cuda error",
    }  # fmt: skip
    run()
    lines = [json.loads(line) for line in (tmp_path / "checks.jsonl").read_text().splitlines()]
    begun = [line["check"] for line in lines if line["problem"] == "did not end"]
    assert (begun.count("test_held"), begun.count("test_broke"), begun.count("test_left_out")) == (1, 2, 2)


@pytest.fixture
def inner(tmp_path):
    path = tmp_path / "test_inner.py"
    path.write_text(
        "import pytest\n"
        "def test_held(record_property): record_property('seconds', 0.5)\n"
        "def test_broke(): assert 1 == 2\n"
        "@pytest.mark.skip('needs a GPU and NCCL')\n"
        "def test_left_out(): pass\n"
        "def test_child():\n"
        "    raise AssertionError('Traceback (most recent call last):\\n  File x\\n'\n"
        "        'RuntimeError: unhandled cuda error\\n\\n---- child 0 (pid 7, ended)\\nNCCL WARN: closed\\n')\n"
    )
    return path


def test_no_test_at_all_is_no_proof(tmp_path, monkeypatch):
    monkeypatch.setattr(tests, "files", lambda: [])
    monkeypatch.setattr(pytest, "main", lambda *_, **__: pytest.ExitCode.NO_TESTS_COLLECTED)
    monkeypatch.setattr(sys, "argv", ["tests.py", "--out", str(tmp_path)])
    Checks("tests", tmp_path).plan([evidence.WHOLE])
    assert tests.main() == NOT_HELD
    assert "pytest ended with" in outcomes(tmp_path)[("tests", "collection")]


def test_the_files_with_such_tests_are_found():
    assert [Path(path).name for path in tests.files()] == ["test_comm_alone.py", "test_comm_nccl.py"]


def test_files_that_prove_nothing_on_a_card_are_run_on_the_stand_ins():
    paths = [path.relative_to(SCRIPTS.parent) for path in (SCRIPTS.parent / "tests").rglob("test_*.py")]
    only = [path for path in paths if "only_here" in (SCRIPTS.parent / path).read_text() and path != HERE]
    assert sorted(str(path) for path in only if "fakecuda" not in path.parts) == sorted(run.ON_STAND_INS_ONLY)


COPIES = "import shutil, sys; shutil.copy(*sys.argv[1:3]); sys.exit(int(sys.argv[3]))"
HELD = json.dumps({"cell": "a", "ok": True}) + "\n"
FAILED = json.dumps({"cell": "a", "ok": False, "refused": "", "problem": "wrong"}) + "\n"


@pytest.mark.parametrize(
    ("text", "code", "problems"),
    [(HELD, 0, []), (FAILED, 1, ["wrong"]), (HELD, 1, ["ended with 1"]), ("", 0, ["ended with 0"])],
    ids=["held", "failed", "broke", "nothing_ran"],
)
def test_a_part_on_the_stand_ins_that_broke_or_ran_nothing_has_failed(tmp_path, text, code, problems):
    (tmp_path / "written").write_text(text)
    words = ("{python}", "-c", COPIES, "{out}/written", "{out}/cells.jsonl", str(code))
    part = run.Part(words, "cells.jsonl", 60.0)
    found = run.run("part", part, tmp_path, {"PYTHON": sys.executable})
    assert [result.problem.partition(",")[0] for result in found if result.problem] == problems


def test_a_part_on_the_stand_ins_that_does_not_end_is_cut_off(tmp_path):
    part = run.Part(("{python}", "-c", "import signal; signal.pause()"), "cells.jsonl", 1.0)
    (found,) = run.run("part", part, tmp_path, {"PYTHON": sys.executable})
    assert found.problem == "was cut off after 1 s"


def test_the_part_of_tests_finds_the_plugin_and_what_it_skips_is_not_proven(tmp_path):
    """It is started by path, from anywhere, and nothing but itself says where the plugin is."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(SCRIPTS / "gpu" / "tests.py"), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    found = outcomes(tmp_path / "out")
    assert found.pop(("tests", "collection")) == "", done.stdout + done.stderr
    assert len(found) > 4 and set(found.values()) == {"Skipped: needs a GPU and NCCL"} and done.returncode == NOT_HELD


def ended(monkeypatch, out, code):
    monkeypatch.setattr(evidence, "command", lambda part, out, of: [sys.executable, "-c", code])
    evidence.run("mirror", out, "", 60.0)
    return outcomes(out)[("mirror", evidence.WHOLE)]


def test_a_part_that_outlives_its_time_is_ended_and_said(tmp_path, monkeypatch):
    code = "import time; time.sleep(600)"
    monkeypatch.setattr(evidence, "command", lambda part, out, of: [sys.executable, "-c", code])
    evidence.run("mirror", tmp_path, "", 0.5)
    assert "cut off after 0.5 s" in outcomes(tmp_path)[("mirror", evidence.WHOLE)]


@pytest.mark.parametrize(("code", "problem"), [("pass", ""), ("exit(1)", "ended with 1, see mirror.txt"),
                                               ("import os; os.abort()", "ended with -6, see mirror.txt")])  # fmt: skip
def test_how_a_part_ended_is_kept_although_all_it_told_of_held(tmp_path, monkeypatch, code, problem):
    Checks("mirror", tmp_path).run({"rate": lambda figures: None})
    assert ended(monkeypatch, tmp_path, code) == problem


def test_a_part_whose_check_does_not_hold_has_ended_well(tmp_path, monkeypatch):
    Checks("mirror", tmp_path).run({"rate": fails})
    assert ended(monkeypatch, tmp_path, f"exit({NOT_HELD})") == ""
    assert ended(monkeypatch, tmp_path, "raise RuntimeError") == "ended with 1, see mirror.txt", "this time it broke"


def test_a_part_that_was_cut_off_and_got_through_later_is_whole(tmp_path, monkeypatch):
    Checks("mirror", tmp_path).end(evidence.WHOLE, "cut off")
    assert ended(monkeypatch, tmp_path, "pass") == ""


def test_the_table_names_the_card_and_every_figure():
    figures = {"ratio": 0.98765, "ready_s": [1.0, 0.5, 2.0, 3.0, 4.0], "ratio_95": [0.9, 1.1], "label": "PCIe"}
    lines = [{"part": "mirror", "check": "rate", "ok": True, "problem": "", "figures": figures}]
    text = evidence.table(FACTS, lines)
    assert text.startswith("NVIDIA X, 1 MiB, 580; NCCL 2.28.9") and "_reconfigure: not tried: torch 2.11.0" in text
    assert "| mirror | rate | held | ratio 0.9877, ready_s 0.5 to 4, ratio_95 [0.9, 1.1], label PCIe |" in text


def test_the_table_of_a_stand_in_says_at_its_head_that_it_is_one():
    marked = evidence.table(FACTS | {"stand_in": True}, []).splitlines()
    assert "On a stand-in, without a card" in marked[2]
    assert "stand-in" not in evidence.table(FACTS, [])


@pytest.mark.parametrize("breaks", [False, True])
def test_files_are_written_after_every_part_and_tell_whether_all_of_them_held(tmp_path, monkeypatch, breaks):
    seen = []

    def run(part, out, of, limit_s):
        seen.append((part, limit_s, (out / "evidence.json").exists()))
        Checks(part, out, of).run({"check": fails if breaks and part == "job" else lambda figures: None})
        Checks(part, out, of).end(evidence.WHOLE)

    monkeypatch.setattr(evidence, "surroundings", lambda commit: FACTS)
    monkeypatch.setattr(evidence, "run", run)
    monkeypatch.setattr(sys, "argv", ["evidence.py", "--out", str(tmp_path), "mirror", "job"])
    assert evidence.main() == breaks
    assert seen == [("mirror", 90, False), ("job", 285, True)]
    kept = json.loads((tmp_path / "evidence.json").read_text())
    assert kept["machine"] == FACTS and len(kept["checks"]) == 4


def test_all_parts_together_take_less_than_nine_minutes_and_one_may_have_more(monkeypatch, tmp_path):
    assert sum(evidence.LIMITS_S.values()) <= 525  # the rest is for what is asked of the machine
    monkeypatch.setattr(sys, "argv", ["evidence.py", "--seconds", "560", "job"])
    assert evidence.parse_args().seconds == 560
    monkeypatch.setattr(sys, "argv", ["evidence.py", "--seconds", "560"])
    with pytest.raises(SystemExit):
        evidence.parse_args()


def test_faults_strike_at_updates_where_steps_are_skipped():
    updates_by = [0, 1, 1, 2, 3, 4, 4, 5, 6]
    kills = job.planned([("rank", "forward", 1), ("node", "update", 2)], updates_by)
    assert kills == [Kill(0, -1, 3, "forward", "rank", 1, hold=2), Kill(1, -1, 8, "update", "node", 2, hold=5)]


def test_without_several_ranks_per_card_jobs_run_over_gloo_and_say_so(tmp_path):
    place = job.Place(tmp_path, "cuda", over_gloo=True)
    words = " ".join(place.training(job.PIPELINE))
    assert "--tp 2" in words and "--pp" not in words and "--backend gloo" in words
    assert place.named("losses") == "losses, gloo over CUDA tensors"


def test_swaps_that_must_leave_nothing_in_use_leave_two_processes_alive():
    assert {rank for rank in range(job.RANKS)} - set(job.STRUCK) == {0, 3}


@pytest.mark.parametrize("missing", ["torch", "megatron.core", "deadpool_plugin"])
def test_what_is_missing_is_said_before_anything_runs(monkeypatch, missing):
    there = evidence.there
    monkeypatch.setattr(evidence, "there", lambda name: not name.startswith(missing) and there(name))
    with pytest.raises(SystemExit, match=f"lacks .*{missing}"):
        evidence.surroundings("abc")


def test_a_commit_that_nobody_names_is_asked_for_before_anything_runs(monkeypatch):
    monkeypatch.setattr(evidence, "there", lambda name: True)
    monkeypatch.setenv("PATH", "")
    assert evidence.commit_here() == ""
    with pytest.raises(SystemExit, match="--commit"):
        evidence.surroundings(evidence.commit_here())


def test_the_mirrors_part_runs_over_plain_memory_too(tmp_path):
    command = [sys.executable, str(SCRIPTS / "gpu" / "mirror.py"), "--out", str(tmp_path), "--device", "cpu"]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    found = outcomes(tmp_path / "cpu")
    assert found == {("mirror", "device-to-host rate"): "", ("mirror", "step time with and without"): ""}
