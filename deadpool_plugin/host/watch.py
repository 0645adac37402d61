"""Notices at once that a process of this node dies or stands still, by looking at /proc every few tens of milliseconds.

Rules of this file: says what it saw, once per process; what it means is decided elsewhere. An exit status of 0 is not
told here, because the kernel shows 0 also while the status is not known yet; whoever waits for the process knows.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Collection
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


class Watch:
    """Watches processes on the running event loop.

    `on_end(exit_code)`: negative for a signal, as in subprocess; `on_stopped(seconds)`: after `silent_after_s` in
    state T.
    """

    def __init__(self, silent_after_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._watched: dict[int, _Watched] = {}
        self._task: asyncio.Task[None] | None = None
        self._excused: frozenset[int] = frozenset()
        self._said = False

    def start(self) -> None:
        proc.reserve.keep()
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(_raise_again)

    def add(self, pid: int, on_end: Callable[[int], None], on_stopped: Callable[[float], None]) -> None:
        self._watched[pid] = _Watched(on_end, on_stopped)

    def excuse(self, pids: Collection[int]) -> None:
        """These stand still because we have stopped them, and no others."""
        self._excused = frozenset(pids)

    def forget(self, pid: int) -> None:
        self._watched.pop(pid, None)

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
                    self._cannot_look(error)
            await asyncio.sleep(POLL_S)

    def _cannot_look(self, error: OSError) -> None:
        """Raises: OSError, but for too many open files, which is said once."""
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise error
        if not self._said:
            self._said = True
            _log.warning("cannot look at the processes of this host: %s; it is tried again and not said again", error)

    def _look(self, pid: int, watched: _Watched) -> None:
        status = proc.look(pid)
        if status is None:
            self.forget(pid)
        elif status.ending:
            if status.wait_status:
                self.forget(pid)
                watched.on_end(os.waitstatus_to_exitcode(status.wait_status))
        elif not status.stopped or pid in self._excused:
            watched.stopped_since = None
        else:
            now = time.monotonic()
            since = watched.stopped_since = watched.stopped_since or now
            if now - since >= self._silent_after_s and not watched.told_stopped:
                watched.told_stopped = True
                watched.on_stopped(now - since)


def _raise_again(task: asyncio.Task[None]) -> None:
    """A watch that has failed must not go unnoticed: the loop's exception handler gets its error."""
    if not task.cancelled():
        task.result()


def described_exit(exit_code: int) -> str:
    """An exit code for people."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
