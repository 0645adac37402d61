"""Processes of this host: facts about them from /proc, and those of one node watched, paused and ended.

Rules of this file: a process that has gone is an answer, not an error. The watch says what it saw, once per process;
what it means is decided elsewhere.
Source: proc_pid_stat(5); PF_EXITING shows 1.5-5 ms after SIGKILL, while a pidfd or an end of file come only after
the memory is torn down (about 100 ms per GiB). It shows only after a core dump, PF_SIGNALED before it; a main thread
that has that does not go back to its program (kernel/signal.c, get_signal).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

T = TypeVar("T")
PF_EXITING = 0x4
PF_SIGNALED = 0x400
PF_KTHREAD = 0x200000
ROUNDS_MAX = 10
EXEC_LOOKS_MAX = 500
"""A number, not a time: where the CPUs are busy this process looks less often, too."""
EXEC_POLL_S = 0.001
POLL_S = 0.03
TAG = "DEADPOOL_TAG"
"""Environment variable every worker is started with: "<launcher pid>.<its start time>.<local rank>."."""
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_log = logging.getLogger(__name__)


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
            if error.errno not in _TOO_MANY or self._fd < 0:
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
    def read() -> bytes:
        with open(path, "rb", buffering=0) as file:
            return file.read()

    return reserve.call(read)


def _stat(pid: int, folder: str = "/proc") -> list[bytes]:
    """Read the fields of proc_pid_stat(5) from the third on. Raises: OSError if there is no such process."""
    return _read(f"{folder}/{pid}/stat").rpartition(b") ")[2].split()


class ProcessStatus(msgspec.Struct, frozen=True):
    """One look at a process. `wait_status`: as from waitpid once it is `ending`; 0 may mean not known yet."""

    state: str
    ending: bool
    wait_status: int

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"

    @property
    def exit_code(self) -> int | None:
        """The exit code as in subprocess, None if it is not known (yet); never 0."""
        return os.waitstatus_to_exitcode(self.wait_status) if self.ending and self.wait_status else None


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
    """Find the processes that any thread of `pid` has started, zombies included. Costs about 10 us a process."""
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
    """Kill all `tagged` processes, grandchildren in sessions of their own included; return how many there were."""
    return len(kill_all(lambda: tagged(tag)))


def kill_all(look: Callable[[], Iterable[int]]) -> set[int]:
    """SIGKILL every process that `look` finds, until it finds no other one (they may fork); return their pids."""
    killed: set[int] = set()
    for _ in range(ROUNDS_MAX):
        found = set(look()) - killed
        if not found:
            break
        _signal(found, signal.SIGKILL)
        killed |= found
    return killed


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def tagged(tag: str) -> list[int]:
    """Find every process whose initial environment carries a tag that begins with `tag`."""
    wanted = f"{TAG}={tag}".encode()
    return [pid for pid, found in environments() if found.startswith(wanted) or b"\0" + wanted in found]


def environments() -> Iterator[tuple[int, bytes]]:
    """Read the initial environment of every process but this one. Costs about 10 us a process.

    Waits for those within execve(2), by EXEC_LOOKS_MAX further looks in all.
    """
    looks = iter(range(EXEC_LOOKS_MAX))
    for pid in _pids():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):  # gone, or another user's
            # Within execve(2) a process has none for a while: its new memory is in use before its arguments are there
            # (fs/exec.c; three of four new processes are met so on a busy machine).
            while not (environment := _read(f"/proc/{pid}/environ")):
                within = _within_exec(pid)
                environment = _read(f"/proc/{pid}/environ")  # after that look: it may have come to its end in between
                if environment or not within or next(looks, None) is None:
                    break
                time.sleep(EXEC_POLL_S)
            yield pid, environment


def _within_exec(pid: int) -> bool:
    fields = _stat(pid)
    has_memory = fields[0] not in b"ZX" and not int(fields[6]) & (PF_EXITING | PF_KTHREAD)
    return has_memory and not int(fields[48])  # env_end


def described_exit(exit_code: int) -> str:
    """Describe an exit code for people."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


