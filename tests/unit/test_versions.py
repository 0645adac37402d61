"""Versions: what is said of a combination, and that it is what was recorded."""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deadpool_plugin import versions
from deadpool_plugin.errors import Unsupported

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ".".join(platform.python_version_tuple()[:2])
HELD = versions.Row(PYTHON, "2.13.0", "0.16.1", "0.19.8", held=True)
BROKEN = versions.Row(PYTHON, "2.11.0", "0.15.3", "0.18.9", refused={"megatron-core": "its saves are torn"})


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(versions, "ROWS", (HELD, BROKEN))
    monkeypatch.setattr(versions, "CHECKOUTS", (versions.Checkout("main", HELD, held=True, commit="abc123"),))


@pytest.mark.usefixtures("rows")
def test_a_version_that_was_run_needs_no_word_nor_do_its_patch_levels():
    assert versions.check("megatron-core", "0.16.1", "2.13.0+cpu") == ""
    assert versions.check("megatron-core", "0.16.9", "2.13.1") == ""


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("python", "torch", "core"),
    [(PYTHON, "2.13.0", "0.20.0rc1"), (PYTHON, "2.11.0", "0.16.1"), ("3.14.1", "2.13.0", "0.16.1")],
)
def test_what_was_not_run_together_is_named_with_what_was(monkeypatch, python, torch, core):
    monkeypatch.setattr(platform, "python_version", lambda: python)
    said = versions.check("megatron-core", core, torch)
    assert f"Python {python} with torch {torch} and megatron-core {core} (run: " in said
    run = f"Python {PYTHON} with torch 2.13.0 and"
    assert f"(run: {run} megatron-core 0.16.1; {run} a checkout of main at abc123)" in said


@pytest.mark.usefixtures("rows")
def test_a_combination_that_failed_is_refused_for_the_framework_it_failed_with_only():
    with pytest.raises(Unsupported, match="its saves are torn.*torch 2.13.0 and megatron-core 0.16.1"):
        versions.check("megatron-core", "0.15.3", "2.11.0")
    said = versions.check("deepspeed", "0.18.9", "2.11.0")
    assert "deepspeed" in said and "checkout" not in said


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "scripts"))
    import versions as script

    return script


@pytest.fixture(scope="module")
def recorded(script):
    paths = sorted((ROOT / "scripts" / "results").glob("*-versions.jsonl"))
    return {key: line for path in paths for key, line in script.known_lines(path).items()}


def test_what_held_is_what_was_recorded(script, recorded):
    rows = {row.name: row.held for row in versions.ROWS}
    checkouts = {f"pretrain_gpt.py-{one.tag}": one.held for one in versions.CHECKOUTS}
    found = {name: script.outcome(subject, recorded)["held"] for name, subject in script.SUBJECTS.items()}
    assert found == rows | checkouts
    assert not [row for row in versions.ROWS if row.held and row.refused]


def test_the_page_of_results_is_that_of_the_record(script):
    for path in (ROOT / "scripts" / "results").glob("*-versions.jsonl"):
        assert path.with_suffix(".md").read_text() == script.page(list(script.read_json_lines(path)))


def test_the_table_says_which_checks_failed_and_not_why(script):
    subject = script.SUBJECTS[versions.NEWEST.name]
    known = {f"{subject.name}:{name}": {"check": name, "result": "held"} for name in script.names(subject)}
    for name in ("guards", "demo"):
        known[f"{subject.name}:{name}"] = {"check": name, "result": "failed", "detail": "FAILED: a; b: c | d"}
    assert "| guards failed; demo failed |" in script.table([subject], known)


def test_the_readme_links_the_table_of_what_was_recorded_and_names_a_row_that_held(script, recorded):
    readme = (ROOT / "README.md").read_text()
    page = re.findall(r"\]\((scripts/results/\S+-versions\.md)\)", readme)
    assert page and script.table(script.SUBJECTS.values(), recorded) in (ROOT / page[0]).read_text()
    named = re.findall(r"Python (\S+), torch (\S+), megatron-core (\S+), DeepSpeed ([\d.]+\d)", readme)
    held = {(row.python, row.torch, row.megatron_core, row.deepspeed) for row in versions.ROWS if row.held}
    assert named and set(named) <= held


def test_a_branch_of_megatron_lm_is_run_again_when_it_has_moved_and_its_commit_is_recorded(
    script, tmp_path, monkeypatch
):
    git = ["git", "-C", str(tmp_path / "clone"), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "init", "-q", "-b", "main", tmp_path / "clone"], check=True)
    monkeypatch.setattr(script, "environment", lambda *_: Path(sys.executable))
    monkeypatch.setattr(script, "run_check", lambda *_: ("held", "overlap: held"))
    args = argparse.Namespace(out=tmp_path / "out", envs=tmp_path, megatron_lm=tmp_path / "clone", again=False, seed=1)
    subject, results = script.SUBJECTS["pretrain_gpt.py-main"], args.out / "versions.jsonl"
    commits = []
    for word in ("first", "second"):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", word], check=True)
        commits.append(script.commit_of("main", args.megatron_lm))
        for _ in range(2):
            script.run(subject, args, script.known_lines(results))
    each = [commit for commit in commits for _ in script.names(subject)]
    assert [line["checkout"] for line in script.read_json_lines(results)] == each


def test_what_is_said_of_a_checkout_is_said_of_the_commit_that_was_recorded(recorded):
    for one in versions.CHECKOUTS:
        line = recorded.get(f"pretrain_gpt.py-{one.tag}:pretrain_gpt", {})
        assert not one.commit or line.get("checkout", one.commit) == one.commit


