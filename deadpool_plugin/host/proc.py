"""Facts from /proc about processes: start time, state, exit, and the end of a job's processes.

Rules of this file: reads only, but for `sweep` and `kill_all`; a process that has gone is an answer, not an error.
Source: proc_pid_stat(5); PF_EXITING shows 1.5-5 ms after SIGKILL, while a pidfd or an end of file come only after
the memory is torn down (about 100 ms per GiB). It shows only after a core dump, PF_SIGNALED before it; a main thread
that has that does not go back to its program (kernel/signal.c, get_signal).
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

T = TypeVar("T")
PF_EXITING = 0x4
PF_SIGNALED = 0x400
PF_KTHREAD = 0x200000
ROUNDS_MAX = 10
EXEC_LOOKS_MAX = 500
"""Counted and not timed: where the CPUs are busy we, too, get to look less often."""
EXEC_POLL_S = 0.001
TAG = "DEADPOOL_TAG"
"""Environment variable every worker is started with: "<launcher pid>.<its start time>.<local rank>."."""


class SpareDescriptor:
    """A descriptor that is given up for a moment where there is no other one to look at /proc with.

    Without it a process with too many open files is blind: it would take a living process for one that it cannot see.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._lock = threading.RLock()

    def keep(self) -> None:
        """Have one from now on. Raises: OSError."""
        if self._fd < 0:
            self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def call(self, work: Callable[[], T]) -> T:
        """Do `work`, for which there is a descriptor unless another thread is quicker. Raises: OSError."""
        try:
            return work()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or self._fd < 0:
                raise
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            try:
                return work()
            finally:
                with contextlib.suppress(OSError):  # the next look tries again
                    self.keep()


reserve = SpareDescriptor()


def _read(path: str) -> bytes:
    """Read a file in /proc. Raises: OSError."""

    def read() -> bytes:
        with open(path, "rb", buffering=0) as file:
            return file.read()

    return reserve.call(read)


def _stat(pid: int, folder: str = "/proc") -> list[bytes]:
    """Read the fields of proc_pid_stat(5) from the third on. Raises: OSError if there is no such process."""
    return _read(f"{folder}/{pid}/stat").rpartition(b") ")[2].split()


class ProcessStatus(msgspec.Struct, frozen=True):
    """One look at a process. `wait_status` is as from waitpid and means something only if `ending`; 0 may also mean
    that it is not known yet."""

    state: str
    ending: bool
    wait_status: int

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


def look(pid: int, folder: str = "/proc") -> ProcessStatus | None:
    """Read the status of `pid`, None if there is no such process. Costs about 10 us."""
    try:
        fields = _stat(pid, folder)
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, flags = fields[0].decode(), int(fields[6])
    if state not in "ZX" and not flags & (PF_EXITING | PF_SIGNALED):
        return ProcessStatus(state, False, 0)
    status = int(fields[49])
    if not status and flags & PF_SIGNALED:  # else 0 may be the code by which a thread of the process has ended it
        with contextlib.suppress(OSError):
            if b"\nCoreDumping:\t1\n" in _read(f"{folder}/{pid}/status"):
                status = int(signal.SIGSEGV)  # or one like it: older kernels say which only when the dump is written
    return ProcessStatus(state, True, status)


def catches(pid: int, number: int) -> bool:
    """Return whether `pid` has a handler of its own for signal `number`."""
    try:
        mask = int(_read(f"/proc/{pid}/status").partition(b"\nSigCgt:\t")[2].split()[0], 16)
    except (OSError, IndexError):  # gone
        return False
    return bool(mask >> (number - 1) & 1)


def start_time(pid: int) -> int:
    """Read when `pid` was started, in clock ticks since boot: with the pid it names a process for good."""
    return int(_stat(pid)[19])


def _pids() -> list[int]:
    return [int(name) for name in reserve.call(lambda: os.listdir("/proc")) if name.isdigit()]


def children(pid: int) -> list[int]:
    """Find every process whose parent is `pid`, whichever of its threads that is, zombies included. Costs about 10 us
    for each process of the host."""
    found = []
    for one in _pids():
        with contextlib.suppress(OSError):  # gone meanwhile
            if int(_stat(one)[1]) == pid:
                found.append(one)
    return found


def job_tag(launcher_pid: int) -> str:
    """Make the tag all workers of one launcher share (a prefix of each worker's own)."""
    return f"{launcher_pid}.{start_time(launcher_pid)}."


def sweep(tag: str) -> int:
    """SIGKILL every process whose initial environment carries a tag that begins with `tag`; how many there were.

    Finds grandchildren in sessions of their own, too.
    """
    return len(kill_all(lambda: tagged(tag)))


def kill_all(look: Callable[[], Iterable[int]]) -> set[int]:
    """SIGKILL every process that `look` finds; their pids. Repeats until it finds no other one (they may
    fork meanwhile)."""
    killed: set[int] = set()
    for _ in range(ROUNDS_MAX):
        found = set(look()) - killed
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
    return killed


def tagged(tag: str) -> list[int]:
    """Find every process whose initial environment carries a tag that begins with `tag`."""
    wanted = f"{TAG}={tag}".encode()
    return [pid for pid, found in environments() if found.startswith(wanted) or b"\0" + wanted in found]


def environments() -> Iterator[tuple[int, bytes]]:
    """(pid, its initial environment) of every process but this one. Costs some 10 us a process; waits for those within
    execve(2), by EXEC_LOOKS_MAX further looks in all."""
    looks = iter(range(EXEC_LOOKS_MAX))
    for pid in _pids():
        if pid != os.getpid():
            with contextlib.suppress(OSError):  # gone, or another user's
                yield pid, _environment(pid, looks)


def _environment(pid: int, looks: Iterator[int]) -> bytes:
    # Within execve(2) a process has none for a while: its new memory is in use before its arguments are there
    # (fs/exec.c; three of four new processes are met so on a busy machine).
    path = f"/proc/{pid}/environ"
    environment = _read(path)
    while not environment:
        within = _within_exec(pid)
        environment = _read(path)  # after that look: it may have come to its end in between
        if environment or not within or next(looks, None) is None:
            break
        time.sleep(EXEC_POLL_S)
    return environment


def _within_exec(pid: int) -> bool:
    fields = _stat(pid)
    has_memory = fields[0] not in b"ZX" and not int(fields[6]) & (PF_EXITING | PF_KTHREAD)
    return has_memory and not int(fields[48])  # env_end
