"""Hosts that join a simulated job: what `deadpool join` gives their agents, which do the rest; and what brings them.

Rules of this file: a host is named by the number after the largest that was ever used, and told of the members that
are up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from deadpool_plugin.agent.world import Invitation

from .node import Node
from .schedule import COMMANDS

if TYPE_CHECKING:
    from .cluster import Cluster

HOSTS_MAX = 6
"""Limit of hosts that join one job."""
RANKS_A_HOST = 24
"""Ranks for each host that comes to a waiting job; one comes at least. A large job may have lost a rack."""
RETRY_S = 0.2
COMES_S = 5.0
"""A host that `spare_command` brings comes within so long of its end."""


class Arrivals:
    """One job's."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._runs = 0

    def add_host(self, at_most: int = HOSTS_MAX) -> bool:
        """One more host asks to become a member; False if there have been enough."""
        cluster = self._cluster
        if len(cluster.nodes) >= len(cluster.world.members) + at_most:
            return False
        node = cluster.add_node(max(cluster.nodes) + 1)
        cluster.blows.meet(node)
        self._invite(node)
        return True

    async def run_command(self, limit_s: float) -> tuple[int | None, str]:
        """Run the job's `spare_command`. Returns: its exit code, None if it was ended; its last line of output."""
        cluster, kind = self._cluster, self._cluster.scenario.command
        self._runs += 1
        cluster.note(f"spare_command runs, which {COMMANDS[kind]}")
        if kind != "one":
            cluster.strikes.struck[f"spare_command {kind}"] += 1
        await asyncio.sleep({"slow": 0.9 * limit_s, "hangs": limit_s}.get(kind, cluster.rng.random()))
        if kind == "hangs":
            return None, ""
        if kind == "fails" or (kind == "late" and self._runs == 1):
            return 1, "no host is free"
        for _ in range({"nobody": 0, "two": 2}.get(kind, 1)):
            cluster.timeline.after(COMES_S * cluster.rng.random(), self.add_host)
        return 0, "a host was asked for"

    def supply_hosts(self) -> None:
        """As long as everybody waits for a host there are more that come."""
        cluster = self._cluster
        nodes = [node for node in cluster.nodes.values() if node.up and node.agent is not None]
        if any(node.controller._ctx.waiting for node in nodes):
            for _ in range(max(1, cluster.ranks // RANKS_A_HOST)):
                self.add_host(at_most=HOSTS_MAX + cluster.ranks)
        if not cluster.is_over:
            cluster.timeline.after(2 * cluster.timing.slow_after_s, self.supply_hosts)

    def _invite(self, node: Node) -> None:
        """Once a member has met the others: before, there is no job to join, and after it none any more."""
        first = self._cluster.world.members
        others = [
            other for other in self._cluster.nodes.values() if other.up and (other.number in first or other.agent)
        ]
        for other in others:
            if other.controller.world is not None and other.agent is not None:
                members = tuple(hello.control for hello in other.agent._links.hellos)
                node.begin(Invitation(other.credentials.job, members))
                return
        if others:
            self._cluster.timeline.after(RETRY_S, node.do, self._invite, node)
        elif node.runs:
            node.find_nobody()
