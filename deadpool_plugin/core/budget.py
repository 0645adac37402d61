"""A budget of repetitions: so many times within any stretch of so many seconds.

Rules of this file: what is older than the window is forgotten, so that a job of months is not ended by losses that were
months apart. May import nothing.
Source: systemd's StartLimitBurst within StartLimitIntervalSec; Erlang/OTP's restart intensity of a supervisor.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable


class Budget:
    """One budget for each key. `most` 0: never."""

    def __init__(self, most: int, window_s: float) -> None:
        self._most, self._window_s = most, window_s
        self._spent: defaultdict[Hashable, deque[float]] = defaultdict(deque)

    def spend(self, key: Hashable, now: float) -> bool:
        """Count one more for `key`, at `now`; whether it is within the budget."""
        spent = self._spent[key]
        while spent and now - spent[0] >= self._window_s:
            spent.popleft()
        if len(spent) >= self._most:
            return False
        spent.append(now)
        return True

    def __str__(self) -> str:
        """For people: what is exceeded when `spend` says no."""
        return f"{self._most} times within {self._window_s:g} s"
