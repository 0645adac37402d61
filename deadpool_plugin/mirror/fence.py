"""The generation fence of what a node holds: nothing of an older generation is written there any more (NO_STALE_WRITE),
and nothing of a newer one before this node has rolled back to where that one begins.

Rules of this file: any thread; whoever writes checks under the lock, so that nothing is written once `fence` has
returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..core.types import Generation
from ..errors import DeadpoolError, StaleGeneration


class NotEntered(DeadpoolError):
    """Another node mirrors in a generation that has not begun here; it is to try again."""


class Fence:
    """The generation, and the lock of everything that is fenced by it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)
        self._generation: Generation = 0
        self._entered: Generation = 0
        self._on_fence: list[Callable[[Generation], None]] = []

    @property
    def generation(self) -> Generation:
        """The oldest generation whose writes are accepted."""
        return self._generation

    def fence(self, generation: Generation) -> None:
        """From now on writes of generations before `generation` are refused; transfers of them are cut."""
        with self._lock:
            if generation <= self._generation:
                return
            self._generation = generation
            self._moved.notify_all()
        for tell in list(self._on_fence):
            tell(generation)

    def on_fence(self, tell: Callable[[Generation], None]) -> None:
        self._on_fence.append(tell)

    def check_generation(self, generation: Generation) -> None:
        """Raises: StaleGeneration if `generation` is over."""
        if generation < self._generation:
            raise StaleGeneration(f"a write of generation {generation}", f"generation {self._generation} or newer")

    def enter(self, generation: Generation) -> None:
        """Let others mirror in `generation`; snapshots newer than its restore step were dropped before."""
        with self._lock:
            self._entered = max(self._entered, generation)
            self._moved.notify_all()

    def await_entry(self, generation: Generation, timeout_s: float) -> None:
        """Blocks until others may mirror here in `generation`: they may have heard of the decision before this node.

        Raises: StaleGeneration; NotEntered after `timeout_s`.
        """
        with self._lock:
            self._moved.wait_for(lambda: self._entered >= generation or self._generation > generation, timeout_s)
            self.check_generation(generation)
            if self._entered < generation:
                raise NotEntered(f"a write of generation {generation}", f"generation {self._entered}, as this node")
