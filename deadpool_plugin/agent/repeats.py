"""Lines that a lost process had printed and that its replacement prints again are dropped, once each.

A replacement's script goes on right behind the cut of the restore step; what the lost process printed behind that cut
is in its rank's file, wherever it ran, and the event log beside it says where the cut is. A line counts as the same if
its words are, whatever its numbers (times differ), and only within the same step.

Rules of this file: a repeated line is better than a lost one, so whatever cannot be read drops nothing (`output_dir`
may be a folder of each host's own).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from .. import events
from ..core.types import Rank, Step
from .output import LineBuffer, Pipe

Printed = dict[Step, Counter[bytes]]
"""Step -> the words of the lines printed behind its cut, up to the next one, and how often."""

READ_S = 1.0
"""How long a take-over waits for the file system."""
CUTS = (events.StepDone.__name__, events.WorkerResumed.__name__)
_TAIL_BYTES = 1 << 18
_NUMBERS = re.compile(rb"[0-9]+([.:,][0-9]+)*([eE][+-]?[0-9]+)?")


class _Mark(msgspec.Struct):
    event: str
    rank: int = -1
    step: int = -1
    output: int = -1


_decoder = msgspec.json.Decoder(_Mark)


def marked(pipe: Pipe | None, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` of a worker's event; at a cut, with how much the rank has printed before it."""
    if pipe is None or kind not in CUTS:
        return fields
    return {**fields, "output": pipe.cut(int(fields["step"]))}


def printed_since(output_dir: Path, rank: Rank, step: Step) -> Printed:
    """What processes of `rank` had printed behind the cut of `step`, on whichever nodes. Blocks: for the files."""
    found: Printed = {}
    for path in sorted(output_dir.glob(f"rank{rank:04d}.node*.log")):
        with contextlib.suppress(OSError):
            marks = _marks(output_dir / f"events.{path.name.split('.')[1].removeprefix('node')}.jsonl", rank, step)
            for (cut, begin), end in zip(marks.items(), [*list(marks.values())[1:], None], strict=False):
                found[cut] = found.get(cut, Counter()) + _words(path, begin, end)
    return found


def _marks(log: Path, rank: Rank, step: Step) -> dict[Step, int]:
    """Step -> how much had been printed when its cut was made here, from `step` on, in this order."""
    marks: dict[Step, int] = {}
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        for line in file.read().splitlines():
            try:
                mark = _decoder.decode(line)
            except msgspec.DecodeError:  # cut off by where reading began, or by a crash
                continue
            if mark.event == events.NodeJoined.__name__:
                marks.clear()  # what was before is of an earlier job in this folder
            if mark.event in CUTS and mark.rank == rank and mark.step >= step and mark.output >= 0:
                marks.setdefault(mark.step, mark.output)
    return marks


def _words(path: Path, begin: int, end: int | None) -> Counter[bytes]:
    with open(path, "rb") as file:
        file.seek(begin)
        text = file.read(LineBuffer.LINE_BYTES_MAX if end is None else min(end - begin, LineBuffer.LINE_BYTES_MAX))
    return Counter(words(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n"))


def words(line: bytes) -> bytes:
    """What stays the same if the line is printed again."""
    return b" ".join(_NUMBERS.sub(b"#", line).split())


class Repeats:
    """Between a replacement's output and its file: drops what is in `printed`, until the last step of it is over."""

    def __init__(self, printed: Printed, step: Step) -> None:
        self._printed, self._step, self._lines = printed, step, LineBuffer()

    @property
    def over(self) -> bool:
        return not any(self._printed[step] for step in self._printed if step >= self._step)

    def reached(self, step: Step) -> None:
        """What comes from here on is printed behind the cut of `step` (a swap may go back to one before)."""
        self._step = max(self._step, step)

    def without(self, data: bytes) -> bytes:
        """The whole lines among what has come so far that are new; after the last repeated one, all of it."""
        kept = b"".join(line for line in self._lines.feed(data).splitlines(keepends=True) if not self._drop(line))
        return kept + self._lines.flush() if self.over else kept

    def flush(self) -> bytes:
        return self._lines.flush()

    def _drop(self, line: bytes) -> bool:
        left, said = self._printed.get(self._step, Counter()), words(line)
        if left[said] <= 0:
            return False
        left[said] -= 1
        if not left[said]:
            del left[said]
        return True
