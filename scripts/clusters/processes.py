"""Processes of an emulated node, and one signal for all of them at the same moment.

Rules of this file: standard library only; it serves the driver of a cluster and the fault that strikes inside one of
its processes alike. A node is the session of its launcher, and whatever left that session but is still a descendant.
The kernel signals a process group in one go, so that no process of a node sees another one die first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Whatever loses its parent below this process becomes its child, and is found by `descendants`."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def require_one_thread() -> None:
    """Raises: RuntimeError if this process, which is about to fork, has more; names them.

    NVML's does not count: it starts with the first question about cards, and forks do without it.
    """
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(path.read_text().strip())
    if len([name for name in names if not re.fullmatch(r"cuda\d+", name)]) > 1:
        raise RuntimeError(f"threads {names} after the imports: forked processes could hang; set OMP_NUM_THREADS=1")


class Entry(NamedTuple):
    """One line of the process table."""

    parent: int
    group: int
    session: int
    state: str


def table() -> dict[int, Entry]:
    """Every process there is, zombies included."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(") ")[2].split()
        except OSError:  # gone meanwhile
            continue
        found[int(name)] = Entry(int(fields[1]), int(fields[2]), int(fields[3]), fields[0])
    return found


def living(leader: int) -> set[int]:
    """The node's processes that are neither dead nor zombies."""
    known = table()
    return {pid for pid in members(leader, known) if known[pid].state not in "ZX"}


def members(leader: int, known: dict[int, Entry]) -> set[int]:
    return {pid for pid, entry in known.items() if entry.session == leader} | descendants({leader}, known)


def descendants(roots: set[int], known: dict[int, Entry]) -> set[int]:
    """`roots` and all below them, as far as parents live."""
    found = roots & set(known)
    while True:
        more = {pid for pid, entry in known.items() if entry.parent in found} - found
        if not more:
            return found
        found |= more


def signal_node(leader: int, number: int) -> None:
    """Send `number` to the whole node; does not return for a SIGKILL from inside it."""
    known = table()
    for pid in members(leader, known):
        if known[pid].group != leader and pid != os.getpid():
            send(pid, number)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def send(pid: int, number: int) -> None:
    """Send a signal as os.kill does; a process that is gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
