"""Work of one simulated node that takes time, written as a generator: it yields what it waits for.

Rules of this file: a task goes on only through its node's `do`, so whoever is paused does nothing and whoever is gone
never goes on; a cancelled task runs no further line. Yield seconds to sleep, or a Signal to wait for its value.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol

from .clock import Timeline

Work = Generator["float | Signal", Any, None]


class Home(Protocol):
    """Where a task runs."""

    @property
    def timeline(self) -> Timeline: ...

    def do(self, work: Callable[..., object], *arguments: Any) -> None: ...


class Signal:
    """Something that happens once: whoever waits for it, or comes later, goes on with its value."""

    def __init__(self) -> None:
        self.value: Any = None
        self.is_set = False
        self._waiting: list[Task] = []

    def set(self, value: Any = None) -> None:
        if self.is_set:
            return
        self.value, self.is_set = value, True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            task.resume_soon(value)

    def wake(self, task: Task) -> None:
        if self.is_set:
            task.resume_soon(self.value)
        else:
            self._waiting.append(task)


class Task:
    """Runs `work` on `home` from now on. An error that ends it is the run's."""

    def __init__(self, home: Home, work: Work) -> None:
        self._home, self._work = home, work
        self.over = self._running = False
        self._turn = 0
        self._go_on(self._turn, None)

    def cancel(self) -> None:
        """Not a line more; if it is just running (it cancels itself, by a detour) none after its next yield."""
        if not self.over:
            self.over = True
            self._turn += 1
            if not self._running:
                self._work.close()

    def resume_soon(self, value: Any = None, delay_s: float = 0.0) -> None:
        self._turn += 1
        self._home.timeline.after(delay_s, self._home.do, self._go_on, self._turn, value)

    def _go_on(self, turn: int, value: Any) -> None:
        if self.over or turn != self._turn:
            return
        self._running = True
        try:
            waits_for = self._work.send(value)
        except StopIteration:
            self.over = True
        else:
            self._running = False
            if self.over:
                self._work.close()
            elif isinstance(waits_for, Signal):
                waits_for.wake(self)
            else:
                self.resume_soon(delay_s=waits_for)
