"""The agent runs on any CPU of its host, and takes memory where it runs.

It is started by the supervisor of local rank 0, which `deepspeed --bind_cores_to_rank` binds to some CPUs and, by
numactl, to the memory beside them: neither is meant for who serves all ranks of the host.
"""

from __future__ import annotations

import contextlib
import os

from ..transport.linux import libc

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_DEFAULT = 0


def run_anywhere() -> None:
    """Give up what this process was bound to; what is not allowed stays as it is.

    Thread: the main one, before there are others, which inherit it.
    """
    with contextlib.suppress(OSError):  # a cgroup may allow fewer
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is not None:
        libc.syscall(number, _MPOL_DEFAULT, None, 0)
