"""Self-fencing: a node without contact to a majority stops its workers before others may replace it.

A node's workers run for `Timing.lease_s` after its newest report of which is certain that, later than it was sent, a
majority heard of the coordinator that had it. README.md has the argument ("Cut off").

Rules of this file: times of two nodes are never compared. Each goes to the other node and comes back with an answer, so
a message that was long under way, or a node that slept, proves no more than it should.
Source: Gray and Cheriton, Leases (SOSP 1989); a leader's lease as in Raft (Ongaro's thesis, 6.4.1).
"""

from __future__ import annotations

from collections import deque

from .api import PauseWorkers, ResumeWorkers
from .context import Context
from .events import ContactLost, ContactRegained
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
        """Note a report: when it was sent by its sender's clock, and the newest Status it knew of by ours."""
        self._reports[member] = max(sent_at, self._reports.get(member, NEVER))
        self._echoes[member] = max(echo, self._echoes.get(member, NEVER))

    def beat(self, now: float, forget_after_s: float) -> None:
        """Note that a Status goes to all now: once a majority has echoed it, our reports by now are certain."""
        echoed = value_of_quorum(self._world, self._echoes, NEVER, self._witness)
        while self._beats and self._beats[0][0] <= echoed:
            self._certain = self._beats.popleft()[1]
        while self._beats and now - self._beats[0][0] > forget_after_s:
            self._beats.popleft()
        self._beats.append((now, dict(self._reports)))

    def certain(self, member: NodeId) -> float:
        """The newest report of `member`, by its own clock, that a majority has heard of us after; NEVER if none."""
        return self._certain.get(member, NEVER)


class SelfFencing:
    """State of this node's workers: whether they stand still."""

    def __init__(self, context: Context) -> None:
        self._ctx = context
        self._paused_at = 0.0
        self._is_said = False

    def look(self, gap_s: float) -> str:
        """Pause or resume, if it is time to. Returns: why this generation cannot go on any more, "" if it can."""
        ctx = self._ctx
        if ctx.ended or not ctx.has_trained:
            return ""
        if ctx.in_contact:
            if ctx.paused:
                self.resume()
                if self._is_said:
                    ctx.emit(ContactRegained(ctx.now - self._paused_at))
            return ""
        reason = self._no_contact(gap_s)
        if ctx.paused:
            in_vain = ctx.now - self._paused_at >= 2 * ctx.timing.silent_after_s
            return reason if in_vain and not ctx.swapping else ""
        if ctx.world.ranks_of(ctx.node) and ctx.cut_off:
            ctx.paused, self._paused_at, self._is_said = True, ctx.now, ctx.contact_at > ctx.formed_at
            if self._is_said:  # who has asked long ago to join is not cut off: it has had no contact yet
                ctx.emit(ContactLost(reason))
            ctx.act(PauseWorkers())
        return ""

    def _no_contact(self, gap_s: float) -> str:
        """Say who is not heard. A coordinator that has died is named here before anybody counts it as lost."""
        ctx = self._ctx
        own = f" (this agent itself stood still for {gap_s:.1f} s)" if gap_s > ctx.timing.own_pause_s else ""
        span, who = f"for {ctx.now - ctx.contact_at:.1f} s", f"node {ctx.coordinator}, which coordinates,"
        if ctx.leads:
            return f"no majority of the nodes was heard {span}{own}"
        silent = ctx.watch.is_late(ctx.coordinator, ctx.now, since=ctx.formed_at)
        return f"{who} {'was not heard' if own or silent else 'has heard no majority of the nodes'} {span}{own}"

    def resume(self) -> None:
        if self._ctx.paused:
            self._ctx.paused = False
            self._ctx.act(ResumeWorkers())
