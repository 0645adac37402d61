"""When nothing that was cut can write into a tensor any more, however late its threads get a CPU.

What can still write are gloo's event loops, which read what has arrived, and torch's threads, which wait for them and
reduce. A cut wakes the loops; each sleeps again once it has found its connections ended, and so does a thread it has
woken, once that has reduced. Each must be seen asleep twice, loops first: the first time it may only wait for a lock.
Of an operation that never ends (waits.py; gloo's race) torch's thread sleeps with such a lock in hand, and the loop
asks for it again and again for as long as the process lives: one that has run for _TURNS_S has done all it can.

Rules of this file: Linux; a thread that has ended is at rest.
Source: proc_pid_stat(5); gloo, transport/tcp/pair.cc (handleEvents tries its lock only).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from ..transport import linux

_RUN_LOOP = b"pt_gloo_runloop"
_TURNS_S = 0.05
"""CPU time of about a thousand turns of a loop."""
_LOOK_S = 0.001


def await_rest(loops: Iterable[str], stop: Callable[[], bool]) -> bool:
    """Wait until gloo's threads have come to rest after a cut; False if `stop()` first.

    Args:
        loops: the threads of the event loops whose connections were cut.
    """
    reducing = {thread for thread in linux.threads() if linux.of_thread(thread, "comm").strip() == _RUN_LOOP}
    return all(_sleep_or_turn(loops, _TURNS_S, stop) and _sleep_or_turn(reducing, None, stop) for _ in range(2))


def _sleep_or_turn(threads: Iterable[str], turns_s: float | None, stop: Callable[[], bool]) -> bool:
    """Until each of them has been seen asleep or has run for `turns_s` (None: however long it runs)."""
    began_s = {thread: _looked_at(thread)[1] for thread in threads}
    while began_s:
        for thread, before_s in list(began_s.items()):
            runs, cpu_s = _looked_at(thread)
            if not runs or (turns_s is not None and cpu_s - before_s >= turns_s):
                del began_s[thread]
        if began_s and stop():
            return False
        time.sleep(_LOOK_S if began_s else 0.0)
    return True


def _looked_at(thread: str) -> tuple[bool, float]:
    """Find out whether it runs, or would if it got a CPU, and how long it has had one so far, in seconds."""
    fields = linux.of_thread(thread, "stat").rpartition(b")")[2].split()
    if not fields:
        return False, 0.0
    return fields[0] not in b"SZX", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
