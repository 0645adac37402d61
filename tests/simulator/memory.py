"""RESTORABLE: what all nodes together hold in their memory is enough for as many losses as the job says.

Rules of this file: a function of what nodes would serve if they were asked, whatever the controllers' books say; it is
told of every change (store.py) and looks at nothing else, so that it may be asked after each.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from deadpool_plugin.core.types import Generation, NodeId, Rank, Step, World

from .machine import is_whole
from .violation import Violation

if TYPE_CHECKING:
    from .cluster import Cluster
    from .node import Node


class Memory:
    """RESTORABLE: while the job says it is mirrored, some step is held by so many nodes that `copies` may be lost.

    A step counts for a rank by the nodes that hold its header, and by those that hold its payload (or a replica's); the
    fewer of both must be one more than the losses still to be survived.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world: World | None = None
        self._generation: Generation = 0
        self._needed = self._corrupt = 0
        self._headers: defaultdict[tuple[Rank, Step], set[NodeId]] = defaultdict(set)
        self._payloads: defaultdict[tuple[Rank, Step], set[NodeId]] = defaultdict(set)
        self._unsafe: dict[Step, set[Rank]] = {}

    def changed(self, node: NodeId, rank: Rank, step: Step) -> None:
        """`node` may hold something else of (rank, step) than before."""
        home = self._cluster.nodes[node]
        headers, payloads = self._headers[rank, step], self._payloads[rank, step]
        header, payload = served(home, rank, step) if home.up else (False, False)
        if header == (node in headers) and payload == (node in payloads):
            return
        _put(headers, node, header)
        _put(payloads, node, payload)
        if self._world is None:
            return
        unsafe = self._unsafe.setdefault(step, set(range(len(self._world.node_of))))
        was_safe = not unsafe
        for same in self._cluster.replicas[rank]:
            _put(unsafe, same, not self._is_safe(same, step))
        if was_safe and unsafe:
            self._judge(f"node {node} changed what it holds of rank {rank}, step {step}")

    def gone(self, node: NodeId) -> None:
        """`node` and its memory are no more."""
        for held in (*self._headers.values(), *self._payloads.values()):
            held.discard(node)
        if self._world is not None and node in self._world.members:
            self.one_less()

    def arm(self, world: World | None, generation: Generation) -> None:
        """The job is mirrored from now on."""
        assert world is not None
        self._world, self._generation = world, generation
        gone = sum(not self._cluster.nodes[node].up for node in world.members) + self._corrupt
        self._needed = 1 + min(self._cluster.policy.copies, len(world.members) - 1) - gone
        if self._needed < 1:
            self._world = None
        self._look_everywhere()

    def disarm(self, generation: Generation) -> None:
        """The world changes: no longer mirrored."""
        if generation > self._generation:
            self._world = None

    def corrupted(self) -> None:
        """A copy is not what it was, which nobody knows before it is read."""
        self._corrupt += 1
        self.one_less()

    def one_less(self) -> None:
        """One copy is lost: fewer losses can still be survived."""
        self._needed -= 1
        if self._needed < 1:
            self._world = None
        self._look_everywhere()

    def _look_everywhere(self) -> None:
        if self._world is None:
            return
        ranks = range(len(self._world.node_of))
        steps = {step for (_, step), nodes in self._headers.items() if nodes}
        self._unsafe = {step: {rank for rank in ranks if not self._is_safe(rank, step)} for step in steps}
        self._judge(f"{self._needed - 1} more may be lost")

    def _is_safe(self, rank: Rank, step: Step) -> bool:
        replicas, payloads = self._cluster.replicas[rank], self._payloads
        if len(self._headers.get((rank, step), ())) < self._needed:
            return False
        if len(replicas) == 1:
            return len(payloads.get((rank, step), ())) >= self._needed
        return len(set().union(*(payloads.get((same, step), ()) for same in replicas))) >= self._needed

    def _judge(self, why: str) -> None:
        if all(self._unsafe.values()):
            held = {step: f"all but rank(s) {sorted(ranks)[:8]}" for step, ranks in sorted(self._unsafe.items())}
            raise Violation(
                "RESTORABLE",
                f"generation {self._generation} is mirrored, but no step is held for all ranks on {self._needed} "
                f"nodes ({why}): {held}",
            )


def _put(found: set[int], item: int, belongs: bool) -> None:
    if belongs:
        found.add(item)
    else:
        found.discard(item)


def served(node: Node, rank: Rank, step: Step) -> tuple[bool, bool]:
    """Return whether `node` can serve that snapshot's header, and its payload: listed, in its slot, unchanged."""
    holding = node.store.lists(rank, step)
    if holding is None or (pair := node.store.pair(rank)) is None or (header := pair.open(step)) is None:
        return False, False
    return True, holding.payload and is_whole(pair, header)
