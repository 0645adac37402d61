"""Processes that write a checkpoint for the training process: they end with it, or when a swap cancels them.

Rules of this file: Linux; no process is waited for without having been killed before.
"""

from __future__ import annotations

import contextlib
import os
import signal

from ..transport import linux
from ..transport.descriptors import await_end, pidfd_open, pidfd_send_signal


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends; at once if it has ended already: nobody who trains is
    process 1, which orphans are given to."""
    parent = os.getppid()
    if parent == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    linux.die_with_parent(signal.SIGKILL, parent)


def kill_tree(pid: int) -> None:
    """SIGKILL `pid` and everything below it. Blocks: until all of them have ended (they need not be our children).

    Each is stopped before its children are listed, so none can be born unseen.
    """
    watched: list[int] = []
    pending = [pid]
    while pending:
        one = pending.pop()
        with contextlib.suppress(ProcessLookupError):
            watched.append(pidfd_open(one))
            os.kill(one, signal.SIGSTOP)
            pending += _children(one)
    for descriptor in watched:
        with contextlib.suppress(ProcessLookupError):
            pidfd_send_signal(descriptor, signal.SIGKILL)
    for descriptor in watched:
        await_end(descriptor)
        os.close(descriptor)


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except FileNotFoundError:  # it has ended, or the kernel has no such file
        return []
