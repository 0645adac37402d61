"""Calls to Linux that Python lacks, or that a Python may have been built without.

conda-forge and uv build theirs against a C library (2.17) that is older than memfd and pidfd: `os` lacks them then,
whatever the host has.
Rules of this file: standard library only, as the smallest of our processes load it. A thread or process that has ended
is an answer, not an error. Numbers are the kernel's, from prctl(2), mlock(2), memfd_create(2), fcntl(2) and
asm-generic/unistd.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
import time

MCL_CURRENT = 1
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4
_HELD_S = 1.0  # a thread in state D that does not stop within it is held by the kernel, in a file system, say
_POLL_S = 0.001
_AT_REST = {b"T", b"t", b"Z", b"X"}
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


def trim_memory() -> None:
    """Give memory that is free within this process back to the system."""
    libc.malloc_trim(0)


def lock_memory() -> None:
    """Keep what this process has in memory now from being swapped or dropped, where that is permitted."""
    libc.mlockall(MCL_CURRENT)  # not what it will have: a mapping beyond RLIMIT_MEMLOCK would fail


def forget_pages(address: int, nbytes: int) -> None:
    """Give back the whole pages of a range, which reads as zeros from then on, or as its file does."""
    first, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:  # locked ones stay, which costs no more than their memory
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


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


def kill_tree(pid: int, within_s: float | None = None) -> None:
    """SIGKILL `pid` and everything below it. Blocks: until all of them have ended (they need not be our children).

    Raises: TimeoutError, which names one that had not ended within `within_s`.
    """
    watched, pending = dict[int, int](), [pid]
    while pending:
        one = pending.pop()
        with contextlib.suppress(ProcessLookupError):
            watched[one] = pidfd_open(one)
            os.kill(one, signal.SIGSTOP)  # before its children are listed: none can be born unseen
            held_at = time.monotonic() + _HELD_S
            # A thread within fork(2) finishes that first.
            while running := {stat.rpartition(b")")[2].split()[0] for stat in _of_threads(one, "stat")} - _AT_REST:
                if running == {b"D"} and time.monotonic() > held_at:
                    break
                time.sleep(_POLL_S)
            pending += map(int, b" ".join(_of_threads(one, "children")).split())
    deadline = None if within_s is None else time.monotonic() + within_s
    for descriptor in watched.values():
        with contextlib.suppress(ProcessLookupError):
            pidfd_send_signal(descriptor, signal.SIGKILL)
    try:
        for one, descriptor in watched.items():
            if not await_end(descriptor, None if deadline is None else deadline - time.monotonic()):
                raise TimeoutError(f"process {one} was killed and does not end")
    finally:
        for descriptor in watched.values():
            os.close(descriptor)


def _of_threads(pid: int, name: str) -> list[bytes]:
    return [said for thread in threads(pid) if (said := of_thread(thread, name, pid))]


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
