"""Contact between nodes: with a majority, or between two members.

A node without contact to a majority stops its workers before others may replace it (README.md, "Cut off"). Of two
members that do not hear each other, while the coordinator hears both, one has to go if that lasts (README.md, "A
partial partition", "A broken training connection").

Rules of this file: times of two nodes are never compared. Each goes to the other node and comes back with an answer, so
a message that was long under way, or a node that slept, proves no more than it should.
Source: Gray and Cheriton, Leases (SOSP 1989); a leader's lease as in Raft (Ongaro's thesis, 6.4.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from .api import AskHost, HostAnswered, PauseWorkers, ResumeWorkers
from .context import Context
from .events import ContactLost, ContactRegained, Note
from .messages import NodeFailed, Probe
from .processes import AGAIN_WITHIN_STEPS
from .types import NEVER, Generation, NodeId, Step, World

WITNESSES = 2  # members that are asked whether the host of a quiet node answers them


def value_of_quorum(world: World, values: Mapping[NodeId, float], least: float, witness: bool) -> float:
    """The largest value such that members with at least that are a quorum; who has none counts as `least`."""
    found = sorted((values.get(node, least) for node in world.members), reverse=True)
    half, odd = divmod(len(found), 2)
    of_a_majority = found[half]
    if odd or witness:
        return of_a_majority
    return max(of_a_majority, min(found[half - 1], values.get(world.active[0], least)))


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
            in_vain = ctx.now - self._paused_at >= 2 * ctx.timing.slow_after_s
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
        silent = ctx.watch.is_late(ctx.coordinator, ctx.awake)
        return f"{who} {'was not heard' if own or silent else 'has heard no majority of the nodes'} {span}{own}"

    def resume(self) -> None:
        if self._ctx.paused:
            self._ctx.paused = False
            self._ctx.act(ResumeWorkers())


class HostProbes:
    """The search for signs of life of nodes that have grown quiet: a loaded host's kernel answers for a late agent.

    Nothing is asked or sent while everybody is heard. A sign of life makes this node wait longer, never shorter, so no
    lease depends on it.
    """

    def __init__(self, context: Context) -> None:
        self._ctx = context
        self._asked_at: dict[NodeId, float] = {}
        self._sent_at: dict[NodeId, float] = {}
        self._asked_by: dict[NodeId, NodeId] = {}  # members that do not hear a node, and wait for our answer

    def tick(self, watched: Collection[NodeId]) -> None:
        """Ask for those of `watched` that have said nothing for half of the patience; a coordinator has others ask."""
        ctx = self._ctx
        for node in watched:
            if node == ctx.node or not ctx.watch.is_quiet(node, ctx.awake):
                continue
            if ctx.awake - ctx.watch.answered.get(node, NEVER) < ctx.timing.silent_after_s / 4:
                continue
            self._ask(node)
            if ctx.leads and ctx.now - self._sent_at.get(node, NEVER) >= ctx.timing.silent_after_s / 8:
                self._sent_at[node] = ctx.now
                for witness in self._witnesses(node):
                    ctx.send(witness, Probe(ctx.world.generation, node))

    def _ask(self, node: NodeId) -> None:
        ctx = self._ctx
        if ctx.now - self._asked_at.get(node, NEVER) >= ctx.timing.heartbeat_interval_s:
            self._asked_at[node] = ctx.now
            ctx.act(AskHost(node))

    def _witnesses(self, node: NodeId) -> Sequence[NodeId]:
        """Choose members that are heard, behind `node` among all: each node has others."""
        ctx, members = self._ctx, self._ctx.world.members
        place = members.index(node) + 1
        behind = (*members[place:], *members[:place])
        heard = (other for other in behind if other not in ctx.suspects and not ctx.watch.is_quiet(other, ctx.awake))
        return tuple(islice((other for other in heard if other not in (node, ctx.node)), WITNESSES))

    def hear(self, sender: NodeId, message: Probe) -> None:
        if message.answered:
            self._ctx.watch.host_answers(message.node, self._ctx.awake)
        elif message.node != self._ctx.node:
            self._asked_by[message.node] = sender
            self._ask(message.node)

    def answered(self, event: HostAnswered) -> None:
        """Take in a sign of life, and pass it on to the coordinator that has asked for it."""
        ctx = self._ctx
        ctx.watch.host_answers(event.node, ctx.awake - event.ago_s)
        asker = self._asked_by.pop(event.node, None)
        if asker is not None and event.ago_s < ctx.timing.silent_after_s / 4:
            ctx.send(asker, Probe(ctx.world.generation, event.node, answered=True))


class PartialPartition:
    """The complaints that the coordinator does not share: who does not hear whom.

    Who complains does so again for as long as it cannot mirror, fetch or connect. Complaints outlast generations: a
    newcomer that cannot fetch what it is to restore ends each of them."""

    def __init__(self, context: Context) -> None:
        self._ctx = context
        # By pairs, the first of which does not hear the second: the committed step then, and since when it is repeated
        # without a newer one.
        self._complaints: dict[tuple[NodeId, NodeId], tuple[Step, float]] = {}
        self._asked_in: Generation | None = None  # in which generation somebody was last asked to leave
        self._told: set[tuple[Generation, frozenset[NodeId]]] = set()  # the pairs that people were told of
        self._broken: tuple[frozenset[NodeId], Step] | None = None  # whose connection broke last, at which step

    def hear(self, sender: NodeId, node: NodeId) -> None:
        """Note that `sender` does not hear `node`, which we do."""
        ctx, pair = self._ctx, (sender, node)
        if not ctx.leads or ctx.swapping or self._asked_in == ctx.world.generation:
            return
        told = (ctx.world.generation, frozenset(pair))
        if told not in self._told:
            self._told.add(told)
            text = f"nodes {sender} and {node} cannot reach each other; one of them is asked to leave if no step is"
            ctx.emit(Note(f"{text} committed for {ctx.timing.slow_after_s:g} s and the time of a step"))
        committed, since = self._complaints.get(pair, (None, ctx.now))
        if committed != ctx.newest_committed:
            self._complaints[pair] = (ctx.newest_committed, ctx.now)
        elif ctx.now - since >= ctx.timing.slow_after_s + ctx.step_s:
            reason = f"nodes {sender} and {node} cannot reach each other, and no step is committed any more"
            self._ask(max(node, sender, key=self._how_dispensable), reason)  # of equals the one complained of

    def broke(self, sender: NodeId, node: NodeId) -> bool:
        """Note that a training connection of `sender` to `node` broke (to itself: its other end is not known).

        Returns: whether a node leaves for it; else all go on in place, as they are.
        """
        ctx, before = self._ctx, self._broken
        if not ctx.leads or self._asked_in == ctx.world.generation:
            return ctx.leads
        node = node if node in ctx.world.members else sender
        ends = frozenset((sender, node))
        self._broken = (ends, ctx.newest_committed)
        if before is None or ctx.newest_committed - before[1] > AGAIN_WITHIN_STEPS * ctx.every:
            return False
        common = ends & before[0]
        if ctx.newest_committed > before[1] and not (common and ctx.world.spares):
            return False  # it gets on, and nobody could take the place of who is at fault, or it is not known
        goes = max(filter((common or ends).__contains__, (node, sender)), key=self._how_dispensable)
        self._ask(goes, f"training connections of node {goes} broke again after step {before[1]} was committed")
        return True

    def _ask(self, goes: NodeId, reason: str) -> None:
        """Ask a node to leave. Its workers stop before it is replaced."""
        ctx = self._ctx
        ctx.emit(Note(f"node {goes} is asked to leave: {reason}"))
        ctx.send(goes, NodeFailed(ctx.world.generation, goes, reason))
        self._asked_in = ctx.world.generation
        self._complaints.clear()  # without that node the others may reach each other: they complain anew if not

    def _how_dispensable(self, node: NodeId) -> tuple[bool, int]:
        """Return whether it runs no rank, and how many others it does not hear, or do not hear it, since the newest
        committed step."""
        now, others = self._ctx.newest_committed, self._complaints.items()
        broken = {frozenset(pair) for pair, (committed, _) in others if committed == now and node in pair}
        return node in self._ctx.world.spares, len(broken)
