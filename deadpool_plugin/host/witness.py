"""The witness of ties: one file per generation on storage that all hosts share, written by whoever is first.

Rules of this file: a file is there whole or not at all, and never changes. Every method blocks for the storage.
Source: link(2) is atomic, over NFS too; whether a link whose answer was lost was made is seen by reading.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import msgspec

from ..core.types import Generation, SwapPlan


class SharedFolder:
    """A directory on storage that all hosts share. Thread: any."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __str__(self) -> str:
        return str(self._directory)

    def keep(self, job: str, plan: SwapPlan) -> SwapPlan:
        """Return the plan that the folder has for this job and generation from now on: `plan`, unless there was one.

        Raises: OSError.
        """
        path = self._directory / f"{job}.{plan.world.generation}"
        _put_once(path, msgspec.msgpack.encode(plan))
        return msgspec.msgpack.decode(path.read_bytes(), type=SwapPlan)

    def look(self, job: str, generation: Generation) -> SwapPlan | None:
        """Return the plan that the folder has for this job and generation, None if it has none. Raises: OSError."""
        try:
            return msgspec.msgpack.decode((self._directory / f"{job}.{generation}").read_bytes(), type=SwapPlan)
        except FileNotFoundError:
            return None

    def share(self, job: str) -> None:
        """Leave a file there for `is_shared`, made as plans are. Raises: OSError."""
        _put_once(self._shared(job), b"")

    def is_shared(self, job: str) -> bool:
        """Return whether another host's `share` is seen here."""
        return self._shared(job).exists()

    def _shared(self, job: str) -> Path:
        return self._directory / f"{job}.shared"


def _put_once(path: Path, content: bytes) -> None:
    """Make `path` hold `content`, unless somebody has put something there before. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=".draft-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)
