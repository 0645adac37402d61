"""Follows the event logs of a job while they are written.

Rules of this file: reads, never writes; whole lines only; what it cannot read is counted, never an error, because
the writer may be newer than this reader. Nearly all lines are about steps: of those of a long past, which are not worth
decoding, only the last ones are read, and logs may be larger than memory.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import msgspec

from .. import events

_STEPS = tuple(f'{{"event":"{kind.__name__}"'.encode() for kind in (events.StepDone, events.StepCommitted))


class Follower:
    """The new events of `folder/events.*.jsonl`; folder and files may appear later. Thread: one.

    Args:
        steps_kept: of what is written between two calls, so many last lines of a file are read even if they are steps.
    """

    def __init__(self, folder: Path, steps_kept: int = 1000) -> None:
        self.folder, self._steps_kept = folder, steps_kept
        self.unreadable = 0
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[events.Event]:
        """What was written since the last call, in the order of time. Blocks: as long as the file system does."""
        found: list[events.Event] = []
        for path in sorted(self.folder.glob("events.*.jsonl")):
            for line in self._new_lines(path):
                try:
                    found.append(events.decoder.decode(line))
                except msgspec.DecodeError:
                    self.unreadable += 1
        return sorted(found, key=lambda event: event.time)

    def _new_lines(self, path: Path) -> list[bytes]:
        """The lines completed since the last call, without older ones about steps; a file that shrank is read again
        from its beginning."""
        offset = self._offsets.get(path, 0)
        newest: deque[bytes] = deque()
        kept: list[bytes] = []
        with path.open("rb") as file:
            if file.seek(0, 2) < offset:
                offset = 0
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                offset += len(line)
                newest.append(line)
                if len(newest) > self._steps_kept and not (oldest := newest.popleft()).startswith(_STEPS):
                    kept.append(oldest)
        self._offsets[path] = offset
        return [*kept, *newest]
