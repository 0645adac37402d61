"""One node's evidence about the others: fast evidence counts at once, silence at its deadline.

Rules of this file: time is an argument; one's own pause is no evidence about others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from .policy import Timing
from .types import NodeId


@dataclass
class Watch:
    """One node's view of the others."""

    timing: Timing
    evidence: dict[NodeId, str] = field(default_factory=dict)  # why each lost node is lost
    silent: set[NodeId] = field(default_factory=set)  # those for nothing but silence, which alone may be taken back
    heard: dict[NodeId, float] = field(default_factory=dict)  # when this node last heard of each
    unheard: set[NodeId] = field(default_factory=set)
    """Nodes that have not said a word to this one since the hosts met. They may still wait for a link to a host that
    has died, so their silence counts only after `Timing.linking_s`; a link that ends counts as ever. Nobody is in it
    any more where training has begun and another node coordinates: others need not have spoken to that one before."""

    def hear(self, node: NodeId, now: float) -> None:
        self.heard[node] = now
        self.unheard.discard(node)

    def hears(self, node: NodeId, now: float) -> bool:
        limit_s = self.timing.silent_after_s
        return now - self.heard.get(node, now - limit_s) < limit_s

    def is_late(self, node: NodeId, now: float, since: float | None = None) -> bool:
        """Return whether half of the time is over after which `node` is lost for its silence.

        Args: since: when its silence began if it was never heard of; now if not given.
        """
        return now - self.heard.get(node, now if since is None else since) >= self.timing.silent_after_s / 2

    def silences(self, nodes: Collection[NodeId], now: float) -> dict[NodeId, str]:
        """Find those of `nodes` that are to be counted as lost for their silence, each with the reason."""
        found = {}
        for node in nodes:
            silence_s = now - self.heard.get(node, now)
            limit_s = self.timing.linking_s if node in self.unheard else self.timing.silent_after_s
            if silence_s >= limit_s and node not in self.evidence:
                found[node] = f"silent for {silence_s:.1f} s (limit {limit_s:g} s)"
        return found

    def suspect(self, node: NodeId, reason: str, silent: bool = False) -> bool:
        """Count `node` as lost; the first reason stays. Returns: whether that is news."""
        is_news = node not in self.evidence
        if not silent:
            self.silent.discard(node)
        elif is_news:
            self.silent.add(node)
        if is_news:
            self.evidence[node] = reason
        return is_news

    def clear(self, node: NodeId) -> bool:
        """Drop the evidence about `node`: it is of an earlier connection, of one that is no member and asks anew; or
        a silence that is over. Returns: whether there was any."""
        self.silent.discard(node)
        return self.evidence.pop(node, None) is not None

    def excuse_pause(self, gap_s: float) -> None:
        """Stop the others' clocks for `gap_s`, while we stood still: what they sent meanwhile may still be queued."""
        self.heard = {node: at + gap_s for node, at in self.heard.items()}
