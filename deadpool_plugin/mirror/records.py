"""A rank's calls as a node holds them: the recording of its start-up, and the records of its steps.

Rules of this file: a rank's history is contiguous. Writing step s forgets everything from s on (a swap rolled back and
the steps are done again). When the bound is reached the oldest go, but never one that a swap may go back to. Jobs of
months have millions of steps, so a range is one slice.
"""

from __future__ import annotations

import threading

from ..core.types import NO_STEP, Rank, Step
from ..errors import DeadpoolError

KEPT_MIN = 3
"""Newest steps that stay whatever they take. Two slots hold steps a swap may go back to, and the gate lets this rank be
one step ahead of what is committed."""


class NotHeld(DeadpoolError):
    """This node does not hold what it was asked for."""


class HistoryPruned(DeadpoolError):
    """Records that were asked for are not held (any more)."""


class CallHistory:
    """The records of one rank: `first`..`last`, both NO_STEP if there are none. Thread: no locking."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._records: list[bytes] = []
        self._dropped = 0  # of them, at the beginning: a deque would give a range in quadratic time
        self.held_bytes = 0
        self.last: Step = NO_STEP

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
            self.truncate(NO_STEP)
        self._records.append(records)
        self.held_bytes += len(records)
        self.last = step
        while self.held_bytes > self._limit_bytes and self._held > KEPT_MIN:
            self.held_bytes -= len(self._records[self._dropped])
            self._records[self._dropped] = b""
            self._dropped += 1
        if self._dropped > self._held:
            del self._records[: self._dropped]
            self._dropped = 0

    def truncate(self, last: Step) -> None:
        """Forgets every step after `last`."""
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
        self.get(last, last)
        copy = CallHistory(self._limit_bytes)
        copy._records, copy.held_bytes, copy.last = self._records[self._dropped :], self.held_bytes, self.last
        copy.truncate(last)
        return copy


_NOTHING = CallHistory(0)


class CallRecords:
    """Recordings and histories by rank. Thread: any.

    Args: history_limit_bytes: per rank.
    """

    def __init__(self, history_limit_bytes: int = 256 << 20) -> None:
        self._limit_bytes, self._lock = history_limit_bytes, threading.Lock()
        self._recordings: dict[Rank, bytes] = {}
        self._histories: dict[Rank, CallHistory] = {}

    @property
    def ranks(self) -> set[Rank]:
        with self._lock:
            return {*self._recordings, *self._histories}

    def put_recording(self, rank: Rank, recording: bytes) -> None:
        self._recordings[rank] = recording

    def get_recording(self, rank: Rank) -> bytes:
        """Raises: NotHeld."""
        with self._lock:
            if rank not in self._recordings:
                raise NotHeld(f"no recording of rank {rank} is held here; held: {sorted(self._recordings)}")
            return self._recordings[rank]

    def has_recording(self, rank: Rank) -> bool:
        return rank in self._recordings

    def put_history(self, rank: Rank, history: CallHistory) -> None:
        """Replaces the history of `rank`; `history` is this node's from now on."""
        with self._lock:
            self._histories[rank] = history

    def append(self, rank: Rank, step: Step, *records: bytes) -> None:
        """Sets the call records of steps that end at `step`; those of later steps are forgotten."""
        with self._lock:
            history = self._histories.setdefault(rank, CallHistory(self._limit_bytes))
            for past, record in enumerate(records, step - len(records) + 1):
                history.append(past, record)

    def get(self, rank: Rank, first: Step, last: Step) -> list[bytes]:
        """Return the records of first..last. Raises: HistoryPruned."""
        with self._lock:
            return self._histories.get(rank, _NOTHING).get(first, last)

    def history_range(self, rank: Rank) -> tuple[Step, Step]:
        """Return the first and last step whose records are held (NO_STEP twice if none)."""
        with self._lock:
            history = self._histories.get(rank, _NOTHING)
            return history.first, history.last

    def history_bytes(self, rank: Rank) -> int:
        return self._histories.get(rank, _NOTHING).held_bytes

    def truncate(self, rank: Rank, step: Step) -> None:
        """Forgets the records of later steps."""
        with self._lock:
            self._histories.get(rank, _NOTHING).truncate(step)

    def forget(self, rank: Rank) -> None:
        with self._lock:
            self._recordings.pop(rank, None)
            self._histories.pop(rank, None)
