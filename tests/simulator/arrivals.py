"""Hosts that join a simulated job: what `deadpool join` gives their agents, which do the rest.

Rules of this file: a host is named by the number after the largest that was ever used, and told of the members that
are up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deadpool_plugin.agent.world import Invitation

from .node import Node

if TYPE_CHECKING:
    from .cluster import Cluster

HOSTS_MAX = 6
"""Limit of hosts that join one job."""
RANKS_A_HOST = 24
"""Ranks for each host that comes to a waiting job; one comes at least. A large job may have lost a rack."""
RETRY_S = 0.2


class Arrivals:
    """One job's."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def add_host(self, at_most: int = HOSTS_MAX) -> bool:
        """One more host asks to become a member; False if there have been enough."""
        cluster = self._cluster
        if len(cluster.nodes) >= len(cluster.world.members) + at_most:
            return False
        node = cluster.add_node(max(cluster.nodes) + 1)
        cluster.blows.meet(node)
        self._invite(node)
        return True

    def supply_hosts(self) -> None:
        """As long as everybody waits for a host there are more that come."""
        cluster = self._cluster
        nodes = [node for node in cluster.nodes.values() if node.up and node.agent is not None]
        if any(node.controller._ctx.waiting for node in nodes):
            for _ in range(max(1, cluster.ranks // RANKS_A_HOST)):
                self.add_host(at_most=HOSTS_MAX + cluster.ranks)
        if not cluster.is_over:
            cluster.timeline.after(2 * cluster.timing.silent_after_s, self.supply_hosts)

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
