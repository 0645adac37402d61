"""Unified diffs of a few hunks, put into files that may have been changed since, and taken out again.

Rules of this file: text in, text out. A hunk is found by its lines, nearest to where it was made for; it fits as it is
or not at all, and is never applied in part. What stands behind the second `@@` of a hunk says why it is there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import DeadpoolError

_HEAD = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@ ?(.*)")


@dataclass(frozen=True)
class Hunk:
    """`before` and `after`: lines without their ends; `at`: index of the first one in the file it was made for."""

    path: str
    at: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    why: str

    @property
    def reversed(self) -> Hunk:
        return Hunk(self.path, self.at, self.after, self.before, self.why)


class Misfit(DeadpoolError):
    """A hunk's lines are not in the file."""


def parse(diff: str) -> list[Hunk]:
    """The hunks of a unified diff with `a/` and `b/` in front of paths."""
    hunks: list[Hunk] = []
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line[4:].removeprefix("b/")
        elif head := _HEAD.fullmatch(line):
            hunks.append(Hunk(path, int(head[1]) - 1, (), (), head[3]))
        elif hunks and not line.startswith("--- "):
            hunks[-1] = _with_line(hunks[-1], line[:1], line[1:])
    return hunks


def _with_line(hunk: Hunk, kind: str, line: str) -> Hunk:
    before = hunk.before if kind == "+" else (*hunk.before, line)
    after = hunk.after if kind == "-" else (*hunk.after, line)
    return Hunk(hunk.path, hunk.at, before, after, hunk.why)


def applied(hunk: Hunk, text: str) -> str:
    """`text` with the hunk in it; the ends of its lines stay as they are. Raises: Misfit."""
    lines = text.splitlines(keepends=True)
    at = position(hunk, text)
    if at is None:
        raise Misfit(
            f"{hunk.path}: the hunk made for line {hunk.at + 1} ({hunk.why}) does not fit",
            f"these lines: {' | '.join(line.strip() for line in hunk.before if line.strip())}",
        )
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    lines[at : at + len(hunk.before)] = [line + end for line in hunk.after]
    return "".join(lines)


def position(hunk: Hunk, text: str) -> int | None:
    """Index of the line from which on `before` stands in `text`, nearest to `at`; None if it does not."""
    lines = [line.rstrip("\r\n") for line in text.splitlines(keepends=True)]
    size = len(hunk.before)
    found = [at for at in range(len(lines) - size + 1) if tuple(lines[at : at + size]) == hunk.before]
    return min(found, key=lambda at: abs(at - hunk.at), default=None)
