"""Calls to Linux that Python lacks.

Rules of this file: standard library only, as the smallest of our processes load it; a thread or process that has ended
is an answer, not an error. Source: prctl(2), proc(5).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Raises: OSError"""
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def die_with_parent(death_signal: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Let the kernel send this process `death_signal` when its parent ends; at once if it has ended already.

    "Its parent" is the thread that forked it, hence to be a main one.

    Args:
        parent: the expected parent; None takes the present one (one that died before the call is not noticed then).
    Raises: OSError
    """
    expected = os.getppid() if parent is None else parent
    prctl(PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != expected:
        os.kill(os.getpid(), death_signal)


def name_process(name: str) -> None:
    """Name this process for `ps` and `top`, which show 15 characters. Thread: any; the main one gets the name."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb", buffering=0) as file:
        file.write(name.encode()[:15])


def threads(pid: int | str = "self") -> list[str]:
    """All threads of a process, as /proc names them; none of one that has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return os.listdir(f"/proc/{pid}/task")
    return []


def of_thread(thread: str, name: str, pid: int | str = "self") -> bytes:
    """Read the file `name` of a thread in /proc (stat, comm, children); empty for a thread that has ended."""
    path = f"/proc/{pid}/task/{thread}/{name}"
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(path, "rb", buffering=0) as file:
        return file.read()
    return b""
