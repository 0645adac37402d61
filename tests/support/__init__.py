"""Helpers shared by test suites."""

from collections.abc import Sequence
from typing import Any

import pytest


def slow_but(cases: Sequence[Any], *quick: int) -> list[Any]:
    """Return `cases` as parameters of a test, slow but for those at the places `quick`."""
    every = [case if isinstance(case, (tuple, list)) else (case,) for case in cases]
    marks = [() if place in quick else (pytest.mark.slow,) for place in range(len(every))]
    return [pytest.param(*case, marks=marked) for case, marked in zip(every, marks, strict=True)]
