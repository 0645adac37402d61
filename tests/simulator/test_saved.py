"""Files that `simulate.py` leaves behind of a seed that breaks an invariant."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from support import present

from simulator.campaign import Summary
from simulator.run import Finding, run
from simulator.schedule import read_faults, scenario

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import simulate


@pytest.fixture
def broken(monkeypatch, tmp_path):
    """Every campaign breaks an invariant in seed 7."""
    found = run(scenario(0, fixed={"faults": (), "active": 1, "spares": 0, "steps": 2}))
    summary = Summary()
    summary.add(msgspec.structs.replace(found, seed=7, finding=Finding("LIVENESS", "it hangs", 1.0)))
    monkeypatch.setattr(simulate, "campaign", lambda *arguments: summary)
    monkeypatch.setattr(simulate, "shrunk", lambda failing: failing)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def saved(printed: str) -> Path:
    return Path(present(re.search(r"--faults (\S+) --show", printed)).group(1))


@pytest.mark.parametrize("words", [["--save", "not/there/yet"], []])
def test_a_shrunk_scenario_is_where_it_is_said_to_be(broken, tmp_path, capsys, words):
    assert simulate.main(["--seeds", "7:8", *words]) == 1
    path = saved(capsys.readouterr().out)
    assert path.name == "seed-7.yaml" and read_faults(path)
    assert path.is_relative_to("not/there/yet" if words else tmp_path / "temporary")
    assert words or not list((tmp_path / "here").iterdir())


def test_who_looks_for_one_seed_that_breaks_is_told_of_it_at_once(broken, capsys, monkeypatch):
    monkeypatch.setattr(simulate, "shrunk", None)
    assert simulate.main(["--seeds", "7:8", "--until-broken"]) == 1
    assert "seed 7: LIVENESS: it hangs" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_said_before_the_simulation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(simulate, "campaign", None)
    (tmp_path / "file").touch()
    assert simulate.main(["--save", str(tmp_path / "file")]) == 78
    assert "cannot be made" in capsys.readouterr().err
