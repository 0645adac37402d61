"""The history of a rank's calls as a node holds it: the records of its steps.

Rules of this file: a history is contiguous. Writing step s forgets everything from s on (a swap rolled back and the
steps are done again). When the bound is reached the oldest go, but never one that a swap may go back to. Jobs of months
have millions of steps, so all but the newest records lie in *rows*: many steps, compressed. A row travels between nodes
and to processes as it is; only who needs one of its records opens it.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec
import zstandard

from ..core.types import NO_STEP, Step
from ..errors import DeadpoolError

KEPT_MIN = 3  # the newest steps of which there are records one by one
ROW_STEPS = 1024  # a row ends before a multiple of this, so that the rows of two nodes are the same,
ROW_BYTES = 1 << 19  # or where it has so many bytes: to compress them takes 1 to 4 ms, which the event loop can spare
_LEVEL = 3
_MARK = b"\xc1"  # no record begins with it: it is no msgpack
_ROW = struct.Struct("!cI")  # the head of a row: the mark, and the number of steps
_unpacked = msgspec.msgpack.Decoder(list[bytes])


class NotHeld(DeadpoolError):
    """This node does not hold what it was asked for."""


class HistoryPruned(DeadpoolError):
    """Records that were asked for are not held (any more)."""


def pack(records: Sequence[bytes]) -> bytes:
    """Make the row of the records of successive steps."""
    return _ROW.pack(_MARK, len(records)) + zstandard.compress(msgspec.msgpack.encode(records), _LEVEL)


def is_row(part: bytes) -> bool:
    """Return whether `part` is a row, not the record of one step."""
    return part[:1] == _MARK


def steps_in(part: bytes) -> int:
    """Count the steps of `part`, a row or the record of one step."""
    return int(_ROW.unpack_from(part)[1]) if is_row(part) else 1


def unpack(part: bytes) -> list[bytes]:
    """Return the records in `part`, a row or the record of one step."""
    return _unpacked.decode(zstandard.decompress(part[_ROW.size :])) if is_row(part) else [part]


def row_end(step: Step) -> Step:
    """Return the step with which a row ends at the latest that has `step`."""
    return step // ROW_STEPS * ROW_STEPS + ROW_STEPS - 1


class _Row(NamedTuple):
    first: Step
    last: Step
    data: bytes


class CallHistory:
    """The records of one rank: `first`..`last`, both NO_STEP if there are none. Thread: any.

    The newest `kept` steps stay whatever they take: a swap may go back to those in the two slots, and the gate lets
    this rank be ahead of what is committed.
    """

    def __init__(self, limit_bytes: int, kept: int = KEPT_MIN) -> None:
        self._limit_bytes, self._kept, self._lock = limit_bytes, kept, threading.RLock()
        self._rows: list[_Row] = []
        self._newest: list[bytes] = []  # the records of the steps after them
        self._rows_bytes = self._newest_bytes = 0
        self.last: Step = NO_STEP

    @property
    def held_bytes(self) -> int:
        """The memory that the records take, compressed as they are."""
        return self._rows_bytes + self._newest_bytes

    @property
    def first(self) -> Step:
        with self._lock:
            return self._rows[0].first if self._rows else self._begin if self._newest else NO_STEP

    @property
    def _begin(self) -> Step:
        """The first step after those in rows."""
        return self.last - len(self._newest) + 1

    def append(self, step: Step, *parts: bytes) -> None:
        """Set the records of steps that end at `step`, the newest from now on; a gap forgets all before it.

        Args: parts: as `get` returns them. Blocks: 1 to 4 ms where a row is complete, 8 ms a MiB of a larger record.
        """
        with self._lock:
            begin = step - sum(map(steps_in, parts)) + 1
            self.truncate(begin - 1)
            if self.last != begin - 1:
                self.truncate(NO_STEP)
            self.last = begin - 1
            for part in parts:
                if is_row(part):
                    self._seal(len(self._newest))
                    self._add(self.last + 1, part)
                    self.last += steps_in(part)
                else:
                    self._newest.append(part)
                    self._newest_bytes += len(part)
                    self.last += 1
                    if self._newest_bytes >= ROW_BYTES or self.last - KEPT_MIN == row_end(self.last - KEPT_MIN):
                        self._seal(len(self._newest) - KEPT_MIN)
            self._prune()

    def _seal(self, count: int) -> None:
        """Make a row of the oldest `count` records that are in none."""
        if count <= 0:
            return
        self._add(self._begin, pack(self._newest[:count]))
        self._newest_bytes -= sum(map(len, self._newest[:count]))
        del self._newest[:count]

    def _add(self, first: Step, row: bytes) -> None:
        self._rows.append(_Row(first, first + steps_in(row) - 1, row))
        self._rows_bytes += len(row)

    def _prune(self) -> None:
        while self.held_bytes > self._limit_bytes:
            if self._rows and self.last - self._rows[0].last >= self._kept:
                self._rows_bytes -= len(self._rows.pop(0).data)
            elif not self._rows and len(self._newest) > self._kept:
                self._newest_bytes -= len(self._newest.pop(0))
            else:
                return

    def truncate(self, last: Step) -> None:
        """Forget the steps after `last`."""
        with self._lock:
            if last >= self.last:
                return
            while self._rows and last < self._rows[-1].last:
                row = self._rows.pop()
                self._rows_bytes -= len(row.data)
                self._newest = unpack(row.data) if row.first <= last else []
                self.last = row.first + len(self._newest) - 1
            del self._newest[max(0, len(self._newest) - (self.last - last)) :]
            self._newest_bytes = sum(map(len, self._newest))
            self.last = last if self._rows or self._newest else NO_STEP

    def get(self, first: Step, last: Step) -> list[bytes]:
        """Return the records of first..last, both included: rows that lie between them as they are, else one by one.

        Raises: HistoryPruned if any of them is not held.
        """
        if first > last:
            return []
        with self._lock:
            if self.last == NO_STEP or first < self.first or last > self.last:
                held = f"{self.first} to {self.last}" if self.last != NO_STEP else "none"
                raise HistoryPruned(
                    f"call records of steps {first} to {last} are wanted, held are {held} ({self.held_bytes} bytes)",
                    remedy="raise history_limit_mib",
                )
            index = bisect_left(self._rows, first, key=attrgetter("last"))
            rows = self._rows[index : bisect_right(self._rows, last, key=attrgetter("first"))]
            begin = self._begin
            newest = self._newest[max(0, first - begin) : max(0, last - begin + 1)]
        parts: list[bytes] = []
        for row in rows:
            if first <= row.first and row.last <= last:
                parts.append(row.data)
            else:
                parts += unpack(row.data)[max(0, first - row.first) : last - row.first + 1]
        return [*parts, *newest]

    def upto(self, last: Step) -> CallHistory:
        """Copy all but the steps after `last`. Raises: HistoryPruned if that one is not held."""
        copy = CallHistory(self._limit_bytes, self._kept)
        with self._lock:
            self.get(last, last)
            copy._rows, copy._newest, copy.last = [*self._rows], [*self._newest], self.last
            copy._rows_bytes, copy._newest_bytes = self._rows_bytes, self._newest_bytes
        copy.truncate(last)
        return copy
