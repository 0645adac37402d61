"""Told to end (SIGTERM), as a scheduler tells a host before it takes it away, where the script handles that itself.

A script that has a handler for SIGTERM (Megatron-LM's --exit-signal-handler) saves and ends the job; it has NOTICE_S
for that, less than the 30 s after which deepspeed's launcher and Slurm kill. A host whose script has none is given up
at once, and a spare takes its ranks.

Rules of this file: the script is asked only where everybody on the host was told, this agent too, as deepspeed's
launcher does (terminate_process_tree): a supervisor that was told alone has lost its launcher, and nobody else has.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from ..host import proc
from .slots import Slot

NOTICE_S = 25.0
TERM_GRACE_S = 1.0
"""A supervisor that was told to end knows better why; this agent knows better who else was told. Each gives the other
so long to speak first."""


class Notice:
    """Thread: the event loop's only. `give_up` gets why this node has to go, `say` what people are told."""

    def __init__(self, slots: Sequence[Slot], give_up: Callable[[str], None], say: Callable[[str], None]) -> None:
        self._slots, self._give_up, self._say = slots, give_up, say
        self._given = False

    def told(self, reason: str) -> None:
        """This agent was."""
        if self._given:
            return
        if not self._is_handled():
            self._later(TERM_GRACE_S, reason)
            return
        self._given = True
        self._say(f"told to end (SIGTERM): the script handles that itself, and has {NOTICE_S:g} s for it")
        self._later(
            NOTICE_S, f"{reason}; the script, which handles SIGTERM itself, has not ended within {NOTICE_S:g} s"
        )

    def supervisor_told(self, reason: str) -> None:
        """A supervisor was."""
        if not self._is_handled():
            self._give_up(reason)
        else:
            asyncio.get_running_loop().call_later(TERM_GRACE_S, lambda: self._given or self._give_up(reason))

    def _is_handled(self) -> bool:
        running = [slot.process for slot in self._slots if slot.serving is not None]
        return any(process and process.pid and proc.catches(process.pid, signal.SIGTERM) for process in running)

    def _later(self, seconds: float, reason: str) -> None:
        asyncio.get_running_loop().call_later(seconds, self._give_up, reason)
