"""The error that ends a run: an invariant does not hold.

Rules of this file: may import nothing.
"""

from __future__ import annotations


class Violation(Exception):
    """An invariant does not hold; `invariant` is its name."""

    def __init__(self, invariant: str, sentence: str) -> None:
        self.invariant, self.sentence = invariant, sentence
        super().__init__(f"{invariant}: {sentence}")
