"""Standing still: a node that others may replace stops what runs its ranks, and lets it go on if nobody has.

Rules of this file: whoever is stopped here does nothing at all, whatever it was in (a collective, a save, the script's
own code), and its children with it; the watch does not take it for stuck. Who had been stopped before stays so.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Sequence

from ..host import proc
from ..host.watch import Watch
from .slots import Slot


class Pausing:
    """Thread: the event loop's only. `active` while processes are stopped."""

    def __init__(self, job_tag: str, slots: Sequence[Slot], watch: Watch) -> None:
        self._job_tag, self._slots, self._watch = job_tag, slots, watch
        self._stopped: set[int] = set()
        self.active = False

    def pause(self) -> None:
        """Stop every process that runs a rank: all of them at once, then what they have started. Blocks: some 10 ms."""
        self.active = True
        running = {
            slot.local_rank: slot.process.pid
            for slot in self._slots
            if slot.serving is not None and slot.process is not None and slot.process.pid
        }
        met, found = set[int](), {*running.values()}
        while found:
            for pid in found:
                self._stop(pid)
            met |= found
            found = self._started(running) - met  # until there is no other one: they may fork meanwhile
        self._watch.excuse(self._stopped)

    def _started(self, running: Collection[int]) -> set[int]:
        """Find the processes of these local ranks, without their supervisors. The scan of all of /proc takes long:
        a second one is for a slot that runs no rank now."""
        found = {*proc.tagged(self._job_tag)} - {slot.standby_pid for slot in self._slots}
        for slot in self._slots:
            if slot.local_rank not in running:
                found -= {*proc.tagged(f"{self._job_tag}{slot.local_rank}.")}
        return found

    def keep(self) -> None:
        """Whoever has come to run a rank meanwhile stands still, too."""
        if self.active:
            self.pause()

    def _stop(self, pid: int) -> None:
        status = proc.look(pid)
        if status is not None and not status.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self._stopped.add(pid)

    def resume(self) -> None:
        self._end(signal.SIGCONT)

    def kill(self) -> None:
        """They end as they stand."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        stopped, self._stopped, self.active = self._stopped, set(), False
        self._watch.excuse(())
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
