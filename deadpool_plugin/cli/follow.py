"""Follows the event logs of a job while they are written.

Rules of this file: reads, never writes; whole lines only; what it cannot read is counted, never an error, because
the writer may be newer than this reader.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from .. import events


class Follower:
    """The new events of `folder/events.*.jsonl`; folder and files may appear later. Thread: one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
        """The lines completed since the last call; a file that shrank is read again from its beginning."""
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            if file.seek(0, 2) < offset:
                offset = 0
            file.seek(offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._offsets[path] = offset + len(complete) + len(newline)
        return complete.splitlines()
