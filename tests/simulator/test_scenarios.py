"""Swaps as readable transcripts: each scenario's is compared with the one beside it, which is reviewed as a diff.

After a wanted change of the protocol: `REGENERATE=1 pytest tests/simulator/test_scenarios.py`, then read `git diff`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from simulator.run import Outcome, run
from simulator.schedule import read_faults, scenario
from simulator.transcript import Transcript

FOLDER = Path(__file__).parent / "scenarios"
VERDICTS = {
    "broken-pair": ("finished", 1),
    "deaf-host": ("finished", 1),
    "first-node": ("finished", 1),
    "host-joins": ("finished", 1),
    "isolated-coordinator": ("finished", 1),
    "mispaired-always": ("stopped with 86", 2),
    "mispaired-leader-lost": ("stopped with 86", 2),
    "mispaired-once": ("finished", 2),
    "node-and-buddy": ("stopped with 86", 0),
    "ordinary-swap": ("finished", 1),
    "reset-connections": ("finished", 2),
    "rift": ("finished", 1),
    "spare-command": ("finished", 1),
    "stale-node-wakes": ("finished", 1),
    "swap-during-swap": ("finished", 2),
}
"""Verdict and number of swaps of each scenario."""


def played(name: str) -> tuple[str, Outcome]:
    transcript = Transcript()
    outcome = run(scenario(2, fixed=read_faults(FOLDER / f"{name}.yaml")), transcript)
    return "\n".join(transcript.lines) + "\n", outcome


def test_every_scenario_is_told_of():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == VERDICTS.keys()


@pytest.mark.parametrize("name", sorted(VERDICTS))
def test_the_scenario_goes_as_written(name):
    text, outcome = played(name)
    written = FOLDER / f"{name}.txt"
    if os.environ.get("REGENERATE"):
        written.write_text(text)
    assert outcome.finding is None and sum(outcome.faults.values()) >= 1
    assert (outcome.verdict, outcome.swaps) == VERDICTS[name]
    assert text == written.read_text(), "after a wanted change: REGENERATE=1, then review the diff"
