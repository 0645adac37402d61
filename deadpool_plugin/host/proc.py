"""Processes of this host: started and ended, looked at in /proc, and those of one node watched and paused.

Rules of this file: a process that has gone is an answer, not an error. Spawn from the main thread only: a parent-death
signal fires when the *thread* that forked ends.
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
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ..transport.linux import await_end, die_with_parent, libc, pidfd_open
from ..transport.tasks import call_at_multiple

T = TypeVar("T")
Program = Sequence[str] | Callable[[], object]
"""The program of a child: a command line, or (tests, from a process that has imported everything once) a function."""
PF_EXITING = 0x4
PF_SIGNALED = 0x400
PF_KTHREAD = 0x200000
ROUNDS_MAX = 10
EXEC_LOOKS_MAX = 500
"""A number, not a time: where the CPUs are busy this process looks less often, too."""
EXEC_POLL_S = 0.001
POLL_S = 0.025
STAT_BYTES = 1024
TAG = "DEADPOOL_TAG"
"""Environment variable every worker is started with: "<launcher pid>.<its start time>.<local rank>."."""
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_log = logging.getLogger(__name__)


# ---- starting and ending


def ending_signals() -> list[signal.Signals]:
    """List the signals that end a process from outside; SIGHUP is not among them where it is ignored (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT] + ([] if ignored else [signal.SIGHUP])


