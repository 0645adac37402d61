"""The history of a rank's calls as a node holds it: the records of its steps.

Rules of this file: a history is contiguous. Writing step s forgets everything from s on (a swap rolled back and the
steps are done again). When the bound is reached the oldest go, but never one that a swap may go back to. Jobs of months
have millions of steps, so a range is one slice.
"""

from __future__ import annotations

import threading

from ..core.types import NO_STEP, Step
from ..errors import DeadpoolError

# The newest steps stay whatever they take: a swap may go back to those in the two slots, and the gate lets this rank be
# one step ahead of what is committed.
KEPT_MIN = 3


class NotHeld(DeadpoolError):
    """This node does not hold what it was asked for."""


class HistoryPruned(DeadpoolError):
    """Records that were asked for are not held (any more)."""


class CallHistory:
    """The records of one rank: `first`..`last`, both NO_STEP if there are none. Thread: any."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._lock = limit_bytes, threading.RLock()
        self._records: list[bytes] = []
        self._dropped = 0  # of them, at the beginning: a deque would give a range in quadratic time
        self.held_bytes = 0
        self.last: Step = NO_STEP

    @property
    def first(self) -> Step:
        with self._lock:
            return self.last - self._held + 1 if self._held else NO_STEP

    @property
    def _held(self) -> int:
        return len(self._records) - self._dropped

    def append(self, step: Step, *records: bytes) -> None:
        """Set the records of steps that end at `step`, the newest from now on; a gap forgets all before it."""
        with self._lock:
            begin = step - len(records) + 1
            self.truncate(begin - 1)
            if self.last != begin - 1:
                self.truncate(NO_STEP)
            for self.last, record in enumerate(records, begin):
                self._records.append(record)
                self.held_bytes += len(record)
            while self.held_bytes > self._limit_bytes and self._held > KEPT_MIN:
                self.held_bytes -= len(self._records[self._dropped])
                self._records[self._dropped] = b""
                self._dropped += 1
            if self._dropped > self._held:
                del self._records[: self._dropped]
                self._dropped = 0

    def truncate(self, last: Step) -> None:
        with self._lock:
            while self._held and self.last > last:
                self.held_bytes -= len(self._records.pop())
                self.last -= 1
            if not self._held:
                self._records.clear()
                self._dropped, self.last = 0, NO_STEP

    def get(self, first: Step, last: Step) -> list[bytes]:
        """Return the records of first..last, both included. Raises: HistoryPruned if any of them is not held."""
        if first > last:
            return []
        with self._lock:
            if not self._held or first < self.first or last > self.last:
                held = f"{self.first} to {self.last}" if self._held else "none"
                raise HistoryPruned(
                    f"call records of steps {first} to {last} are wanted, held are {held} ({self.held_bytes} bytes)",
                    remedy="raise history_limit_mib",
                )
            start = self._dropped + first - self.first
            return self._records[start : start + last - first + 1]

    def upto(self, last: Step) -> CallHistory:
        """Copy all but the steps after `last`. Raises: HistoryPruned if that one is not held."""
        copy = CallHistory(self._limit_bytes)
        with self._lock:
            self.get(last, last)
            copy._records, copy.held_bytes, copy.last = self._records[self._dropped :], self.held_bytes, self.last
        copy.truncate(last)
        return copy
