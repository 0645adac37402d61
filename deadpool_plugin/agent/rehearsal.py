"""One process that rehearses a rank, and how it comes to know the records of the rank's steps.

Rules of this file: records come and go on in step order, some steps at a time, however long the past is.
Thread: the event loop's only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ..core import local
from ..core.types import NO_STEP, NodeId, Rank, Step
from ..mirror.records import History
from ..mirror.wire import how_many_fit
from ..transport.unix import LocalPeer
from .profile import Profile
from .slots import Process, Slot

PULL_STEPS = 1024
"""The most steps whose records one request asks for. Each request has a connection of its own."""
CHUNK_STEPS = 64
"""Records that one message to the process holds."""


@dataclass(eq=False)
class Rehearsal:
    """One slot's rehearsal of one rank. `history` is what has been pulled; `told` the newest step its process knows.

    `doubted`: people have been told that it could not be told of the first steps.
    """

    slot: Slot
    process: Process
    profile: Profile
    source: NodeId
    history: History
    told: Step = NO_STEP
    doubted: bool = False
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    pulling: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def rank(self) -> Rank:
        return self.process.rank

    @property
    def alive(self) -> bool:
        return self.slot.living is self.process

    @property
    def listener(self) -> LocalPeer | None:
        """The connection to its process, None if it can be told nothing."""
        return self.process.peer if self.alive else None

    @property
    def ready(self) -> bool:
        return self.finished.is_set() and self.alive

    async def pull(self, records: Callable[[Step, Step], Awaitable[list[bytes]]], last: Step) -> None:
        """Have the records up to `last`, which `records(first, last)` gives. Raises: as that."""
        async with self.pulling:
            while self.history.last < last:
                first, until = self.history.last + 1, min(last, self.history.last + PULL_STEPS)
                for step, record in enumerate(await records(first, until), first):
                    self.history.append(step, record)
                await asyncio.sleep(0)  # records that are here already do not suspend

    async def tell(self) -> None:
        """Pass on to the process, which has rehearsed, what it does not know yet, as fast as it reads.

        Raises: HistoryPruned if that is not held any more (history_limit_mib).
        """
        last = self.history.last
        while self.told < last and (peer := self.listener) is not None:
            first, until = self.told + 1, min(last, self.told + CHUNK_STEPS)
            records = self.history.get(first, until)
            fitting = how_many_fit(records)
            peer.send(local.History(records[:fitting]))
            self.told += fitting
            await peer.drained()
