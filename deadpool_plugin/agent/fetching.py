"""Requests to other nodes' memory: recordings, call records, snapshots into slots of this node.

Rules of this file: a node that does not answer is asked again until the job's patience is used up, which is said
(whether the node is lost is the controllers' to decide). What arrives is listed as held only once it is whole and its
generation is still the newest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from .. import events
from ..core import api
from ..core.types import Generation, NodeId, Rank, Source, Step
from ..errors import TransportError
from ..mirror.arena import SlotPair
from ..mirror.wire import RefusedByPeer
from ..transport.tasks import begin, loop_time
from .host import Host
from .profile import Profile
from .reports import Reports

T = TypeVar("T")
_RETRY_S = 0.2


class Fetches:
    """Thread: the event loop's only."""

    def __init__(
        self, node: NodeId, host: Host, patience_s: float, reports: Reports, feed: Callable[[api.Input], None]
    ) -> None:
        self._node, self._host, self.patience_s = node, host, patience_s
        self._reports, self._feed = reports, feed

    async def _ask(self, work: Callable[[], Awaitable[T]], *nodes: NodeId) -> T:
        """Do `work`, which asks `nodes`; try again what fails until the patience, counted from the first failure,
        is used up.

        Raises: TransportError; RefusedByPeer at once.
        """
        deadline: float | None = None
        while True:
            try:
                return await work()
            except RefusedByPeer:
                raise
            except TransportError as error:
                now = loop_time()
                deadline = now + self.patience_s if deadline is None else deadline
                if now >= deadline:
                    for node in sorted({*nodes} - {self._node}):
                        self._feed(api.LinkLost(node, f"node {self._node} cannot ask it: {error}", silent=True))
                    raise
            await asyncio.sleep(_RETRY_S)

    async def recording(self, source: NodeId, rank: Rank) -> bytes:
        """Get the recording of `rank`, from here if it is here, else from `source`. Raises: DeadpoolError."""
        if source == self._node or self._host.store.records.has_recording(rank):
            return self._host.store.records.get_recording(rank)
        return await self._ask(lambda: self._host.bulk.get_recording(source, rank), source)

    async def records(self, source: NodeId, rank: Rank, first: Step, last: Step) -> list[bytes]:
        """Get the call records of first..last, from `source`. Raises: TransportError, HistoryPruned."""
        if source == self._node:
            return self._host.store.records.get(rank, first, last)
        return await self._ask(lambda: self._host.bulk.get_history(source, rank, first, last), source)

    async def refill(self, source: Source, step: Step) -> None:
        """Bring (rank, step) into the slots the rank's process uses already. Raises: TransportError."""
        pair = self._host.store.own(source.rank)
        if pair is None:
            raise TransportError(f"rank {source.rank} runs here without an arena")
        generation = self._host.store.generation
        await self._ask(
            lambda: self._host.bulk.fetch(source, step, pair, generation), source.header_node, source.payload_node
        )

    async def bring(self, source: Source, step: Step, profile: Profile) -> None:
        """Make own slots for a rank that is new here, and bring `step` into them. Raises: DeadpoolError.

        If it is cancelled the attempt under way goes on to its end: slots that somebody writes to are nobody else's.
        """
        began, generation = loop_time(), self._host.store.generation
        pair = await self._ask(
            lambda: asyncio.shield(begin(self._fetched(source, step, generation, profile))),
            source.header_node, source.payload_node,
        )  # fmt: skip
        took = loop_time() - began
        self._reports.emit(events.SnapshotFetched(source.rank, step, pair.payload_bytes, took))

    async def _fetched(self, source: Source, step: Step, generation: Generation, profile: Profile) -> SlotPair:
        """Make the rank's own slots on this node hold `step`.

        Where this node itself holds the mirror, that stays until they replace it, whatever is cut off meanwhile.
        """
        host, store = self._host, self._host.store

        def check() -> None:
            store.check_generation(generation)

        pair = await host.in_thread(
            lambda: store.make_own(source.rank, profile.header_bytes, profile.payload_bytes, check)
        )
        try:
            await host.bulk.fetch(source, step, pair, generation)
            await host.in_thread(lambda: store.adopt_own(pair, step, generation, profile.replicas))
        except BaseException:  # the next attempt finds them: the first touch of new ones takes long
            pair.invalidate(step)
            store.put_back(pair)
            raise
        return pair