@pytest.mark.parametrize(("result", "held"), [("", False), ("held", True), ("failed", False)])
def test_a_row_has_held_when_every_check_of_it_has(script, result, held):
    subject = script.SUBJECTS[versions.NEWEST.name]
    known = {f"{subject.name}:{name}": {"check": name, "result": "held"} for name in script.names(subject)}
    known[f"{subject.name}:faults"] = {"check": "faults", "result": result, "detail": "a cell did not hold"}
    if not result:
        del known[f"{subject.name}:faults"]
    found = script.outcome(subject, known)
    assert found["held"] is held and (f"faults {result or 'not run'}" in found["detail"]) is not held


def test_every_check_of_a_row_is_a_command(script, tmp_path):
    for row in versions.ROWS:
        subject = script.SUBJECTS[row.name]
        commands = script.checks(subject, argparse.Namespace(seed=1), tmp_path, "")
        assert tuple(commands) == script.names(subject)
        assert all((ROOT / words[0]).is_file() or words[:2] == ("-m", "pytest") for words in commands.values())


SKIPPED = "SKIPPED [7] tests/unit/test_hook_points.py:50: MEGATRON_LM_GIT is not set"


def test_what_a_check_skipped_is_in_its_line_with_the_reason(script):
    assert script.judge(0, ["...ss", SKIPPED, "35 passed, 7 skipped in 28.18s"]) == (
        "held",
        f"35 passed, 7 skipped in 28.18s; {SKIPPED}",
    )
    result, detail = script.judge(1, [SKIPPED, "FAILED tests/unit/test_x.py::test_y", "1 failed, 7 skipped in 3.1s"])
    assert result == "failed" and detail.endswith(SKIPPED)


@pytest.mark.parametrize(
    "last", ["7 skipped in 0.12s", "7 skipped, 2 deselected in 0.12s", "=== 7 skipped in 1.0s ==="]
)
def test_a_check_that_skipped_everything_has_not_held(script, last):
    assert script.judge(0, [SKIPPED, last])[0] == "skipped"


def test_a_row_that_held_says_what_was_skipped(script):
    subject = script.SUBJECTS[versions.NEWEST.name]
    known = {f"{subject.name}:{name}": {"check": name, "result": "held"} for name in script.names(subject)}
    assert script.outcome(subject, known)["detail"] == ", ".join(script.names(subject))
    known[f"{subject.name}:guards"]["detail"] = f"1 passed, 7 skipped in 1s; {SKIPPED}"
    found = script.outcome(subject, known)
    assert found["held"] and f"guards ({SKIPPED})" in found["detail"]


def test_options_that_did_not_run_have_not_held(script, tmp_path, monkeypatch, capsys):
    import megatron_lm_options as options

    (tmp_path / "pretrain_gpt.py").touch()
    for name in ("make_corpus.ensure", "jobs.preload"):
        monkeypatch.setattr(f"megatron_lm_options.{name}", lambda *_: None)
    results = {"base": "held", "tp2-pp2": "not here"}
    monkeypatch.setattr(options, "tried", lambda name, *_: {"option": name, "result": results[name]})
    words = ["x", "--checkout", str(tmp_path), "--out", str(tmp_path), "--again", "--only", *results]
    monkeypatch.setattr("sys.argv", words)
    for _ in range(2):  # what is known counts like what was run now
        code = options.main()
        lines = capsys.readouterr().out.splitlines()
        assert script.judge(code, lines)[0] == "not here"
        assert lines[-1] == "1 held, 1 not here"
    results["tp2-pp2"] = "held"
    code = options.main()
    assert script.judge(code, capsys.readouterr().out.splitlines()) == ("held", "2 held")


@pytest.mark.parametrize(
    ("lines", "result"),
    [
        (["base: not here (6 s) no driver", "1 not here"], "not here"),
        (["base: refused (6 s) fp8", "1 refused"], "refused"),
        (["base: not here (6 s) no driver", "save: failed (9 s) nan", "1 not here, 1 failed"], "failed"),
    ],
)
def test_a_check_of_options_says_what_became_of_them(script, lines, result):
    assert script.judge(1, lines)[0] == result


def test_ci_counts_nothing_that_held_in_an_earlier_run(tmp_path):
    for name in (".ci", "scripts", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    python = 'while [ "$1" != --out ]; do shift; done; mkdir -p "$2"; test ! -e "$2/known"; touch "$2/known"'
    for name, script in (
        ("scripts/test.sh", "true"),
        ("scripts/test_cuda.sh", "true"),
        (".venv/bin/python", f"set -e; {python}"),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    codes = [subprocess.run([tmp_path / ".ci" / "run"], check=False).returncode for _ in range(2)]
    assert codes == [0, 0], "a second run of CI found what the first one had recorded"


def test_the_requirements_with_cuda_are_those_of_the_newest_row(script):
    listed = (ROOT / "scripts" / "requirements-cuda.txt").read_text().splitlines()
    pins = [line for line in listed if line and not line.startswith("#")]
    assert pins == [f"{name}=={version}" for name, version in versions.NEWEST.packages.items()]
    assert set(pins) < set(script.requirements(versions.NEWEST))


@pytest.mark.parametrize("script", ["demo.py", "fault_matrix.py", "gpu/evidence.py", "gpu/job.py", "versions.py"])
def test_scripts_start_in_an_environment_without_the_plugin(tmp_path, script):
    """scripts/versions.py and test_cuda.sh make such environments, and start these scripts by path."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "scripts" / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout[:6]) == (0, "usage:"), done.stderr
