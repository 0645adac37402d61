"""The generation fence of what a node holds: nothing of an older generation is written there any more (NO_STALE_WRITE).

Rules of this file: any thread; whoever writes checks under the lock, so that nothing is written once `fence` is back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..core.types import Generation
from ..errors import StaleGeneration


class Fence:
    """The generation, and the lock of everything that is fenced by it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._generation: Generation = 0
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
        for tell in list(self._on_fence):
            tell(generation)

    def on_fence(self, tell: Callable[[Generation], None]) -> None:
        self._on_fence.append(tell)

    def check_generation(self, generation: Generation) -> None:
        """Raises: StaleGeneration if `generation` is over."""
        if generation < self._generation:
            raise StaleGeneration(f"a write of generation {generation}", f"generation {self._generation} or newer")