def spawn(
    program: Program,
    env: Mapping[str, str],
    death_signal: int,
    output: int | None = None,
    pass_fds: Sequence[int] = (),
    apart: bool = False,
) -> int:
    """Start `program` as a child that gets `death_signal` when we end; return its pid.

    Args: output: descriptor for its standard output and error; None: ours. pass_fds: those it keeps as they are.
    apart: in a session of its own, without our standard input: a program that is none of ours.
    """
    me = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for number in ending_signals():
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(death_signal, me)
        if apart:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores, and a shell's pipes rely on
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        for fd in pass_fds:
            os.set_inheritable(fd, True)
        if callable(program):
            os.environ.clear()
            os.environ.update(env)
            program()
            os._exit(0)
        os.execvpe(program[0], list(program), dict(env))
    except OSError as error:
        os.write(2, f"[deadpool] cannot start {program}: {error}\n".encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(127)


def be_the_first_to_go() -> None:
    """Let the kernel, when memory is short, end this process or what it will fork before any other."""
    # An agent whose arenas count as its own would come first, and with it a whole node goes.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def reset_affinity() -> None:
    """Let this process run on any CPU, and take memory where it runs. Thread: the main one, before there are others."""
    # The supervisor of local rank 0, which starts the agent, is bound by `deepspeed --bind_cores_to_rank` to some CPUs
    # and, by numactl, to the memory beside them: neither is meant for what serves all ranks of the host.
    with contextlib.suppress(OSError):  # a cgroup may allow fewer
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is not None:
        libc.syscall(number, 0, None, 0)  # MPOL_DEFAULT


def come_first() -> None:
    """Let this thread run before all others of the host, where that is permitted; the threads it starts do not."""
    # A heartbeat takes well below a millisecond and must not wait for the trainers' turns. What copies and checks
    # snapshots is on other threads, and leaves the CPUs to them.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def reaped() -> Iterator[tuple[int, int]]:
    """Reap every child that has ended: its pid, and its exit code as in subprocess."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def end_children(within_s: float, spared: Collection[int] = ()) -> None:
    """SIGKILL every child but those `spared`, and theirs as they become ours, and wait for their ends.

    Raises: TimeoutError, which names one that had not ended within `within_s`.
    """
    deadline = time.monotonic() + within_s
    while found := set(children(os.getpid())).difference(spared):
        _signal(found, signal.SIGKILL)  # a thread may have waited for its own meanwhile
        for pid in found:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                pidfd = pidfd_open(pid)
                try:
                    if not await_end(pidfd, deadline - time.monotonic()):
                        state = status.state if (status := look(pid)) else "X"
                        raise TimeoutError(f"process {pid} was killed and does not end (state {state})")
                finally:
                    os.close(pidfd)
                os.waitpid(pid, 0)


def memory_of(pid: int) -> tuple[int, int]:
    """Read how many bytes of memory `pid` takes, shared ones in parts, and how many it had at most. 0 if it is gone."""
    try:
        taken = _read(f"/proc/{pid}/smaps_rollup").partition(b"\nPss:")[2].split()
        most = _read(f"/proc/{pid}/status").partition(b"\nVmHWM:")[2].split()
        return int(taken[0]) * 1024, int(most[0]) * 1024
    except (OSError, IndexError):
        return 0, 0


# ---- looking


class SpareDescriptor:
    """A descriptor that is given up for a moment where there is no other one to look at /proc with."""

    def __init__(self) -> None:
        self._fd = -1
        self._lock = threading.RLock()

    def keep(self) -> None:
        if self._fd < 0:
            self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def call(self, work: Callable[[], T]) -> T:
        """Do `work`, for which there is a descriptor unless another thread is quicker. Raises: OSError."""
        try:
            return work()
        except OSError as error:
            if error.errno not in _TOO_MANY or self._fd < 0:
                raise
        with self._lock:  # a process that is blind would take a living one for one that has gone
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
    """Read the fields of proc_pid_stat(5) from the third on."""
    return _read(f"{folder}/{pid}/stat").rpartition(b") ")[2].split()


class ProcessStatus(msgspec.Struct, frozen=True):
    """One look at a process. `exit_code`: as in subprocess once it is `ending`; None if not known (yet), never 0."""

    state: str
    ending: bool = False
    exit_code: int | None = None

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
        return ProcessStatus(state)
    status = int(fields[49])
    if not status and flags & PF_SIGNALED:  # else 0 may be the code by which a thread of the process has ended it
        with contextlib.suppress(OSError):
            if b"\nCoreDumping:\t1\n" in _read(f"{folder}/{pid}/status"):
                status = int(signal.SIGSEGV)  # or one like it: older kernels say which only when the dump is written
    return ProcessStatus(state, True, os.waitstatus_to_exitcode(status) if status else None)


class StatFile:
    """The file /proc/PID/stat of one process, kept open: a look costs a fourth, and never meets another of that pid."""

    def __init__(self, pid: int) -> None:
        self._path, self._fd = f"/proc/{pid}/stat", -1

    def is_running(self) -> bool:
        """Return whether `look` would find nothing to tell: neither the process's end nor a stop."""
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            line = os.pread(self._fd, STAT_BYTES, 0)
        except OSError:  # it is gone, or no descriptor is left: `look` tells
            return False
        fields = line[line.rindex(b") ") + 2 :].split(b" ", 7)
        return fields[0] not in b"ZXTt" and not int(fields[6]) & (PF_EXITING | PF_SIGNALED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def catches(pid: int, number: int) -> bool:
    """Return whether `pid` has a handler of its own for signal `number`."""
    try:
        mask = int(_read(f"/proc/{pid}/status").partition(b"\nSigCgt:\t")[2].split()[0], 16)
    except (OSError, IndexError):  # gone
        return False
    return bool(mask >> (number - 1) & 1)


def start_time(pid: int) -> int:
    """Read when `pid` was started (clock ticks since boot), which names a process for good together with the pid."""
    return int(_stat(pid)[19])


def _pids() -> list[int]:
    return [int(name) for name in reserve.call(lambda: os.listdir("/proc")) if name.isdigit()]


def children(pid: int) -> list[int]:
    """Find the processes that any thread of `pid` has started, zombies included."""
    found = []
    for one in _pids():
        with contextlib.suppress(OSError):  # gone meanwhile
            if int(_stat(one)[1]) == pid:
                found.append(one)
    return found


def sweep(tag: str) -> int:
    """Kill all `tagged` processes, grandchildren in sessions of their own included; return how many there were."""
    return len(kill_all(lambda: tagged(tag)))


def kill_all(find: Callable[[], Iterable[int]]) -> set[int]:
    """SIGKILL every process that `find` finds, until it finds no other one (they may fork); return their pids."""
    killed: set[int] = set()
    for _ in range(ROUNDS_MAX):
        found = set(find()) - killed
        if not found:
            break
        _signal(found, signal.SIGKILL)
        killed |= found
    return killed


def kill_group(pid: int) -> None:
    """SIGKILL the child `pid`, which was started apart and is not reaped, and what is in its process group."""
    for kill in (os.killpg, os.kill):  # it may have no group of its own yet
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def tagged(tag: str) -> list[int]:
    """Find every process whose initial environment carries a tag that begins with `tag`."""
    wanted = f"{TAG}={tag}".encode()
    return [pid for pid, found in environments() if found.startswith(wanted) or b"\0" + wanted in found]


def environments() -> Iterator[tuple[int, bytes]]:
    """Read the initial environment of every process but this one; wait for those within execve(2), but not for ever."""
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
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-exit_code, f'signal {-exit_code}')}"


