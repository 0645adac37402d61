"""The controller's requests to the witness of ties, and the check that all hosts see the same one.

Rules of this file: the event loop does not wait for storage.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from .. import events
from ..core import api
from ..core.types import Generation, SwapPlan
from ..errors import ConfigError, present
from .host import Witness
from .node import LocalNode

_RETRY_S = 1.0
SHARED_S = 120
"""Attribute caches of NFS last a minute by default."""


class Claims:
    """This node's requests to the witness."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node

    @property
    def _witness(self) -> Witness:
        return present(self._node.host.witness, "a plan was claimed, and the job has no witness")

    async def claim(self, plan: SwapPlan) -> None:
        """Feed the plan that the witness keeps, `plan` unless it had one before; try until the storage answers."""
        node, witness = self._node, self._witness
        while True:
            try:
                kept = await node.host.at_files(lambda: witness.keep(node.credentials.job, plan))
                break
            except (OSError, msgspec.MsgspecError) as error:
                node.reports.emit(events.Note(f"the witness in {witness} does not answer: {error}"))
            await asyncio.sleep(_RETRY_S)
        node.feed(api.Claimed(kept))

    async def look(self, generation: Generation) -> None:
        """Feed the plan that the witness has for `generation`. Once: whoever waits looks again."""
        node, witness = self._node, self._witness
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            kept = await node.host.at_files(lambda: witness.look(node.credentials.job, generation))
            if kept is not None:
                node.feed(api.Claimed(kept))

    async def check(self, shares: bool) -> None:
        """Check that this node and the first one (which `shares`) see the same directory, if there is a witness.

        Raises: ConfigError if not within SHARED_S, or if that one can have no hard links.
        """
        host, job, witness = self._node.host, self._node.credentials.job, self._node.host.witness
        if witness is None:
            return
        expected = "a directory on storage that all hosts share"
        if shares:
            try:
                return await host.at_files(lambda: witness.share(job))
            except OSError as error:
                found = f"the witness {witness} cannot keep a hard link ({error.strerror})"
                raise ConfigError(found, f"{expected}, and that has them", "name another") from error
        for _ in range(SHARED_S):
            await asyncio.sleep(1.0)  # an NFS client that looks too early remembers for long that there is nothing
            with contextlib.suppress(OSError):
                if await host.at_files(lambda: witness.is_shared(job)):
                    return
        found = f"the witness {witness} on {host.name} is not the directory that the first host has there"
        raise ConfigError(found, expected, "name one, or mount it on this host")
