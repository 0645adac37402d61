"""Call records of past steps, per rank, in bounded memory.

Rules of this file: a rank's history is contiguous; writing step s forgets everything from s on (a swap rolled back
and the steps are done again); when the bound is reached the oldest go, but never one that a swap may go back to. Pure
data, no locking; jobs of months have millions of steps, so a range is one slice.
"""

from __future__ import annotations

from ..core.types import NO_STEP, Step
from ..errors import DeadpoolError

KEPT_MIN = 3
"""Newest steps that stay whatever they take. Two slots hold steps a swap may go back to, and the gate lets this rank be
one step ahead of what is committed."""


class HistoryPruned(DeadpoolError):
    """Records that somebody asked for are not held (any more)."""


class History:
    """The records of one rank: `first`..`last`, both NO_STEP if there are none."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._records: list[bytes] = []
        self._dropped = 0  # of them, at the beginning: a deque would give a range in quadratic time
        self._bytes = 0
        self.last: Step = NO_STEP

    @property
    def held_bytes(self) -> int:
        return self._bytes

    @property
    def first(self) -> Step:
        return self.last - self._held + 1 if self._held else NO_STEP

    @property
    def _held(self) -> int:
        return len(self._records) - self._dropped

    def append(self, step: Step, records: bytes) -> None:
        """Sets the records of `step`, the newest from now on. A gap before it empties the history first."""
        self.truncate(step - 1)
        if self.last != step - 1:
            self._forget_all()
        self._records.append(records)
        self._bytes += len(records)
        self.last = step
        while self._bytes > self._limit_bytes and self._held > KEPT_MIN:
            self._bytes -= len(self._records[self._dropped])
            self._records[self._dropped] = b""
            self._dropped += 1
        if self._dropped > self._held:
            del self._records[: self._dropped]
            self._dropped = 0

    def _forget_all(self) -> None:
        self._records.clear()
        self._dropped = self._bytes = 0

    def truncate(self, last: Step) -> None:
        """Forgets every step after `last`."""
        while self._held and self.last > last:
            self._bytes -= len(self._records.pop())
            self.last -= 1
        if not self._held:
            self._forget_all()
            self.last = NO_STEP

    def get(self, first: Step, last: Step) -> list[bytes]:
        """The records of first..last, both included.

        Raises: HistoryPruned if any of them is not held.
        """
        if first > last:
            return []
        if not self._held or first < self.first or last > self.last:
            held = f"{self.first} to {self.last}" if self._held else "none"
            raise HistoryPruned(
                f"call records of steps {first} to {last} are wanted, held are {held} ({self._bytes} bytes)",
                remedy="raise history_limit_mib",
            )
        start = self._dropped + first - self.first
        return self._records[start : start + last - first + 1]

    def upto(self, last: Step) -> History:
        """A copy without the steps after `last`. Raises: HistoryPruned if that one is not held."""
        self.get(last, last)
        copy = History(self._limit_bytes)
        copy._records, copy._bytes, copy.last = self._records[self._dropped :], self._bytes, self.last
        copy.truncate(last)
        return copy
