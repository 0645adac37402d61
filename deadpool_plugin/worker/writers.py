"""Processes that write a checkpoint for the training process: they end with it, or when a swap cancels them.

Rules of this file: Linux; no process is waited for without having been killed before.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time

from ..transport import linux
from ..transport.linux import await_end, pidfd_open, pidfd_send_signal

_HELD_S = 1.0
"""A thread that does not stop within this time, in state D, is held by the kernel, in a file system, say."""
_POLL_S = 0.001
_AT_REST = {b"T", b"t", b"Z", b"X"}


def die_with_trainer() -> None:
    """Let the kernel kill this process, one that multiprocessing has started, when its parent ends; at once if whoever
    started it has ended already: orphans have another parent."""
    parent, started_by = os.getppid(), multiprocessing.parent_process()
    if started_by is not None and not started_by.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)
    linux.die_with_parent(signal.SIGKILL, parent)


def kill_tree(pid: int) -> None:
    """SIGKILL `pid` and everything below it. Blocks: until all of them have ended (they need not be our children).

    Each stands still before its children are listed, so none can be born unseen.
    """
    watched: list[int] = []
    pending = [pid]
    while pending:
        one = pending.pop()
        with contextlib.suppress(ProcessLookupError):
            watched.append(pidfd_open(one))
            os.kill(one, signal.SIGSTOP)
            _await_stop(one)
            pending += _children(one)
    for descriptor in watched:
        with contextlib.suppress(ProcessLookupError):
            pidfd_send_signal(descriptor, signal.SIGKILL)
    for descriptor in watched:
        await_end(descriptor)
        os.close(descriptor)


def _await_stop(pid: int) -> None:
    """A thread within fork(2) finishes that first."""
    held_at = time.monotonic() + _HELD_S
    while running := {stat.rpartition(b")")[2].split()[0] for stat in _of_threads(pid, "stat")} - _AT_REST:
        if running == {b"D"} and time.monotonic() > held_at:
            return
        time.sleep(_POLL_S)


def _children(pid: int) -> list[int]:
    """None on a kernel that does not list them."""
    return [int(child) for children in _of_threads(pid, "children") for child in children.split()]


def _of_threads(pid: int, name: str) -> list[bytes]:
    """Read this file in /proc of each thread of `pid`; empty ones are left out."""
    return [said for thread in linux.threads(pid) if (said := linux.of_thread(thread, name, pid))]
