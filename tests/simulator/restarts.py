"""BOUNDED: a rank's process is replaced on its own node as often as the user allows, no more and no less.

Rules of this file: counts what nodes say and when, by the simulation's clock; a node's own may run a little faster or
slower, which is allowed for.
"""

from __future__ import annotations

from collections import defaultdict

from deadpool_plugin.core.policy import Policy
from deadpool_plugin.core.types import NodeId, Rank

from .schedule import DRIFT_MAX
from .violation import Violation


class Restarts:
    """The losses of every rank on every node, within `policy.restarts_window_s`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lost: defaultdict[NodeId, defaultdict[Rank, list[float]]] = defaultdict(lambda: defaultdict(list))

    def lost(self, node: NodeId, rank: Rank, now: float) -> None:
        """`node` says that it has lost the process of `rank`, and replaces it."""
        times = self._lost[node][rank]
        times.append(now)
        count = self._within(times, now, self._policy.restarts_window_s / (1 + DRIFT_MAX))
        if count > self._policy.restarts_max:
            raise Violation(
                "BOUNDED",
                f"node {node} replaces the process of rank {rank} for the {count}th time within "
                f"{self._policy.restarts_window_s:g} s, {self._policy.restarts_max} are allowed",
            )

    def gave_up(self, node: NodeId, now: float, reason: str) -> None:
        """`node` leaves, and says that it is for this."""
        window_s = self._policy.restarts_window_s / (1 - DRIFT_MAX)
        most = max((self._within(times, now, window_s) for times in self._lost[node].values()), default=0)
        if most < self._policy.restarts_max:
            raise Violation("RIGHT_VERDICT", f"node {node} gives up after {most} losses of a rank: {reason}")

    def _within(self, times: list[float], now: float, window_s: float) -> int:
        return sum(now - when < window_s for when in times)
