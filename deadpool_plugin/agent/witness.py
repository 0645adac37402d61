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
from .host import Witness
from .node import LocalNode

_RETRY_S = 1.0
SHARED_S = 120
"""Attribute caches of NFS last a minute by default."""


class Claims:
    """Thread: the event loop's only. Without a witness nothing is ever claimed."""

    def __init__(self, node: LocalNode) -> None:
        self._node, self._tasks = node, Tasks()

    @property
    def _witness(self) -> Witness:
        return present(self._node.host.witness, "a plan was claimed, and the job has no witness")

    def claim(self, plan: SwapPlan) -> None:
        self._tasks.start(self._claim(plan))

    async def _claim(self, plan: SwapPlan) -> None:
        """Claim until the storage answers; how long that is worth waiting for is the controller's."""
        node, witness = self._node, self._witness
        while True:
            try:
                kept = await node.host.at_files(lambda: witness.keep(node.credentials.job, plan))
                break
            except (OSError, msgspec.MsgspecError) as error:
                node.reports.emit(events.Note(text=f"the witness in {witness} does not answer: {error}"))
            await asyncio.sleep(_RETRY_S)
        node.feed(api.Claimed(kept))

    def look(self, generation: Generation) -> None:
        self._tasks.start(self._look(generation))

    async def _look(self, generation: Generation) -> None:
        """Look once: whoever waits looks again."""
        node, witness = self._node, self._witness
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            kept = await node.host.at_files(lambda: witness.look(node.credentials.job, generation))
            if kept is not None:
                node.feed(api.Claimed(kept))

    def check(self, shares: bool, fail: Callable[[ConfigError], None]) -> None:
        """Check, while training begins, that this node and the first one (which `shares`) see the same directory.

        Args: fail: told if not within SHARED_S, or if that one can have no hard links.
        """
        if self._node.host.witness is not None:
            self._tasks.start(self._share(fail) if shares else self._see(fail))

    async def _share(self, fail: Callable[[ConfigError], None]) -> None:
        witness, job = self._witness, self._node.credentials.job
        try:
            await self._node.host.at_files(lambda: witness.share(job))
        except OSError as error:
            found = f"the witness {witness} cannot keep a hard link ({error.strerror})"
            fail(ConfigError(found, "a directory on storage that all hosts share, and that has them", "name another"))

    async def _see(self, fail: Callable[[ConfigError], None]) -> None:
        host, witness, job = self._node.host, self._witness, self._node.credentials.job
        for _ in range(SHARED_S):
            await asyncio.sleep(1.0)  # an NFS client that looks too early remembers for long that there is nothing
            with contextlib.suppress(OSError):
                if await host.at_files(lambda: witness.is_shared(job)):
                    return
        found = f"the witness {witness} on {host.name} is not the directory that the first host has there"
        fail(ConfigError(found, "a directory on storage that all hosts share", "name one, or mount it on this host"))
