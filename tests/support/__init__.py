"""Helpers shared by test suites."""

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def slow_but(cases: Sequence[Any], *quick: int) -> list[Any]:
    """Return `cases` as parameters of a test, slow but for those at the places `quick`."""
    every = [case if isinstance(case, (tuple, list)) else (case,) for case in cases]
    marks = [() if place in quick else (pytest.mark.slow,) for place in range(len(every))]
    return [pytest.param(*case, marks=marked) for case, marked in zip(every, marks, strict=True)]


def expect(kind: type[T], found: object) -> T:
    """Assert that `found` is a `kind`, and return it as one."""
    assert isinstance(found, kind), f"expected {kind.__name__}, found {found!r}"
    return found


def present(found: T | None) -> T:
    """Assert that `found` is not None, and return it."""
    assert found is not None
    return found
