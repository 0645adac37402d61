"""scripts/strangers.py: every attempt is recorded, and the page of results is that of the record."""

import argparse
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "scripts" / "results").glob("*-strangers.jsonl"))


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "scripts"))
    import strangers as script

    return script


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_the_page_is_that_of_the_record(script, record):
    assert record.with_suffix(".md").read_text() == script.page(list(script.read_json_lines(record)))


def test_an_attempt_the_runner_could_not_make_is_a_line_with_its_seed_and_has_not_held(script, tmp_path, monkeypatch):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "nlp_example.py").touch()
    args = {project.replace("-", "_"): None for project in script.PROJECTS} | {"accelerate": tmp_path}
    args |= {"out": tmp_path / "out", "only": ["nlp-example"], "seed": 7, "again": False, "table": False}
    monkeypatch.setattr(script, "parse_args", lambda: argparse.Namespace(**args))
    monkeypatch.setattr(script, "missing", lambda row, args: "")
    monkeypatch.setattr(script, "played", lambda *_: os._exit(1))  # as a row's process that is killed
    assert [script.main() for _ in range(2)] == [1, 1]
    lines = list(script.read_json_lines(tmp_path / "out" / "strangers.jsonl"))
    assert [line["seed"] for line in lines] == ["7 nlp-example 0", "7 nlp-example 1"]
    assert {line["result"] for line in lines} == {"not run"}
    assert all(line["faults"] and "commit" in line for line in lines)
    assert "| yes | 0 of 0 | not run; the row's process ended" in script.page(lines)


def test_every_script_that_must_hold_has_held(script):
    lines = [line for record in RECORDS for line in script.read_json_lines(record)]
    newest = {line["row"]: line["result"] for line in lines}
    assert {name for name, row in script.ROWS.items() if row.must_hold and newest.get(name) != "held"} == set()
