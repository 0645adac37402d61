"""The hosts whose loss a spare could make up for: what "protected" needs beside mirrored snapshots.

A host is covered while a living spare that is able to take it stands by. A spare is able once it has rehearsed all it
was told to, until it says otherwise. A host whose call records are dropped can be taken only by a spare that has
rehearsed and followed that very host.

Rules of this file: a book of one generation, from reports; it says nothing itself. May import messages, placement and
types only.
"""

from __future__ import annotations

from .messages import Report
from .placement import rehearsals
from .types import NodeId, Rank, World, listed

NO_SPARE = "no spare is left"


class Coverage:
    """The spares of one generation as their reports tell it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._spares = frozenset(world.spares)
        self._state: dict[NodeId, tuple[bool, str]] = {}
        self._rehearsed: dict[NodeId, tuple[tuple[int, Rank], ...]] = {}
        self._pruned: dict[NodeId, bool] = {}

    def absorb(self, sender: NodeId, report: Report) -> bool:
        """Take in a report; whether it may change an answer. Costs the same in a job of any size."""
        if sender not in self._spares:
            before, self._pruned[sender] = self._pruned.get(sender, False), report.pruned
            return report.pruned != before
        known = (self._state.get(sender), self._rehearsed.get(sender))
        self._state[sender], self._rehearsed[sender] = (report.able, report.unable), report.rehearsed
        return known != (self._state[sender], self._rehearsed[sender])

    def uncovered(self) -> tuple[NodeId, ...]:
        """The active hosts that no spare can take."""
        able = [spare for spare in self._world.spares if self._state.get(spare, (False, ""))[0]]
        if not able:
            return tuple(sorted(self._world.active))
        pruned = [node for node in sorted(self._world.active) if self._pruned.get(node, False)]
        return tuple(node for node in pruned if not any(self._follows(spare, node) for spare in able))

    def _follows(self, spare: NodeId, node: NodeId) -> bool:
        tasks = {(task.local_slot, task.rank) for task in rehearsals(self._world) if task.spare == spare}
        ranks = {rank for _, rank in tasks}
        return ranks == {*self._world.ranks_of(node)} and tasks <= {*self._rehearsed.get(spare, ())}

    def why(self, uncovered: tuple[NodeId, ...]) -> str:
        """The reason that `uncovered` are, for people; "" if none is."""
        if not uncovered:
            return ""
        if not self._world.spares:
            return NO_SPARE
        every = len(uncovered) == len(self._world.active)
        hosts = "any node" if every and len(uncovered) > 4 else f"node {listed(uncovered)}"
        return f"no spare can take {hosts} ({'; '.join(self._said(spare) for spare in self._world.spares)})"

    def _said(self, spare: NodeId) -> str:
        able, unable = self._state.get(spare, (False, ""))
        if unable:
            return f"spare node {spare} cannot stand in: {unable}"
        if not able:
            return f"spare node {spare} has not rehearsed yet"
        return f"spare node {spare} cannot follow it: its call records no longer fit into history_limit_mib"