@dataclass
class _Watched:
    on_end: Callable[[int], None]
    on_stopped: Callable[[float], None]
    stopped_since: float | None = None
    told_stopped: bool = False


class Processes:
    """The processes whose tag begins with `job_tag`, looked at every few tens of milliseconds.

    Thread: the event loop's only, from `start` on.
    """

    def __init__(self, job_tag: str, silent_after_s: float) -> None:
        self._job_tag, self._silent_after_s = job_tag, silent_after_s
        self._watched: dict[int, _Watched] = {}
        self._task: asyncio.Task[None] | None = None
        self._paused: set[int] = set()
        self._said = False

    def start(self) -> None:
        reserve.keep()
        self._task = asyncio.get_running_loop().create_task(self._run())
        # A watch that has failed must not go unnoticed: the loop's exception handler gets its error.
        self._task.add_done_callback(lambda task: task.cancelled() or task.result())

    def watch(self, pid: int, on_end: Callable[[int], None], on_stopped: Callable[[float], None]) -> None:
        """Call `on_end(exit_code)` once `pid` ends, and `on_stopped(seconds)` once it has stood still for the patience.

        An exit code of 0 is not told: the kernel shows 0 also while it is not known yet; the process's parent knows.
        """
        self._watched[pid] = _Watched(on_end, on_stopped)

    def forget(self, pid: int) -> None:
        self._watched.pop(pid, None)

    def is_gone(self, pid: int) -> bool:
        """Return whether `pid` has ended, or is ending."""
        status = look(pid)
        return status is None or status.ending

    def catches(self, pid: int, number: int) -> bool:
        return catches(pid, number)

    def kill(self, pid: int) -> None:
        _signal([pid], signal.SIGKILL)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of `pid` if it is ending and that is known; 0 never is."""
        status = look(pid)
        return status.exit_code if status is not None else None

    def sweep(self, local_rank: int) -> None:
        """End all that was started for `local_rank`, also what that has started."""
        sweep(f"{self._job_tag}{local_rank}.")

    def pause(self, running: Mapping[int, int], others: Mapping[int, int]) -> None:
        """Stop all of `running` (local rank -> process) at once, then what they have started. Blocks: about 10 ms.

        A process that is paused is not taken for stuck; one that had been stopped before stays so.
        `others`: local rank -> the process that looks after it, which goes on.
        """
        met, found = set[int](), {*running.values()}
        while found:
            for pid in found:
                status = look(pid)
                if status is not None and not status.stopped:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)
                        self._paused.add(pid)
            met |= found
            # Until there is no other one: they may fork meanwhile. The scan of all of /proc takes long: a second one is
            # for a slot that runs no rank now.
            found = {*tagged(self._job_tag)} - {*others.values()} - met
            for local_rank in others.keys() - {*running}:
                found -= {*tagged(f"{self._job_tag}{local_rank}.")}

    def resume(self) -> None:
        """Let all go on that were paused."""
        paused, self._paused = self._paused, set()
        _signal(paused, signal.SIGCONT)

    def kill_paused(self) -> None:
        """End all that were paused without letting them go on."""
        paused, self._paused = self._paused, set()
        _signal(paused, signal.SIGKILL)

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
                    if error.errno not in _TOO_MANY:
                        raise
                    if not self._said:
                        self._said = True
                        said = "cannot look at the processes of this host: %s; it is tried again and not said again"
                        _log.warning(said, error)
            await asyncio.sleep(POLL_S)

    def _look(self, pid: int, watched: _Watched) -> None:
        status = look(pid)
        if status is None:
            self.forget(pid)
        elif status.ending:
            if (exit_code := status.exit_code) is not None:
                self.forget(pid)
                watched.on_end(exit_code)
        elif not status.stopped or pid in self._paused:
            watched.stopped_since = None
        else:
            now = time.monotonic()
            since = watched.stopped_since = watched.stopped_since or now
            if now - since >= self._silent_after_s and not watched.told_stopped:
                watched.told_stopped = True
                watched.on_stopped(now - since)
