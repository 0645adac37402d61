"""budget.py against who keeps everything and counts by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deadpool_plugin.core.budget import Budget


@given(most=st.integers(0, 4), window_s=st.integers(1, 20), gaps=st.lists(st.tuples(st.booleans(), st.integers(0, 12))))
def test_a_budget_is_so_many_within_any_window(most, window_s, gaps):
    budget, now = Budget(most, window_s), 0
    granted: dict[bool, list[int]] = {True: [], False: []}
    for key, gap in gaps:
        now += gap
        recent = [when for when in granted[key] if now - when < window_s]
        assert budget.spend(key, now) is (len(recent) < most)
        if len(recent) < most:
            granted[key].append(now)


def test_what_is_exceeded_is_said():
    assert str(Budget(3, 3600.0)) == "3 times within 3600 s"
