"""Hosts that join a simulated job: each links to whoever is there, then asks.

Rules of this file: the contract of deadpool join; one newcomer links at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core import io
from .node import Node
from .tasks import Task, Work

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
        self._arriving: Node | None = None

    def add_host(self, at_most: int = HOSTS_MAX) -> bool:
        """One more host asks to become a member; False if there have been enough."""
        cluster = self._cluster
        if len(cluster.nodes) >= len(cluster.world.members) + at_most:
            return False
        node = cluster.add_node(max(cluster.nodes) + 1)
        cluster.blows.meet(node)
        Task(node, self._arrive(node))
        return True

    def supply_hosts(self) -> None:
        """As long as everybody waits for a host there are more that come."""
        cluster = self._cluster
        if any(node.up and node.controller._ctx.waiting for node in cluster.nodes.values()):
            for _ in range(max(1, cluster.ranks // RANKS_A_HOST)):
                self.add_host(at_most=HOSTS_MAX + cluster.ranks)
        if not cluster.is_over:
            cluster.timeline.after(2 * cluster.timing.silent_after_s, self.supply_hosts)

    def _arrive(self, node: Node) -> Work:
        """Link to everybody a member knows, one newcomer at a time; then ask."""
        cluster, network, number = self._cluster, self._cluster.network, node.number
        while self._arriving not in (None, node) and self._arriving.up:
            yield RETRY_S
        self._arriving = node
        deadline = cluster.timeline.now + cluster.timing.start_timeout_s / 3
        while cluster.timeline.now < deadline:
            asked = self._member_to_ask(node)
            if asked is None and node.verdict is not None:
                break
            if asked is not None:
                there = {n for n in cluster.nodes if n == asked.number or network.linked(asked.number, n)} - {number}
                for other in sorted(n for n in there if not network.linked(number, n)):
                    if cluster.nodes[other].up and self._reach_each_other(node, cluster.nodes[other]):
                        network.link(number, other)
                if all(network.linked(number, other) for other in there):
                    assert asked.controller.world is not None
                    self._arriving = None
                    members = tuple(n for n in asked.controller.world.members if n in there)
                    node.feed(io.Joining(members, cluster.scenario.rack_of(number)))
                    node.start_clock()
                    return
            yield RETRY_S
        self._arriving = None
        told = node.verdict
        node.exit = (1, "no member could be reached") if told is None else (told.exit_code, told.reason)
        node.stop()

    def _member_to_ask(self, node: Node) -> Node | None:
        for other in self._cluster.nodes.values():
            world = other.controller.world
            if other.up and world is not None and other.number in world.members and self._reach_each_other(node, other):
                return other
        return None

    def _reach_each_other(self, a: Node, b: Node) -> bool:
        network = self._cluster.network
        return not b.paused and network.passes(a.number, b.number) and network.passes(b.number, a.number)
