"""The controller's requests to the witness of ties, and the check that all hosts see the same one.

Rules of this file: the event loop does not wait for storage.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from .. import events
from ..core import api
from ..core.types import Generation, SwapPlan
from ..errors import ConfigError, present
from ..transport.tasks import Tasks
from .host import Host, Witness
from .reports import Reports

_RETRY_S = 1.0
SHARED_S = 120
"""Attribute caches of NFS last a minute by default."""


class Claims:
    """Thread: the event loop's only. Without a witness nothing is ever claimed."""

    def __init__(self, host: Host, job: Callable[[], str], reports: Reports, feed: Callable[[api.Input], None]) -> None:
        self._host, self._job, self._reports, self._feed = host, job, reports, feed
        self._tasks = Tasks()

    def claim(self, action: api.Claim) -> None:
        self._tasks.start(self._claim(action.plan))

    def look(self, action: api.Look) -> None:
        self._tasks.start(self._look(action.generation))

    def check(self, shares: bool, fail: Callable[[ConfigError], None]) -> None:
        """While training begins: whether this node and the first one (which `shares`) see the same directory. `fail`:
        told if not within SHARED_S, or if that one can have no hard links."""
        if self._host.witness is not None:
            self._tasks.start((self._share if shares else self._see)(self._host.witness, fail))

    async def _share(self, witness: Witness, fail: Callable[[ConfigError], None]) -> None:
        try:
            await self._host.at_files(lambda: witness.share(self._job()))
        except OSError as error:
            found = f"the witness {witness} cannot keep a hard link ({error.strerror})"
            fail(ConfigError(found, "a directory on storage that all hosts share, and that has them", "name another"))

    async def _see(self, witness: Witness, fail: Callable[[ConfigError], None]) -> None:
        for _ in range(SHARED_S):
            await asyncio.sleep(1.0)  # an NFS client that looks too early remembers for long that there is nothing
            with contextlib.suppress(OSError):
                if await self._host.at_files(lambda: witness.is_shared(self._job())):
                    return
        found = f"the witness {witness} on {self._host.name} is not the directory that the first host has there"
        fail(ConfigError(found, "a directory on storage that all hosts share", "name one, or mount it on this host"))

    async def _look(self, generation: Generation) -> None:
        """Once: who waits looks again."""
        witness = self._witness
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if (kept := await self._host.at_files(lambda: witness.look(self._job(), generation))) is not None:
                self._feed(api.Claimed(kept))

    async def _claim(self, plan: SwapPlan) -> None:
        """Until the storage answers; how long that is worth waiting for is the controller's."""
        witness = self._witness
        while True:
            try:
                kept = await self._host.at_files(lambda: witness.keep(self._job(), plan))
            except (OSError, msgspec.MsgspecError) as error:
                self._reports.emit(events.Note(text=f"the witness in {witness} does not answer: {error}"))
                await asyncio.sleep(_RETRY_S)
                continue
            self._feed(api.Claimed(kept))
            return

    @property
    def _witness(self) -> Witness:
        return present(self._host.witness, "a plan was claimed, and the job has no witness")
