"""Calls to Linux that Python lacks, or that a Python may have been built without.

conda-forge and uv build theirs against a C library (2.17) that is older than memfd and pidfd: `os` lacks them then,
whatever the host has.
Rules of this file: standard library only, as the smallest of our processes load it. A thread or process that has ended
is an answer, not an error. Numbers are the kernel's, from prctl(2), memfd_create(2), fcntl(2), asm-generic/unistd.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
_TGKILL = {"x86_64": 234, "aarch64": 131}
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434  # on every machine
libc = ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: object) -> int:
    """Call the kernel, which knows no number below 0 (ENOSYS). Raises: OSError."""
    result: int = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def memfd_create(name: str, flags: int) -> int:
    """Raises: OSError"""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _syscall(_MEMFD_CREATE.get(os.uname().machine, -1), name.encode(), ctypes.c_uint(flags))


def pidfd_open(pid: int) -> int:
    """Return a descriptor that is readable once `pid` has ended. Raises: OSError"""
    return _syscall(_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0))


def await_end(pidfd: int, within_s: float | None = None) -> bool:
    """Return whether the process has ended. Blocks: until it has, at most `within_s`."""
    end = select.poll()  # `select` takes no descriptor above 1023, of which a trainer may have many
    end.register(pidfd, select.POLLIN)
    return bool(end.poll(None if within_s is None else max(0.0, within_s) * 1000))


def tgkill(pid: int, thread: int, number: int) -> None:
    """Send a signal to one thread of a process. Raises: OSError"""
    _syscall(_TGKILL.get(os.uname().machine, -1), ctypes.c_int(pid), ctypes.c_int(thread), ctypes.c_int(number))


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """Raises: OSError"""
    _syscall(_PIDFD_SEND_SIGNAL, ctypes.c_int(pidfd), ctypes.c_int(number), None, ctypes.c_uint(0))


def prctl(option: int, value: int) -> None:
    """Raises: OSError"""
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def die_with_parent(death_signal: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Let the kernel send this process `death_signal` when its parent's thread that forked it ends; at once if that is
    not `parent` any more (None: whichever it has now). Raises: OSError"""
    expected = os.getppid() if parent is None else parent
    prctl(PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != expected:
        os.kill(os.getpid(), death_signal)


def name_process(name: str) -> None:
    """Name this process for `ps` and `top`, which show 15 characters. Thread: any; the main one gets the name."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb", buffering=0) as file:
        file.write(name.encode()[:15])


def threads(pid: int | str = "self") -> list[str]:
    """List the threads of a process, as /proc names them; none of one that has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return os.listdir(f"/proc/{pid}/task")
    return []


def of_thread(thread: str, name: str, pid: int | str = "self") -> bytes:
    """Read the file `name` of a thread in /proc (stat, comm, children); empty for a thread that has ended."""
    path = f"/proc/{pid}/task/{thread}/{name}"
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(path, "rb", buffering=0) as file:
        return file.read()
    return b""
