"""Descriptors of memory and of processes (memfd, pidfd), also from a Python that was built without them.

conda-forge and uv have built theirs against a C library (2.17) that is older than these calls: `os` lacks them then,
whatever the host has.
Rules of this file: what `os` and `signal` have is used, else the same system call; errors are the same OSErrors.
Numbers are the kernel's, from memfd_create(2), fcntl(2) and asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal

from .linux import libc

MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434  # on every machine


def memfd_create(name: str, flags: int) -> int:
    """Raises: OSError"""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _call(_MEMFD_CREATE.get(os.uname().machine, -1), name.encode(), ctypes.c_uint(flags))


def pidfd_open(pid: int) -> int:
    """Readable once `pid` has ended. Raises: OSError"""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0))


def await_end(pidfd: int, within_s: float | None = None) -> bool:
    """Return whether the process has ended. Blocks: until it has, at most `within_s`; None: however long that takes."""
    end = select.poll()  # `select` takes no descriptor above 1023, of which a trainer may have many
    end.register(pidfd, select.POLLIN)
    return bool(end.poll(None if within_s is None else max(0.0, within_s) * 1000))


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """Raises: OSError"""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, number)
    else:
        _call(_PIDFD_SEND_SIGNAL, ctypes.c_int(pidfd), ctypes.c_int(number), None, ctypes.c_uint(0))


def _call(number: int, *arguments: object) -> int:
    """The system call `number`; the kernel knows none below 0 (ENOSYS)."""
    result: int = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
