"""Contact with a majority: until when the processes of a node may run.

A node's workers run for `Timing.lease_s` after its newest report of which is certain that, later than it was sent, a
majority heard of the coordinator that had it; then they stand still. Nobody of that majority helps to replace this
coordinator for its silence before `Timing.silent_after_s`, which is longer; so whoever is cut off has stopped before it
can be replaced, and needs to know nothing but its own clock for it. What is certain is up to four heartbeat intervals
old when it is heard of last, so that a silence shorter than the lease by as much is the shortest that stops anything.

Rules of this file: times of two nodes are never compared. Each goes to the other node and comes back with an answer, so
a message that was long under way, or a node that slept, proves no more than it should.
Source: Gray and Cheriton, Leases (SOSP 1989); a leader's lease as in Raft (Ongaro's thesis, 6.4.1).
May import membership and types only.
"""

from __future__ import annotations

from collections import deque

from .membership import value_of_quorum
from .types import NEVER, NodeId, World


class Contact:
    """The coordinator's side in one generation."""

    def __init__(self, world: World, witness: bool) -> None:
        self._world, self._witness = world, witness
        self._reports: dict[NodeId, float] = {}
        self._echoes: dict[NodeId, float] = {}
        self._beats: deque[tuple[float, dict[NodeId, float]]] = deque()
        self._certain: dict[NodeId, float] = {}

    def hear(self, member: NodeId, sent_at: float, echo: float) -> None:
        """A report: when it was sent by its sender's clock, and the newest Status it knew of by ours."""
        self._reports[member] = max(sent_at, self._reports.get(member, NEVER))
        self._echoes[member] = max(echo, self._echoes.get(member, NEVER))

    def beat(self, now: float, forget_after_s: float) -> None:
        """A Status goes to everybody now: once a majority has echoed it, the reports we have had by now are certain."""
        echoed = value_of_quorum(self._world, self._echoes, NEVER, self._witness)
        while self._beats and self._beats[0][0] <= echoed:
            self._certain = self._beats.popleft()[1]
        while self._beats and now - self._beats[0][0] > forget_after_s:
            self._beats.popleft()
        self._beats.append((now, dict(self._reports)))

    def certain(self, member: NodeId) -> float:
        """The newest report of `member`, by its own clock, that a majority has heard of us after; NEVER if none."""
        return self._certain.get(member, NEVER)
