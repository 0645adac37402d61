"""Simulated time: one queue of what happens when.

Rules of this file: things due at the same moment happen in the order in which they were asked for, so that a run is a
function of its seed alone. Seconds, as everywhere.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Any


class Timeline:
    """`now`, and what is to come. `events` counts what has happened; `run` ends once it is `halted`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.halted = False
        self._asked = 0
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._next: deque[Callable[[], object]] = deque()

    def at(self, when: float, work: Callable[..., object], *arguments: Any) -> None:
        """Call `work(*arguments)` at `when` (now, if that has passed)."""
        self._asked += 1
        heapq.heappush(self._due, (when if when > self.now else self.now, self._asked, work, arguments))

    def after(self, delay_s: float, work: Callable[..., object], *arguments: Any) -> None:
        self._asked += 1
        heapq.heappush(self._due, (self.now + delay_s, self._asked, work, arguments))

    def next(self, work: Callable[[], object]) -> None:
        """Call `work()` at this moment, before anything else that is due."""
        self._next.append(work)

    def run(self, until: float, events_max: int) -> None:
        """Let things happen until it is halted, `until` has passed, or nothing is to come; at most so many."""
        due, following, pop, last = self._due, self._next, heapq.heappop, self.events + events_max
        while self.events < last and not self.halted and self.now <= until and (following or due):
            self.events += 1
            if following:
                following.popleft()()
            else:
                self.now, _, work, arguments = pop(due)
                work(*arguments)

    def is_past(self, when: float) -> bool:
        """Return whether nothing more happens until `when`."""
        return self.now > when or not (self._due or self._next)

    def step(self) -> bool:
        """Let the next thing happen; False if nothing is to come."""
        before = self.events
        self.run(math.inf, 1)
        return self.events > before
