"""Process start and reaping, so that nothing outlives the node's launcher; and where a process may run.

Rules of this file: call from the main thread only: a parent-death signal fires when the *thread* that forked ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ..transport.linux import PR_SET_CHILD_SUBREAPER, await_end, die_with_parent, libc, pidfd_open, prctl
from . import proc

Program = Sequence[str] | Callable[[], object]
"""The program of a child: a command line, or (tests, from a process that has imported everything once) a function."""

OOM_SCORE_ADJ_MAX = "1000"
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_DEFAULT = 0


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
) -> int:
    """Start `program` as a child that gets `death_signal` when we end. Returns: its pid.

    Args:
        output: descriptor for its standard output and error; None: ours.
        pass_fds: descriptors it keeps under the same numbers.
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


def become_subreaper() -> None:
    """Adopt the orphans of our descendants, in the place of the host's process 1. Raises: OSError."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def be_the_first_to_go() -> None:
    """Let the kernel, when memory is short, end this process or what it will fork before any other."""
    # An agent whose arenas count as its own would come first, and with it a whole node goes.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE_ADJ_MAX)


def reset_affinity() -> None:
    """Let this process run on any CPU of its host, and take memory where it runs; what is not allowed stays as it is.

    Thread: the main one, before there are others, which inherit it.
    """
    # The supervisor of local rank 0, which starts the agent, is bound by `deepspeed --bind_cores_to_rank` to some CPUs
    # and, by numactl, to the memory beside them: neither is meant for what serves all ranks of the host.
    with contextlib.suppress(OSError):  # a cgroup may allow fewer
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is not None:
        libc.syscall(number, _MPOL_DEFAULT, None, 0)


def reaped() -> Iterator[tuple[int, int]]:
    """Reap every child that has ended: its pid, and its exit code as in subprocess."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def end_children(within_s: float) -> None:
    """SIGKILL every child, and theirs as they become ours, until none is left. Blocks: until they have ended.

    Raises: TimeoutError naming one that had not after `within_s`.
    """
    deadline = time.monotonic() + within_s
    while found := proc.children(os.getpid()):
        for pid in found:  # a thread may have waited for its own meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                pidfd = pidfd_open(pid)
                try:
                    if not await_end(pidfd, deadline - time.monotonic()):
                        state = status.state if (status := proc.look(pid)) else "X"
                        raise TimeoutError(f"process {pid} was killed and does not end (state {state})")
                finally:
                    os.close(pidfd)
                os.waitpid(pid, 0)
