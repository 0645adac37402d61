"""Output that a lost process had printed and that its replacement prints again: such lines are dropped, once each.

A replacement's script goes on right behind the cut of the restore step. What the lost process printed behind that cut
is in its rank's file, wherever it ran, and the files of cuts beside it say where the cut is. A line counts as the same
if its words are, whatever its numbers (times differ), and only within the same step.

Rules of this file: a repeated line is better than a lost one, so whatever cannot be read drops nothing (`output_dir`
may be a folder of each host's own).
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path

import msgspec

from .. import events
from ..core.types import Rank, Step

Printed = dict[Step, Counter[bytes]]
"""Step -> the words of the lines printed behind its cut, up to the next one, and how often."""

READ_S = 1.0
"""How long a take-over waits for the file system."""
CUTS = (events.StepDone.__name__, events.WorkerResumed.__name__)
LINE_BYTES_MAX = 64 << 10
_NUMBERS = re.compile(rb"[0-9]+([.:,][0-9]+)*([eE][+-]?[0-9]+)?")


class LineBuffer:
    """A stream in whole lines, so that those of several ranks do not mix."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Take in `data`; return the whole lines that may be forwarded now."""
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) > LINE_BYTES_MAX:
            end = len(data)
        self._rest = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        rest, self._rest = self._rest, b""
        return rest


class Cut(msgspec.Struct, frozen=True):
    """`output`: bytes in the rank's file of this node that were printed before the cut. `job`: as in Credentials."""

    job: str
    rank: Rank
    step: Step
    output: int


_decoder = msgspec.json.Decoder(Cut)


def cuts_of(folder: Path, node: int | str) -> tuple[Path, Path]:
    return folder / f"cuts.{node}.0.jsonl", folder / f"cuts.{node}.1.jsonl"


def printed_since(output_dir: Path, job: str, rank: Rank, step: Step) -> Printed:
    """Read what processes of `rank` printed after the cut of `step`, on any node of `job`. Blocks: for the files."""
    found: Printed = {}
    for path in sorted(output_dir.glob(f"rank{rank:04d}.node*.log")):
        with contextlib.suppress(OSError):
            cuts = _cuts(cuts_of(output_dir, path.name.split(".")[1].removeprefix("node")), job, rank, step)
            for (cut, begin), end in zip(cuts.items(), [*list(cuts.values())[1:], None], strict=False):
                found[cut] = found.get(cut, Counter()) + _words(path, begin, end)
    return found


def _cuts(files: tuple[Path, Path], job: str, rank: Rank, step: Step) -> dict[Step, int]:
    """Return how much had been printed when each cut from `step` on was first made here, in this order."""
    cuts: list[Cut] = []
    for line in b"".join(file.read_bytes() for file in files).splitlines():
        with contextlib.suppress(msgspec.DecodeError):  # cut off by a crash
            cuts.append(_decoder.decode(line))
    first: dict[Step, int] = {}
    for cut in sorted(cuts, key=lambda cut: (cut.output, cut.step)):  # what a rank has printed here never gets less
        if (cut.job, cut.rank) == (job, rank) and cut.step >= step:
            first.setdefault(cut.step, cut.output)
    return first


def _words(path: Path, begin: int, end: int | None) -> Counter[bytes]:
    with open(path, "rb") as file:
        file.seek(begin)
        text = file.read(LINE_BYTES_MAX if end is None else min(end - begin, LINE_BYTES_MAX))
    return Counter(words(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n"))


def words(line: bytes) -> bytes:
    """Return the part of a line that stays the same if it is printed again."""
    return b" ".join(_NUMBERS.sub(b"#", line).split())


class Repeats:
    """A filter before a replacement's file, which drops what is in `printed` until the last step of it is over."""

    def __init__(self, printed: Printed, step: Step) -> None:
        self._printed, self._step, self._lines = printed, step, LineBuffer()

    @property
    def over(self) -> bool:
        return not any(printed.total() for step, printed in self._printed.items() if step >= self._step)

    def reached(self, step: Step) -> None:
        """Note that later output is after the cut of `step` (a swap may go back to an earlier one)."""
        self._step = max(self._step, step)

    def without(self, data: bytes) -> bytes:
        """Return the whole lines so far that are new; after the last repeated one, all of `data`."""
        if self.over:
            return self.flush() + data
        left, kept = self._printed.get(self._step, Counter()), list[bytes]()
        for line in self._lines.feed(data).splitlines(keepends=True):
            if left[said := words(line)] > 0:
                left[said] -= 1
            else:
                kept.append(line)
        return b"".join(kept) + (self.flush() if self.over else b"")

    def flush(self) -> bytes:
        return self._lines.flush()
