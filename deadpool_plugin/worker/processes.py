"""Processes that write a checkpoint for the training process: they end with it, or when a swap cancels them.

Rules of this file: Linux; no process is waited for without having been killed before.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

from ..transport import linux
from ..transport.descriptors import await_end, pidfd_open, pidfd_send_signal

_STOPS_WITHIN_S = 1.0
"""Whoever does not is held by the kernel, in a file system, say, and forks nobody."""
_POLL_S = 0.001


def die_with_parent() -> None:
    """Let the kernel kill this process, one that multiprocessing has started, when its parent ends; at once if it has
    ended already."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    linux.die_with_parent(signal.SIGKILL, parent.pid)


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
    deadline = time.monotonic() + _STOPS_WITHIN_S
    while time.monotonic() < deadline:
        if all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in _of_threads(pid, "stat")):
            return
        time.sleep(_POLL_S)


def _children(pid: int) -> list[int]:
    """None on a kernel that does not list them."""
    return [int(child) for children in _of_threads(pid, "children") for child in children.split()]


def _of_threads(pid: int, name: str) -> list[str]:
    """What this file in /proc says of each thread of `pid` that is there."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.append(Path(f"/proc/{pid}/task/{thread}/{name}").read_text())
    return found
