"""This node's processes: watched, paused and ended.

They are looked at in /proc every few tens of milliseconds, so that a death is noticed at once.

Rules of this file: says what it saw, once per process; what it means is decided elsewhere. An exit status of 0 is not
told, because the kernel shows 0 also while the status is not known yet; the process's parent knows. A process that is
paused here is not taken for stuck; one that had been stopped before stays so.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import proc

POLL_S = 0.03
_log = logging.getLogger(__name__)


@dataclass
class _Watched:
    on_end: Callable[[int], None]
    on_stopped: Callable[[float], None]
    stopped_since: float | None = None
    told_stopped: bool = False


class Processes:
    """The processes whose tag begins with `job_tag`. Thread: the event loop's only, from `start` on."""

    def __init__(self, job_tag: str, silent_after_s: float) -> None:
        self._job_tag, self._silent_after_s = job_tag, silent_after_s
        self._watched: dict[int, _Watched] = {}
        self._task: asyncio.Task[None] | None = None
        self._paused: set[int] = set()
        self._said = False

    def start(self) -> None:
        proc.reserve.keep()
        self._task = asyncio.get_running_loop().create_task(self._run())
        # A watch that has failed must not go unnoticed: the loop's exception handler gets its error.
        self._task.add_done_callback(lambda task: task.cancelled() or task.result())

    def watch(self, pid: int, on_end: Callable[[int], None], on_stopped: Callable[[float], None]) -> None:
        """Call `on_end(exit_code)` once `pid` ends (as in subprocess; 0 is not told), and `on_stopped(seconds)` once it
        has stood still for the job's patience."""
        self._watched[pid] = _Watched(on_end, on_stopped)

    def forget(self, pid: int) -> None:
        self._watched.pop(pid, None)

    def is_gone(self, pid: int) -> bool:
        """Return whether `pid` has ended, or is ending."""
        status = proc.look(pid)
        return status is None or status.ending

    def catches(self, pid: int, number: int) -> bool:
        return proc.catches(pid, number)

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of `pid`, as in subprocess, if it is ending and that is known; 0 never is."""
        status = proc.look(pid)
        if status is None or not status.ending or not status.wait_status:
            return None
        return os.waitstatus_to_exitcode(status.wait_status)

    def sweep(self, local_rank: int) -> None:
        """End all that was started for `local_rank`, also what that has started."""
        proc.sweep(f"{self._job_tag}{local_rank}.")

    def pause(self, running: Mapping[int, int], others: Mapping[int, int]) -> None:
        """Stop all of `running` (local rank -> process) at once, then what they have started. Blocks: some 10 ms.

        `others`: local rank -> the process that looks after it, which goes on.
        """
        met, found = set[int](), {*running.values()}
        while found:
            for pid in found:
                status = proc.look(pid)
                if status is not None and not status.stopped:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)
                        self._paused.add(pid)
            met |= found
            # Until there is no other one: they may fork meanwhile. The scan of all of /proc takes long: a second one is
            # for a slot that runs no rank now.
            found = {*proc.tagged(self._job_tag)} - {*others.values()} - met
            for local_rank in others.keys() - {*running}:
                found -= {*proc.tagged(f"{self._job_tag}{local_rank}.")}

    def resume(self) -> None:
        self._end_pause(signal.SIGCONT)

    def kill_paused(self) -> None:
        self._end_pause(signal.SIGKILL)

    def _end_pause(self, number: signal.Signals) -> None:
        paused, self._paused = self._paused, set()
        for pid in paused:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        self._watched.clear()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            for pid, watched in list(self._watched.items()):
                try:
                    self._look(pid, watched)
                except OSError as error:  # too many open files: the next look may have one
                    if error.errno not in (errno.EMFILE, errno.ENFILE):
                        raise
                    if not self._said:
                        self._said = True
                        said = "cannot look at the processes of this host: %s; it is tried again and not said again"
                        _log.warning(said, error)
            await asyncio.sleep(POLL_S)

    def _look(self, pid: int, watched: _Watched) -> None:
        status = proc.look(pid)
        if status is None:
            self.forget(pid)
        elif status.ending:
            if status.wait_status:
                self.forget(pid)
                watched.on_end(os.waitstatus_to_exitcode(status.wait_status))
        elif not status.stopped or pid in self._paused:
            watched.stopped_since = None
        else:
            now = time.monotonic()
            since = watched.stopped_since = watched.stopped_since or now
            if now - since >= self._silent_after_s and not watched.told_stopped:
                watched.told_stopped = True
                watched.on_stopped(now - since)


def described_exit(exit_code: int) -> str:
    """Describe an exit code for people."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
