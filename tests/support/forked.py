"""Run functions in forked processes with a hard deadline, and say where everybody was if it passes.

Rules of this file: fork happens on the main thread, from a process that has started no thread of its own. Children
meet through `Cell`s made before the fork. Nothing waits by sleeping: a cell is a pipe one can poll. Every child dies
with its parent, and a child's fault handler dumps all its threads on SIGUSR1.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from . import expect

_PR_SET_PDEATHSIG = 1


class Cell:
    """A value set once by one process and read by any number of them; make it before the fork."""

    def __init__(self, capacity_bytes: int = 1 << 20) -> None:
        self._memory = mmap.mmap(-1, capacity_bytes)
        self._read, self._write = os.pipe()

    def set(self, value: Any = None) -> None:
        data = pickle.dumps(value)
        self._memory[: len(data)] = data
        os.write(self._write, b"!")

    def get(self) -> Any:
        """Block until it is set."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        poll.poll()
        return pickle.loads(self._memory[:])

    def is_set(self) -> bool:
        return bool(select.select([self._read], [], [], 0)[0])


@dataclass(frozen=True)
class Outcome:
    """Outcome of a child: what its function returned, or the traceback it raised, or the signal that killed it."""

    value: Any = None
    error: str | None = None
    signal: int | None = None


@dataclass
class _Child:
    pid: int
    result: int
    log: IO[bytes]
    received: bytearray
    ended: bool = False


class Fleet:
    """Forked children; leave the `with` block and all of them are gone.

    Example:
        with Fleet(deadline_s=30) as fleet:
            ranks = [fleet.fork(function, rank) for rank in range(4)]
            outcomes = fleet.wait(ranks)
    """

    def __init__(self, deadline_s: float = 60.0) -> None:
        self._deadline = time.monotonic() + deadline_s
        self._children: list[_Child] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            self._signal(child, signal.SIGKILL)
            if not child.ended:
                os.waitpid(child.pid, 0)
            os.close(child.result)
            child.log.close()

    def fork(self, function: Callable[..., Any], *args: Any) -> int:
        """Start `function(*args)` in a child; returns its number in this fleet."""
        read, write = os.pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit of the fleet
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _child(parent, write, log, function, args)
        os.close(write)
        self._children.append(_Child(pid, read, log, bytearray()))
        return len(self._children) - 1

    def kill(self, number: int, signum: int = signal.SIGKILL) -> None:
        os.kill(self._children[number].pid, signum)

    def until(self, *cells: Cell) -> None:
        """Block until every cell is set; fail at the deadline, or as soon as a child ends with an error."""
        for cell in cells:
            while not cell.is_set():
                self._turn([cell._read])
                for child in self._children:
                    if child.ended and self._outcome(child).error is not None:
                        raise AssertionError(self._report(f"a child failed: {self._outcome(child).error}"))

    def wait(self, numbers: list[int]) -> list[Outcome]:
        """The outcomes of these children; fail at the deadline with everybody's stacks."""
        while not all(self._children[number].ended for number in numbers):
            self._turn([])
        return [self._outcome(self._children[number]) for number in numbers]

    def values(self, numbers: list[int]) -> list[Any]:
        """As `wait`, of children that must all return."""
        outcomes = self.wait(numbers)
        for number, outcome in zip(numbers, outcomes, strict=True):
            if outcome.error is not None or outcome.signal is not None:
                raise AssertionError(self._report(f"child {number} ended with {outcome.error or outcome.signal}"))
        return [outcome.value for outcome in outcomes]

    def _turn(self, others: list[int]) -> None:
        """Take in what children wrote, until something happens or the deadline passes."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise AssertionError(self._report("the deadline passed; stacks of all children:", stacks=True))
        open_ones = {child.result: child for child in self._children if not child.ended}
        ready, _, _ = select.select([*open_ones, *others], [], [], left)
        for descriptor in ready:
            child = open_ones.get(descriptor)
            if child is None:
                continue
            data = os.read(descriptor, 1 << 20)
            child.received += data
            if not data:
                child.ended = True
                _, status = os.waitpid(child.pid, 0)
                if os.WIFSIGNALED(status):
                    child.received = bytearray(pickle.dumps(Outcome(signal=os.WTERMSIG(status))))

    @staticmethod
    def _outcome(child: _Child) -> Outcome:
        return expect(Outcome, pickle.loads(bytes(child.received)))

    def _signal(self, child: _Child, signum: int) -> None:
        if not child.ended:
            os.kill(child.pid, signum)

    def _report(self, headline: str, *, stacks: bool = False) -> str:
        if stacks:
            for child in self._children:
                self._signal(child, signal.SIGUSR1)
            time.sleep(1.0)  # the job is lost already; let the dumps be written
        parts = [headline]
        for number, child in enumerate(self._children):
            child.log.seek(0)
            state = "ended" if child.ended else "alive"
            parts.append(f"---- child {number} (pid {child.pid}, {state})\n{child.log.read().decode(errors='replace')}")
        return "\n".join(parts)


def _child(parent: int, result: int, log: IO[bytes], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    try:
        outcome = Outcome(value=function(*args))
    except BaseException:
        outcome = Outcome(error=traceback.format_exc())
    try:
        data = pickle.dumps(outcome)
    except Exception:
        data = pickle.dumps(Outcome(error=f"the value cannot be pickled: {traceback.format_exc()}"))
    while data:
        data = data[os.write(result, data) :]
    os._exit(0)
