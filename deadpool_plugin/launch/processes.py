"""Parent-death signals and process start, so that nothing outlives the node's launcher.

Rules of this file: call from the main thread only (a parent-death signal fires when the *thread* that forked ends);
no torch. Source: prctl(2), PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(death_signal: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Let the kernel send this process `death_signal` when its parent ends; at once if it has ended already.

    Args:
        parent: the expected parent; None takes the present one (one that died before the call is not noticed then).
    """
    expected = os.getppid() if parent is None else parent
    if _libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != expected:
        os.kill(os.getpid(), death_signal)


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    death_signal: int,
    output: int | None = None,
    pass_fds: Sequence[int] = (),
) -> int:
    """Start `argv` as a child that gets `death_signal` when we end; its pid.

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
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(death_signal, me)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        for fd in pass_fds:
            os.set_inheritable(fd, True)
        os.execvpe(argv[0], list(argv), dict(env))
    except BaseException as error:
        os.write(2, f"[deadpool] cannot start {argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)
