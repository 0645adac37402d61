"""The witness of ties: one file per generation on storage that all hosts share, written by whoever is first.

Rules of this file: a file is there whole or not at all, and never changes; the event loop does not wait for storage.
Source: link(2) is atomic, over NFS too; whether a link whose answer was lost was made is seen by reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..core import io
from ..core.types import Generation, SwapPlan
from ..errors import ConfigError
from ..transport.tasks import Tasks
from .reports import Reports

_RETRY_S = 1.0
SHARED_S = 120
"""Attribute caches of NFS last a minute by default."""


def keep(directory: Path, job: str, plan: SwapPlan) -> SwapPlan:
    """The plan that `directory` has for this job and generation from now on: `plan`, unless there was one.

    Raises: OSError. Blocks: for the storage.
    """
    path = directory / f"{job}.{plan.world.generation}"
    _put_once(path, msgspec.msgpack.encode(plan))
    return msgspec.msgpack.decode(path.read_bytes(), type=SwapPlan)


def _put_once(path: Path, content: bytes) -> None:
    """`path` holds `content`, or what somebody had put there before. Raises: OSError. Blocks: for the storage."""
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


def share(directory: Path, job: str) -> None:
    """Leave a file there for `is_shared`, made as plans are. Raises: OSError. Blocks: for the storage."""
    _put_once(_shared(directory, job), b"")


def is_shared(directory: Path, job: str) -> bool:
    """Return whether another host's `share` is seen here. Blocks: for the storage."""
    return _shared(directory, job).exists()


def _shared(directory: Path, job: str) -> Path:
    return directory / f"{job}.shared"


def look(directory: Path, job: str, generation: Generation) -> SwapPlan | None:
    """The plan that `directory` has for this job and generation, None if it has none. Raises: OSError."""
    try:
        return msgspec.msgpack.decode((directory / f"{job}.{generation}").read_bytes(), type=SwapPlan)
    except FileNotFoundError:
        return None


class Witness:
    """Thread: the event loop's only. `directory`: None if the job has none, and then nothing is ever claimed."""

    def __init__(
        self, directory: Path | None, job: Callable[[], str], reports: Reports, feed: Callable[[io.Input], None]
    ) -> None:
        self._directory, self._job, self._reports, self._feed = directory, job, reports, feed
        self._tasks = Tasks()

    def claim(self, action: io.Claim) -> None:
        self._tasks.start(self._claim(action.plan))

    def look(self, action: io.Look) -> None:
        self._tasks.start(self._look(action.generation))

    def check(self, shares: bool, fail: Callable[[ConfigError], None]) -> None:
        """While training begins: whether this node and the first one (which `shares`) see the same directory. `fail`:
        told if not within SHARED_S, or if that one can have no hard links."""
        if self._directory is not None:
            self._tasks.start(self._share(self._directory, fail) if shares else self._see(self._directory, fail))

    async def _share(self, directory: Path, fail: Callable[[ConfigError], None]) -> None:
        try:
            await asyncio.to_thread(share, directory, self._job())
        except OSError as error:
            found = f"the witness {directory} cannot keep a hard link ({error.strerror})"
            fail(ConfigError(found, "a directory on storage that all hosts share, and that has them", "name another"))

    async def _see(self, directory: Path, fail: Callable[[ConfigError], None]) -> None:
        for _ in range(SHARED_S):
            await asyncio.sleep(1.0)  # an NFS client that looks too early remembers for long that there is nothing
            with contextlib.suppress(OSError):
                if await asyncio.to_thread(is_shared, directory, self._job()):
                    return
        found = f"the witness {directory} on {os.uname().nodename} is not the directory that the first host has there"
        fail(ConfigError(found, "a directory on storage that all hosts share", "name one, or mount it on this host"))

    async def _look(self, generation: Generation) -> None:
        """Once: who waits looks again."""
        assert self._directory is not None
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if (kept := await asyncio.to_thread(look, self._directory, self._job(), generation)) is not None:
                self._feed(io.Claimed(kept))

    async def _claim(self, plan: SwapPlan) -> None:
        """Until the storage answers; how long that is worth waiting for is the controller's."""
        assert self._directory is not None
        while True:
            try:
                kept = await asyncio.to_thread(keep, self._directory, self._job(), plan)
            except (OSError, msgspec.MsgspecError) as error:
                self._reports.emit("Note", text=f"the witness in {self._directory} does not answer: {error}")
                await asyncio.sleep(_RETRY_S)
                continue
            self._feed(io.Claimed(kept))
            return
