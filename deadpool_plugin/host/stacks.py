"""The Python stack of a process of this host, which a signal has it write: also of one that hangs and holds the GIL.

Source: faulthandler of the standard library; tgkill(2).
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import signal

from ..transport.linux import MFD_CLOEXEC, memfd_create, tgkill
from .proc import look

STACK_SIGNAL, STACKS_SIGNAL = signal.SIGRTMAX - 2, signal.SIGRTMAX - 3
"""Numbers that neither a scheduler nor a framework uses: write the stack of the thread that gets it, of all threads."""
STACK_POLL_S, STACK_POLLS = 0.05, 10
FRAMES_MAX = 24
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def write_stacks() -> int:
    """Have signals write the Python stacks of this process into a file in memory. Returns: its descriptor."""
    # The handlers are C and take no interpreter lock: they work in a process that holds it in a call that hangs.
    file = memfd_create("deadpool-stacks", MFD_CLOEXEC)
    faulthandler.register(STACK_SIGNAL, file, all_threads=False)
    faulthandler.register(STACKS_SIGNAL, file, all_threads=True)
    return file


def frames_of(stacks: str) -> tuple[str, ...]:
    """Find the frames of the main thread in what `write_stacks` has made a process write, innermost first."""
    sections: list[list[str]] = [[]]
    for line in stacks.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x", "Stack (most recent")):
            sections.append([])
        elif found := _FRAME.match(line):
            sections[-1].append(f"{found[3]} ({found[1]}:{found[2]})")
    return tuple(sections[-1][:FRAMES_MAX])  # of many threads the first one is the last


class Stacks:
    """The file into which process `pid` writes its Python stack when it is told to."""

    def __init__(self, file: int, pid: int) -> None:
        self._file, self._pid = file, pid

    async def read(self) -> str:
        """Return the stack of now, or why there is none. Takes a second at most."""
        try:
            file, before = os.dup(self._file), os.fstat(self._file).st_size  # it may be closed meanwhile
        except OSError:
            return "no stack: the process has ended"
        try:
            os.kill(self._pid, STACK_SIGNAL)
            if not (size := await _grown(file, before)):
                # The kernel holds its main thread, whose stack another thread can write, too.
                threads = (int(name) for name in os.listdir(f"/proc/{self._pid}/task") if int(name) != self._pid)
                if (thread := next(threads, None)) is not None:
                    tgkill(self._pid, thread, STACKS_SIGNAL)
                    size = await _grown(file, before)
            state = status.state if (status := look(self._pid)) else "X"
            return os.pread(file, size, before).decode(errors="replace") if size else f"no stack: its state is {state}"
        except OSError as error:
            return f"no stack: {error.strerror}"
        finally:
            os.close(file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


async def _grown(file: int, before: int) -> int:
    """Return by how much `file` has grown, once it does not grow any more."""
    size = before
    for _ in range(STACK_POLLS):
        await asyncio.sleep(STACK_POLL_S)
        last, size = size, os.fstat(file).st_size
        if before < size == last:
            break
    return size - before
