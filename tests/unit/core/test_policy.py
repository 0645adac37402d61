"""policy.py: budgets against who counts by hand, and the table of time-outs in core/README.md, in its order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from deadpool_plugin.agent.world import timing_of
from deadpool_plugin.config import Config
from deadpool_plugin.core.policy import Budget
from deadpool_plugin.core.swaps import CALMS, RIVAL_INTERVALS

README = Path(__file__).resolve().parents[3] / "deadpool_plugin" / "core" / "README.md"
ROW = re.compile(r"^\| (.+?) \| ([0-9.]*) ?([PS])(?:/(\d+))? \| .+ \|$", re.MULTILINE)


def test_the_readme_shows_the_time_outs_in_their_order():
    timing = timing_of(config := Config(patience_s=1.0))
    expected = {
        "tick": config.tick_s,
        "heartbeat interval": timing.heartbeat_interval_s,
        "own pause": timing.own_pause_s,
        "wait for a rival": RIVAL_INTERVALS * timing.heartbeat_interval_s,
        "calm": timing.slow_after_s / CALMS,
        "`lease_s`": timing.lease_s,
        "`silent_after_s`": timing.silent_after_s,
        "`slow_after_s`": timing.slow_after_s,
        "`phase_timeout_s`": timing.phase_timeout_s,
        "`decision_timeout_s`": timing.decision_timeout_s,
    }
    shown = {
        name: float(times or 1) * (timing.slow_after_s if unit == "S" else timing.silent_after_s) / float(parts or 1)
        for name, times, unit, parts in ROW.findall(README.read_text())
    }
    assert shown == pytest.approx(expected), "the start time-out does not follow from the patience"
    assert list(shown.values()) == sorted(shown.values()) and list(shown) == list(expected)


@given(
    most=st.integers(0, 4),
    window_s=st.integers(1, 20),
    storm_s=st.integers(0, 4),
    gaps=st.lists(st.tuples(st.booleans(), st.integers(0, 12))),
)
def test_a_budget_is_so_many_within_any_window(most, window_s, storm_s, gaps):
    budget, now = Budget(most, window_s, storm_s), 0
    granted: dict[bool, list[int]] = {True: [], False: []}
    for key, gap in gaps:
        now += gap
        recent = [when for when in granted[key] if now - when < window_s]
        same_storm = bool(recent) and now - recent[-1] < storm_s
        assert budget.spend(key, now) is (same_storm or len(recent) < most)
        if not same_storm and len(recent) < most:
            granted[key].append(now)


def test_what_is_exceeded_is_said():
    assert str(Budget(3, 3600.0)) == "3 times within 3600 s"
