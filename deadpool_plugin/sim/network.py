"""Control links between nodes as TCP makes them, under faults.

Rules of this file: between two nodes bytes arrive in the order in which they were sent or the link ends; there is no
third way, and core relies on it. So a rule's DROP is a lost segment: it and all behind it wait and are tried again;
what is not acknowledged for `user_timeout_s` ends the link at its sender, also where only acknowledgements are lost.
A link that breaks loses a suffix of what was under way, then each end that can hear of it is told; a sender to an end
that has closed is told when it speaks. A link is never made again (a node that is lost to another stays so). A
duplicate arrives right behind its original: less than TCP forbids, and more than core may assume. Messages on different
links overtake each other freely.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.messages import AnyMessage
from ..core.types import NodeId
from .clock import Timeline
from .rules import Rules
from .violation import Violation

RETRY_S = 0.2
FLUSH_S = 1.0
UNANSWERED = "nothing was acknowledged in time"
"""Why a link has ended that nobody ended."""
QUEUE_MAX = 20_000
"""Messages on one link nobody reads: more than this is no queue but a leak (BOUNDED)."""


@dataclass
class End:
    """The last thing on a link: it is over."""

    reason: str


@dataclass(slots=True)
class Line:
    """One direction of a link. `open`: its sender may use it. `flight`: what arrives when, in order."""

    open: bool = True
    waiting: list[AnyMessage | End] = field(default_factory=list)
    flight: list[tuple[float, AnyMessage | End]] = field(default_factory=list)
    stalled_since: float | None = None
    retrying: bool = False
    awaits_ack: bool = False
    arrives_at: float = 0.0


class Network:
    """All links. `deliver(target, source, message)` and `lost(target, source, reason)` are told what arrives.

    `dark`: the nodes without power, whose kernel answers nobody.
    """

    def __init__(
        self, timeline: Timeline, rules: Rules, rng: random.Random, latency_s: float, user_timeout_s: float
    ) -> None:
        self._timeline, self.rules, self._rng = timeline, rules, rng
        self._latency_s, self._user_timeout_s = latency_s, user_timeout_s
        self._lines: dict[tuple[NodeId, NodeId], Line] = {}
        self._peers: dict[NodeId, list[NodeId]] = {}
        self.deliver: Callable[[NodeId, NodeId, AnyMessage], None] = lambda target, source, message: None
        self.lost: Callable[[NodeId, NodeId, str], None] = lambda target, source, reason: None
        self.dark: set[NodeId] = set()

    def link(self, a: NodeId, b: NodeId) -> None:
        self._lines[a, b], self._lines[b, a] = Line(), Line()
        self._peers.setdefault(a, []).append(b)
        self._peers.setdefault(b, []).append(a)

    def linked(self, a: NodeId, b: NodeId) -> bool:
        """Return whether `a` believes that it has a link to `b`."""
        line = self._lines.get((a, b))
        return line is not None and line.open

    def latency(self) -> float:
        return self._rng.random() * self._latency_s

    def passes(self, source: NodeId, target: NodeId) -> bool:
        """Return whether one attempt from `source` to `target` arrives."""
        if source in self.dark or target in self.dark:
            return False
        return self.rules.judge(self._timeline.now, source, target).copies > 0

    def answers(self, source: NodeId, target: NodeId) -> bool:
        """Return whether `source` gets a connection to `target`, or a refusal."""
        now = self._timeline.now
        cut = self.rules.is_cut(now, source, target) or self.rules.is_cut(now, target, source)
        return not cut and target not in self.dark

    # -- sending -----------------------------------------------------------------------------------------------

    def send(self, source: NodeId, target: NodeId, message: AnyMessage) -> bool:
        """Queue `message`; False without a link (it is dropped)."""
        line = self._lines.get((source, target))
        if line is None or not line.open:
            return False
        line.waiting.append(message)
        if not line.retrying:
            self._pump(source, target, line)
        elif len(line.waiting) > QUEUE_MAX:
            raise Violation("BOUNDED", f"{QUEUE_MAX} messages wait on the link from node {source} to node {target}")
        return True

    def _pump(self, source: NodeId, target: NodeId, line: Line) -> None:
        """Put on the wire what passes; try again later what does not."""
        line.retrying = False
        now = self._timeline.now
        while line.waiting:
            passage = self.rules.judge(now, source, target)
            if not passage.copies or target in self.dark:
                self._stall(source, target, line)
                return
            line.stalled_since = None
            if not line.awaits_ack and self.rules.is_cut(now, target, source):
                line.awaits_ack = True
                self._timeline.after(self._user_timeout_s, self._check_ack, source, target, line)
            item = line.waiting.pop(0)
            self._fly(source, target, line, item, passage.delay_s)
            if passage.copies > 1 and not isinstance(item, End):
                self._fly(source, target, line, item, passage.delay_s)

    def _fly(self, source: NodeId, target: NodeId, line: Line, item: AnyMessage | End, delay_s: float) -> None:
        when = self._timeline.now + self.latency() + delay_s
        if when > line.arrives_at or not line.flight:
            line.arrives_at = max(when, line.arrives_at)
            self._timeline.at(line.arrives_at, self._arrive, source, target, line)
        line.flight.append((line.arrives_at, item))

    def _stall(self, source: NodeId, target: NodeId, line: Line) -> None:
        now = self._timeline.now
        if line.stalled_since is None:
            line.stalled_since = now
        if now - line.stalled_since >= self._user_timeout_s:
            self._give_up(source, target, line, UNANSWERED)
        else:
            line.retrying = True
            self._timeline.after(RETRY_S * (0.5 + self._rng.random()), self._pump, source, target, line)

    def _check_ack(self, source: NodeId, target: NodeId, line: Line) -> None:
        """Give the line up if what was sent has arrived, but no acknowledgement could come back for too long."""
        now = self._timeline.now
        if not (line.open and self.rules.is_cut(now, target, source)):
            line.awaits_ack = False
        elif self.rules.is_cut(now, target, source, self._user_timeout_s):
            self._give_up(source, target, line, UNANSWERED)
        else:
            self._timeline.after(RETRY_S, self._check_ack, source, target, line)

    def _give_up(self, source: NodeId, target: NodeId, line: Line, reason: str) -> None:
        line.waiting.clear()
        if line.open:
            line.open = False
            self.lost(source, target, reason)

    def _arrive(self, source: NodeId, target: NodeId, line: Line) -> None:
        while line.flight and line.flight[0][0] <= self._timeline.now:
            item = line.flight.pop(0)[1]
            back = self._lines[target, source]
            if isinstance(item, End):
                if back.open:
                    back.open = False
                    back.waiting.clear()
                    self.lost(target, source, item.reason)
            elif back.open:
                self.deliver(target, source, item)
            elif line.open and self.passes(target, source):
                self._answer_reset(target, source, back)

    def _answer_reset(self, source: NodeId, target: NodeId, line: Line) -> None:
        """`target` spoke to an end that has closed, whose kernel says so: behind all that is under way already."""
        if not any(isinstance(item, End) for item in (*line.waiting, *(there for _, there in line.flight))):
            self._fly(source, target, line, End("connection reset by peer"), 0.0)

    # -- ends --------------------------------------------------------------------------------------------------

    def close(self, node: NodeId, peer: NodeId, reason: str, keeps: bool) -> None:
        """`node` ends its link to `peer`; what it has queued still goes out if it `keeps` it (for a short while)."""
        line = self._lines.get((node, peer))
        if line is None or not line.open:
            return
        line.open = False
        if not keeps:
            self._cut_suffix(line)
        line.waiting.append(End(reason))
        if not line.retrying:
            self._pump(node, peer, line)
        self._timeline.after(FLUSH_S, self._forget, line)

    def _forget(self, line: Line) -> None:
        line.waiting.clear()

    def _cut_suffix(self, line: Line) -> None:
        line.waiting.clear()
        for _ in range(self._rng.randint(0, len(line.flight))):
            line.flight.pop()

    def break_link(self, a: NodeId, b: NodeId, reason: str) -> bool:
        """The connection itself breaks (a reset by something between them). Returns: whether there was one."""
        if not (self.linked(a, b) and self.linked(b, a)):
            return False
        for source, target in ((a, b), (b, a)):
            line = self._lines[source, target]
            self._cut_suffix(line)
            self._fly(source, target, line, End(reason), 0.0)
        return True

    def keep_alive(self, a: NodeId, b: NodeId) -> None:
        """Nothing has passed between `a` and `b` for the time-out: keep-alives find the end of an idle link, too."""
        for source, target in ((a, b), (b, a)):
            line = self._lines.get((source, target))
            if line is not None and source not in self.dark:
                self._give_up(source, target, line, UNANSWERED)

    def vanish(self, node: NodeId) -> None:
        """`node` has lost its power: nothing of what it said last and nothing of its end is heard."""
        self.dark.add(node)
        for peer in self._peers.get(node, ()):
            line = self._lines[node, peer]
            line.open = False
            self._cut_suffix(line)
        self._timeline.after(self._user_timeout_s, self._probe, node)

    def _probe(self, node: NodeId) -> None:
        """Keep-alives find the end of links that are used by nobody."""
        for peer in self._peers.get(node, ()):
            self._give_up(peer, node, self._lines[peer, node], UNANSWERED)
