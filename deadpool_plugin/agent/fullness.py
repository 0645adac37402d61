"""A word before the call records of past steps are full, and once they are.

A process that begins the script anew needs the records of every step: from the first one dropped on, only those that
have followed so far can take a rank over.
Rules of this file: every node says it once of its own ranks, not of each; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .. import events
from ..core import api
from ..core.types import Rank, Step
from ..mirror.store import SnapshotStore
from .reports import Reports

WARN_AT = 0.8
LOOK_EVERY_STEPS = 64


class Fullness:
    """Thread: the event loop's only."""

    def __init__(
        self, store: SnapshotStore, reports: Reports, limit_bytes: int, feed: Callable[[api.Input], None]
    ) -> None:
        self._records, self._reports, self._limit_bytes, self._feed = store.records, reports, limit_bytes, feed
        self._said: set[bool] = set()

    def look(self, ranks: Sequence[Rank], step: Step) -> None:
        """`step` is committed. `ranks`: those of this node."""
        if True in self._said:
            return
        for rank in ranks:
            first, _ = self._records.history_range(rank)
            if first > 0:
                self._say(rank, step, full=True)
            elif step % LOOK_EVERY_STEPS == 0 and self._records.history_bytes(rank) >= WARN_AT * self._limit_bytes:
                self._say(rank, step, full=False)

    def _say(self, rank: Rank, step: Step, full: bool) -> None:
        if full not in self._said:
            self._said.add(full)
            self._reports.emit(events.HistoryFilling(rank=rank, step=step, full=full))
            if full:
                self._feed(api.RecordsDropped())
