"""Follows the event logs of a job while they are written.

Rules of this file: reads, never writes; whole lines only; what it cannot read is counted, never an error, because
the writer may be newer than this reader. How much is read does not grow with the job: logs stay within a bound, and of
what recurs with every step only the newest says something.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from .. import events

RECENT_BYTES = 1 << 16
"""Read at a time of each file of what recurs: hundreds of steps."""


class Follower:
    """The new events of `folder/events.*.jsonl`; folder and files may appear later. Thread: one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unreadable = 0
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[events.Event]:
        """Read what was written since the last call, in the order of time. Blocks: as long as the file system does."""
        found: list[events.Event] = []
        for path in sorted(self.folder.glob("events.*.jsonl")):
            for line in self._new_lines(path):
                try:
                    found.append(events.decoder.decode(line))
                except msgspec.DecodeError:
                    self.unreadable += 1
        return sorted(found, key=lambda event: event.time)

    def _new_lines(self, path: Path) -> list[bytes]:
        """The lines completed since the last call; of what recurs the last ones. A file that shrank is read again from
        its beginning."""
        lines: list[bytes] = []
        with path.open("rb") as file:
            size = file.seek(0, 2)
            offset = self._offsets.get(path, 0) if self._offsets.get(path, 0) <= size else 0
            file.seek(offset)
            if path.match("events.*.recent?.jsonl") and size - offset > RECENT_BYTES:
                file.seek(size - RECENT_BYTES)
                offset = size - RECENT_BYTES + len(file.readline())  # the rest of a line
            for line in file:
                if not line.endswith(b"\n"):
                    break
                offset += len(line)
                lines.append(line)
        self._offsets[path] = offset
        return lines
