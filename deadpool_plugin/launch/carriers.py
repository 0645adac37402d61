"""Processes of this host that belong to a job of `deadpool launch`: those that were started with its configuration.

Rules of this file: read from /proc; a process that has gone, or is another user's, is none of ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..host import proc
from .argv import RUN

LAUNCHERS_OWN = f"{proc.TAG}=launch.".encode()
"""In the environment of deepspeed's runner, pdsh and its ssh clients, where the launcher is on a host of the job: they
name the folder, too, and are the launcher's to end."""
_RUN = (b"-m", RUN.encode())
_LAUNCH = b"deepspeed.launcher.launch"


def carriers(folder: Path) -> set[int]:
    """launch.py and the shell that started it, supervisors, agent, standby processes, workers, in whatever session."""
    return {pid for pid, _ in _carrying(folder)}


def supervisors(folder: Path) -> set[int]:
    """Those of `carriers` that pass a signal on to the job."""
    return {pid for pid, command in _carrying(folder) if _is_supervisor(command)}


def _is_supervisor(command: list[bytes]) -> bool:
    """launch.py names our module too."""
    return _LAUNCH not in command and any(pair == _RUN for pair in zip(command, command[1:], strict=False))


def kill_all(folder: Path) -> set[int]:
    """SIGKILL them all, and what they start meanwhile; their pids."""
    return proc.kill_all(lambda: carriers(folder))


def _carrying(folder: Path) -> Iterator[tuple[int, list[bytes]]]:
    """(pid, command line). Supervisors and their ancestors name the folder on the command line, their descendants in
    the environment."""
    wanted = os.fsencode(folder) + b"/"
    for pid, environment in proc.environments():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        named = wanted in command and _RUN[1] in command and LAUNCHERS_OWN not in environment
        if named or b"DEADPOOL_CONFIG=" + wanted in environment:
            yield pid, command.split(b"\0")
