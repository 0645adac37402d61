"""A rank's snapshot of the restore step, brought from the nodes that hold it into slots of this node.

Rules of this file: everything that waits for another node does so in a thread; what arrives is listed as held only
once it is whole and its generation is still the newest.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core.types import Generation, NodeId, Source, Step
from ..errors import TransportError
from ..mirror.arena import SlotPair, SnapshotHeader
from ..mirror.store import SnapshotStore
from ..transport.tasks import loop_time
from .peers import Peers
from .profile import Profile
from .reports import Reports


class Fetches:
    """Thread: the event loop's only."""

    def __init__(self, node: NodeId, store: SnapshotStore, peers: Peers, reports: Reports) -> None:
        self._node, self._store, self._peers, self._reports = node, store, peers, reports

    async def refill(self, source: Source, step: Step) -> None:
        """Bring (rank, step) into the slots the rank's process uses already. Raises: TransportError."""
        pair = self._store.own(source.rank)
        if pair is None:
            raise TransportError(f"rank {source.rank} runs here without an arena")
        fetch = self._fetcher(source, step, self._store.generation)
        await self._peers.ask(lambda: fetch(pair), source.header_node, source.payload_node)

    async def bring(self, source: Source, step: Step, profile: Profile) -> None:
        """New own slots for a rank that is new here, with `step` in them. Raises: DeadpoolError."""
        began = loop_time()
        generation = self._store.generation
        fetch = self._fetcher(source, step, generation)
        pair = await self._peers.ask(
            lambda: self._fetched(source, step, generation, profile, fetch), source.header_node, source.payload_node
        )
        took = loop_time() - began
        self._reports.emit("SnapshotFetched", rank=source.rank, step=step, nbytes=pair.payload_bytes, duration_s=took)

    def _fetcher(self, source: Source, step: Step, generation: Generation) -> Callable[[SlotPair], SnapshotHeader]:
        """Make the function that fills a pair of slots, in a thread; `generation` may be over by then."""
        header_peer, payload_peer = self._peers.to(source.header_node), self._peers.to(source.payload_node)
        return lambda pair: header_peer.fetch(source.rank, step, source.payload_rank, pair, payload_peer, generation)

    def _fetched(
        self,
        source: Source,
        step: Step,
        generation: Generation,
        profile: Profile,
        fetch: Callable[[SlotPair], SnapshotHeader],
    ) -> SlotPair:
        """The rank's own slots on this node, holding `step`. Thread: one of the asking ones.

        Where this node itself holds the mirror, that stays until they replace it, whatever is cut off meanwhile.
        """
        pair = self._store.make_own(
            source.rank, profile.header_bytes, profile.payload_bytes, lambda: self._store.check_generation(generation)
        )
        try:
            fetch(pair)
            self._store.adopt_own(pair, step, generation, profile.replicas)
        except BaseException:  # the next attempt finds them: the first touch of new ones takes long
            pair.invalidate(step)
            self._store.put_back(pair)
            raise
        return pair
