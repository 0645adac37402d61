"""Results of a test in the zygote: how it failed, and its figures."""

from __future__ import annotations

from typing import Any

import pytest
from support.zygote import in_zygote


@in_zygote
def fills(figures: dict[str, Any], fails: bool) -> None:
    figures["answer"] = 42
    assert not fails, "as it was told"


@pytest.mark.parametrize("fails", [False, True])
def test_figures_come_back_whether_it_fails_or_not(fails: bool) -> None:
    figures: dict[str, Any] = {}
    if fails:
        with pytest.raises(AssertionError, match="as it was told"):
            fills(figures, fails)
    else:
        fills(figures, fails)
    assert figures == {"answer": 42}
