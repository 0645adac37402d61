"""Every (state, event) pair of the controller is met by a long campaign, or it is said why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.campaign import campaign
from simulator.coverage import named
from simulator.gaps import CANNOT, RARE, all_pairs, first_that_fits
from simulator.schedule import Ranges

RESULTS = Path(__file__).resolve().parents[2] / "scripts" / "results"


@pytest.fixture(scope="module")
def met():
    """Count how often each pair was met, in all recorded campaigns of the whole agent together."""
    counts: dict[str, int] = {}
    for path in RESULTS.glob("*-simulation-agent*.json"):
        for pair, count in json.loads(path.read_text())["summary"]["pairs"].items():
            counts[pair] = counts.get(pair, 0) + count
    return counts


def test_every_pair_was_met_or_it_is_said_why_not(met):
    missing = [pair for pair in all_pairs() if named(*pair) not in met]
    unexplained = [named(*pair) for pair in missing if not first_that_fits((*CANNOT, *RARE), *pair)]
    assert met and not unexplained


def test_nothing_happens_that_cannot(met):
    new = campaign(range(900, 930), Ranges(nodes=(5, 8))).pairs
    impossible = [named(*pair) for pair in all_pairs() if first_that_fits(CANNOT, *pair)]
    assert not [pair for pair in impossible if pair in met or pair in new]


def test_what_cannot_be_leaves_most_of_what_was_met(met):
    """A rule that fits everything explains nothing."""
    can = [pair for pair in all_pairs() if not first_that_fits(CANNOT, *pair)]
    assert sum(named(*pair) in met for pair in can) > len(can) / 2
