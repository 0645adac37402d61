"""The lost nodes, each with its reason: fast evidence counts at once, silence at its deadline.

Rules of this file: `(now, state, config) -> (result, reason)`, nothing is remembered here but what the caller puts in;
one's own pause is no evidence about others. May import policy and types only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .policy import Timing
from .types import NodeId


@dataclass
class Watch:
    """One node's view of the others: `evidence`, of whom there is none but its silence (`silent`; only that is ever
    taken back from a member), and when it last `heard` of them. `findings` grows with every change of the evidence.

    `unheard`: who has not said a word to this node since the hosts met. It may still wait for a link to a host that has
    died, so its silence counts only after `Timing.linking_s`; a link that ends counts as ever. Nobody is in it any more
    where training has begun and another node coordinates: others need not have spoken to that one before.
    """

    evidence: dict[NodeId, str] = field(default_factory=dict)
    silent: set[NodeId] = field(default_factory=set)
    heard: dict[NodeId, float] = field(default_factory=dict)
    unheard: set[NodeId] = field(default_factory=set)
    findings: int = 0

    def begin(self, nodes: Collection[NodeId], now: float, anew: Collection[NodeId] = ()) -> None:
        """Count the silence of `nodes` from `now` on (they report to us only since now); that of `anew` until now does
        not count."""
        for node in anew:
            self.pardon(node)
        for node in nodes:
            self.heard[node] = now

    def hear(self, node: NodeId, now: float) -> None:
        self.heard[node] = now
        self.unheard.discard(node)

    def hears(self, node: NodeId, now: float, timing: Timing) -> bool:
        """Return whether we have heard of `node` ourselves, lately enough not to count it as lost for its silence."""
        return now - self.heard.get(node, now - timing.silent_after_s) < timing.silent_after_s

    def is_late(self, node: NodeId, now: float, timing: Timing) -> bool:
        """Return whether half of the time is over after which `node` is lost for its silence."""
        return now - self.heard.get(node, now) >= timing.silent_after_s / 2

    def accuse(self, node: NodeId, reason: str, silent: bool = False) -> None:
        """`node` is lost; the first reason stays. `silent`: for nothing but its silence."""
        if not silent:
            self.silent.discard(node)
        elif node not in self.evidence:
            self.silent.add(node)
        if node not in self.evidence:
            self.evidence[node] = reason
            self.findings += 1

    def pardon(self, node: NodeId) -> None:
        """Drop the evidence about `node`: it is of an earlier connection, of one that is no member and asks anew; or
        a silence that is over."""
        if self.evidence.pop(node, None) is not None:
            self.findings += 1
        self.silent.discard(node)

    def excuse_pause(self, gap_s: float, timing: Timing) -> bool:
        """We ran last `gap_s` ago: what others sent meanwhile may still be queued, so their clocks stood still too.

        Returns: whether that was a pause of our own.
        """
        paused = gap_s > timing.own_pause_s
        if paused:
            self.heard = {node: at + gap_s for node, at in self.heard.items()}
        return paused


def suspects(now: float, watch: Watch, watched: Collection[NodeId], timing: Timing) -> Mapping[NodeId, str]:
    """The nodes that are lost, each with the reason; silence counts for the `watched` ones only."""
    found = dict(watch.evidence)
    for node in watched:
        silence_s = now - watch.heard.get(node, now)
        limit_s = timing.linking_s if node in watch.unheard else timing.silent_after_s
        if node not in found and silence_s >= limit_s:
            found[node] = f"silent for {silence_s:.1f} s (limit {limit_s:g} s)"
    return found
