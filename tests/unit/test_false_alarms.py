"""The campaign of false alarms: what is drawn, and that it is drawn from the seed alone."""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from false_alarms import NODES, WEIGHTS, drawn


def test_a_trial_is_a_function_of_its_seed():
    assert [drawn(seed, "") for seed in range(50)] == [drawn(seed, "") for seed in range(50)]


def test_every_kind_is_drawn_with_a_host_that_there_is_and_a_time_that_ends():
    trials = [drawn(seed, "") for seed in range(400)]
    assert Counter(trial.kind for trial in trials).keys() == WEIGHTS.keys()
    assert {trial.strength for trial in trials if trial.kind == "load"} == {1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0}
    for trial in trials:
        assert -1 <= trial.host < NODES and 1.0 <= trial.seconds <= 12.0
        assert trial.host >= 0 or trial.kind in ("loss", "delay")
        assert trial.kind != "stop" or trial.seconds <= 8.0, "an agent that stands still longer is lost rightly"


def test_one_kind_alone_can_be_asked_for():
    assert {drawn(seed, "memory").kind for seed in range(20)} == {"memory"}
