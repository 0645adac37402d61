"""Random jobs within a budget: those that failed once, and a new range of seeds each run, which is printed.

`SEEDS=A:B pytest tests/simulator/test_seeds.py` runs that range instead of a new one.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
import yaml

from simulator.campaign import campaign
from simulator.run import run
from simulator.schedule import Ranges, fixed_fields, scenario

REGRESSIONS = yaml.safe_load((Path(__file__).parent / "regressions.yaml").read_text())
NEW_SEEDS = 40


@pytest.mark.parametrize("one", REGRESSIONS, ids=[one["seed"] for one in REGRESSIONS])
def test_a_job_that_failed_once_holds(one):
    seed = one["seed"]
    finding = run(scenario(seed, fixed=fixed_fields(one["scenario"]))).finding
    assert finding is None, finding


def test_new_seeds_hold(capsys):
    first, last = map(int, os.environ.get("SEEDS", "0:0").split(":"))
    if last <= first:
        first = secrets.randbelow(10**9)
        last = first + NEW_SEEDS
    with capsys.disabled():
        print(f"\n[sim] python scripts/simulate.py --seeds {first}:{last} --nodes 5:12")
    summary = campaign(range(first, last), Ranges(nodes=(5, 12)))
    assert not summary.findings, [(one.seed, one.finding) for one in summary.findings]
    assert summary.seeds == last - first and summary.swaps > 0