@dataclass
class _Watched:
    on_end: Callable[[int], None]
    on_stopped: Callable[[float], None]
    stat: StatFile
    stopped_since: float | None = None
    told_stopped: bool = False


class Processes:
    """The processes whose tag begins with `job_tag`, looked at every `POLL_S`. Thread: the event loop's only."""

    def __init__(self, job_tag: str, silent_after_s: float) -> None:
        self._job_tag, self._silent_after_s = job_tag, silent_after_s
        self._watched: dict[int, _Watched] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._paused: set[int] = set()
        self._said = False

    def start(self) -> None:
        reserve.keep()
        self._poll()

    def watch(self, pid: int, on_end: Callable[[int], None], on_stopped: Callable[[float], None]) -> None:
        """Call `on_end(exit_code)` once `pid` ends, and `on_stopped(seconds)` once it has stood still for too long."""
        # A code of 0 is not told: the kernel shows 0 also while it is not known yet; the process's parent knows.
        self.forget(pid)
        self._watched[pid] = _Watched(on_end, on_stopped, StatFile(pid))

    def forget(self, pid: int) -> None:
        if (watched := self._watched.pop(pid, None)) is not None:
            watched.stat.close()

    def is_gone(self, pid: int) -> bool:
        status = look(pid)
        return status is None or status.ending

    def has_left(self, pid: int) -> bool:
        """Return whether no thread of `pid` is left, and so none that has memory of a device."""
        try:
            fields = _stat(pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        return fields[0] in (b"Z", b"X") and int(fields[17]) <= 1  # the main thread may have ended before others

    catches = staticmethod(catches)

    def kill(self, pid: int) -> None:
        _signal([pid], signal.SIGKILL)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of `pid` if it is ending and that is known; 0 never is."""
        return status.exit_code if (status := look(pid)) else None

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
        paused, self._paused = self._paused, set()
        _signal(paused, signal.SIGCONT)

    def kill_paused(self) -> None:
        """End all that were paused without letting them go on."""
        paused, self._paused = self._paused, set()
        _signal(paused, signal.SIGKILL)

    def close(self) -> None:
        for pid in list(self._watched):
            self.forget(pid)
        if self._timer is not None:
            self._timer.cancel()

    def _poll(self) -> None:
        # A timer and no task: where nothing happens, an agent's main cost is to wake up; with the default patience its
        # ticks are due at the same moment. The event loop's exception handler hears of a look that has failed, once:
        # the agent ends by it.
        for pid, watched in list(self._watched.items()):
            if self._watched.get(pid) is not watched:
                continue  # what was told of another has had it forgotten
            if watched.stat.is_running():
                watched.stopped_since = None
                continue
            try:
                self._look(pid, watched)
            except OSError as error:  # too many open files: the next look may have one
                if error.errno not in _TOO_MANY:
                    raise
                if not self._said:
                    self._said = True
                    said = "cannot look at the processes of this host: %s; it is tried again and not said again"
                    _log.warning(said, error)
        self._timer = call_at_multiple(asyncio.get_running_loop(), POLL_S, self._poll)

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
