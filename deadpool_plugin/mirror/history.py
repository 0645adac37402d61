"""Call records of past steps, per rank, in bounded memory.

Rules of this file: a rank's history is contiguous; writing step s forgets everything from s on (a swap rolled back
and the steps are done again); when the bound is reached the oldest go, but never one that a swap may go back to. Pure
data, no locking.
"""

from __future__ import annotations

from collections import deque

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
        self._records: deque[bytes] = deque()
        self._bytes = 0
        self.last: Step = NO_STEP

    @property
    def held_bytes(self) -> int:
        return self._bytes

    @property
    def first(self) -> Step:
        return self.last - len(self._records) + 1 if self._records else NO_STEP

    def append(self, step: Step, records: bytes) -> None:
        """Sets the records of `step`, the newest from now on. A gap before it empties the history first."""
        self.truncate(step - 1)
        if self.last != step - 1:
            self._records.clear()
            self._bytes = 0
        self._records.append(records)
        self._bytes += len(records)
        self.last = step
        while self._bytes > self._limit_bytes and len(self._records) > KEPT_MIN:
            self._bytes -= len(self._records.popleft())

    def truncate(self, last: Step) -> None:
        """Forgets every step after `last`."""
        while self._records and self.last > last:
            self._bytes -= len(self._records.pop())
            self.last -= 1
        if not self._records:
            self.last = NO_STEP

    def get(self, first: Step, last: Step) -> list[bytes]:
        """The records of first..last, both included.

        Raises: HistoryPruned if any of them is not held.
        """
        if first > last:
            return []
        if not self._records or first < self.first or last > self.last:
            held = f"{self.first} to {self.last}" if self._records else "none"
            raise HistoryPruned(
                f"call records of steps {first} to {last} are wanted, held are {held} ({self._bytes} bytes)",
                remedy="raise history_limit_mib",
            )
        start = first - self.first
        return [self._records[start + offset] for offset in range(last - first + 1)]
