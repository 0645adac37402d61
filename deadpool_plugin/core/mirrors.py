"""Nodes that hold mirrors, where hosts stand in racks: never two copies in one rack while another has room.

A node has room for as many mirrors as it gives away itself, so nobody needs more memory than everybody does; a spare
has as much. The assignment is part of the world and is made from the one before it, so that a swap moves no mirror that
may stay: what is lost is filled in, by having others move where nobody has room, and the rest is left alone.

Rules of this file: pure functions; among equals the next along the ring. May import types only.
Source of the search: augmenting paths, Kuhn (1955), with racks as a further condition on each edge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from .types import NodeId, World

Mirrors = tuple[tuple[NodeId, ...], ...]


def assign(world: World, copies: int, before: Mapping[NodeId, Collection[NodeId]]) -> Mirrors:
    """The buddies of each active node, in the order of the ring.

    Args: before: whose mirrors are where already, by the nodes of `world`; what is still allowed stays.
    """
    task = _Assignment(world, min(copies, len(world.members) - 1))
    for node in world.active:
        for buddy in before.get(node, ()):
            task.keep(node, buddy)
    active, members = frozenset(world.active), frozenset(world.members)
    for among, apart, others_apart in ((active, True, True), (members, True, True), (members, False, True)):
        for node in world.active:
            task.fill(node, among, apart, others_apart, before.get(node, ()))
    for node in world.active:
        task.fill(node, members, False, False, before.get(node, ()))
    return tuple(tuple(task.buddies[node]) for node in world.active)


class _Assignment:
    """One assignment in the making."""

    def __init__(self, world: World, copies: int) -> None:
        self._world, self._copies = world, copies
        self._rack = {node: world.rack_of(node) for node in world.members}
        self.buddies: dict[NodeId, list[NodeId]] = {node: [] for node in world.active}
        self._load: Counter[NodeId] = Counter()

    def keep(self, node: NodeId, buddy: NodeId) -> None:
        """Leave `node`'s mirrors with `buddy`, if it is there still and apart from the other copies."""
        wanted = len(self.buddies[node]) < self._copies and self._load[buddy] < self._copies
        if wanted and buddy in self._fitting(node, {buddy}, apart=True):
            self._give(node, buddy)

    def fill(
        self, node: NodeId, among: Collection[NodeId], apart: bool, others_apart: bool, before: Collection[NodeId]
    ) -> None:
        """Give `node` what it still wants `among` these, as far as that goes.

        Args: apart: in racks that hold no copy of it yet. others_apart: whoever must move for it stays apart too.
        """
        asked: set[NodeId] = set()
        while len(self.buddies[node]) < self._copies and self._find(node, among, apart, others_apart, asked, before):
            asked.clear()

    def _give(self, node: NodeId, buddy: NodeId) -> None:
        self.buddies[node].append(buddy)
        self._load[buddy] += 1

    def _find(
        self,
        node: NodeId,
        among: Collection[NodeId],
        apart: bool,
        others_apart: bool,
        asked: set[NodeId],
        before: Collection[NodeId] = (),
    ) -> bool:
        """Find one buddy more for `node`, if need be by having others move to where there is room."""
        fitting = [one for one in self._fitting(node, among, apart) if one not in asked]
        free = [one for one in fitting if self._load[one] < self._copies]
        if free:
            self._give(node, min(free, key=lambda one: (one not in before, self._load[one])))
            return True
        for buddy in fitting:
            if buddy in asked:
                continue
            asked.add(buddy)
            for other in [one for one, held in self.buddies.items() if buddy in held and one != node]:
                self.buddies[other].remove(buddy)
                self._load[buddy] -= 1
                if self._find(other, among, others_apart, others_apart, asked):
                    self._give(node, buddy)
                    return True
                self._give(other, buddy)
        return False

    def _fitting(self, node: NodeId, among: Collection[NodeId], apart: bool) -> list[NodeId]:
        """List who could be the next buddy of `node`: along the ring from it on, then the spares."""
        ring, rack = self._world.active, self._rack
        own = self._world.positions[node]
        held = {node, *self.buddies[node]}
        racks = {rack[one] for one in held} if apart else set()
        order = (*ring[own + 1 :], *ring[:own], *self._world.spares)
        return [one for one in order if one in among and one not in held and rack[one] not in racks]
