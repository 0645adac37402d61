"""A deadline for interrupted worker processes.

Rules of this file: who has not left what it was in by then (a call that holds the interpreter, a dead device, user code
that does not come to its next call) is ended, and replaced on this node with what its arena holds. Who is in a save has
longer: it is healthy, and the others wait no worse for it than for a newcomer in its place. Processes that have
not come to training are not asked: they begin anew, or the job ends. Nor is one that takes a rank over: on its way
through past steps it touches nothing of any generation, and joins the newest one when it is through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..core import local
from ..core.types import Generation
from .lives import Lives
from .slots import Process, Slot


class Unwinding:
    """Thread: the event loop's only.

    Args:
        saving_s: the deadline of processes that are in a save, at least `deadline_s`.
    """

    def __init__(self, slots: Sequence[Slot], lives: Lives, deadline_s: float, saving_s: float) -> None:
        self._slots, self._lives, self._deadline_s, self._saving_s = slots, lives, deadline_s, saving_s
        self._deadlines: list[asyncio.TimerHandle] = []

    def pause(self) -> None:
        """The processes are stopped: that is not their time. Once they go on `begin` is called again."""
        for deadline in self._deadlines:
            deadline.cancel()
        self._deadlines.clear()

    def begin(self, generation: Generation) -> None:
        """Every process in training has been told that `generation` begins."""
        asked = [
            (slot, slot.process)
            for slot in self._slots
            if slot.serving is not None and slot.process is not None and slot.process.in_training
        ]
        loop = asyncio.get_running_loop()
        self._deadlines = [deadline for deadline in self._deadlines if deadline.when() > loop.time()]
        for after_s in (self._deadline_s, self._saving_s):
            self._deadlines.append(loop.call_later(after_s, self._expire, generation, asked, after_s))

    def unwound(self, slot: Slot, message: local.Unwound | local.Restored) -> None:
        """A process waits for its new world (or is in it already)."""
        if slot.process is not None:
            slot.process.unwound_for = max(slot.process.unwound_for, message.generation)

    def saving(self, slot: Slot, message: local.Saving) -> None:
        if slot.process is not None:
            slot.process.saving_for = max(slot.process.saving_for, message.generation)

    def _expire(self, generation: Generation, asked: list[tuple[Slot, Process]], after_s: float) -> None:
        for slot, process in asked:
            if slot.process is not process or process.unwound_for >= generation:
                continue
            saves = process.saving_for >= generation
            if not saves or after_s >= self._saving_s:
                what = "the save it was in" if saves else "its call"
                reason = f"process {process.pid} had not left {what} after {after_s:g} s and was killed"
                self._lives.kill(slot, process, reason)
