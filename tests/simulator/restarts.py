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
    """The losses of every rank on every node, within `policy.restarts_window_s`; those within `storm_s` of one that
    counts do not."""

    def __init__(self, policy: Policy, storm_s: float) -> None:
        self._policy, self._storm_s = policy, storm_s
        self._lost: defaultdict[NodeId, defaultdict[Rank, list[float]]] = defaultdict(lambda: defaultdict(list))

    def lost(self, node: NodeId, rank: Rank, now: float) -> None:
        """`node` says that it has lost the process of `rank`, and replaces it."""
        times = self._lost[node][rank]
        times.append(now)
        count = self._counted(times, now, -DRIFT_MAX)
        if count > self._policy.restarts_max:
            raise Violation(
                "BOUNDED",
                f"node {node} replaces the process of rank {rank} for the {count}th time within "
                f"{self._policy.restarts_window_s:g} s, {self._policy.restarts_max} are allowed",
            )

    def gave_up(self, node: NodeId, now: float, reason: str) -> None:
        """`node` leaves, and says that it is for this."""
        most = max((self._counted(times, now, DRIFT_MAX) for times in self._lost[node].values()), default=0)
        if most < self._policy.restarts_max:
            raise Violation("RIGHT_VERDICT", f"node {node} gives up after {most} losses of a rank: {reason}")

    def _counted(self, times: list[float], now: float, drift: float) -> int:
        """Count as a node may whose clock is off by `drift`: the most if that is above 0, else the fewest."""
        window_s, storm_s = self._policy.restarts_window_s / (1 - drift), self._storm_s / (1 + drift)
        counted: list[float] = []
        for when in times:
            if not counted or when - counted[-1] >= storm_s:
                counted.append(when)
        return sum(now - when < window_s for when in counted)
