"""Two nodes of one rack are lost at the same moment: with one copy of each snapshot, and that in another rack."""

from __future__ import annotations

import pytest
from dist.stub_cluster import StubCluster
from dist.test_agent_swap import RUN, finishes, ready

from deadpool_plugin import events


@pytest.mark.slow
def test_a_rack_is_lost_at_once(tmp_path):
    """Along the ring node 1 would hold node 0's mirrors."""
    racks = "memory_headroom_gib: 0\nracks: {a: ['0', '1'], b: ['2', '3'], c: ['4', '5']}\n"
    cluster = StubCluster(tmp_path, 6, 1, *RUN, spares=2, more=racks)
    try:
        ready(cluster, spares=2)
        cluster.kill_node(0)
        cluster.kill_node(1)
        finishes(cluster, lost=[0, 1])
        assert {node for event in cluster.events(events.SwapPlanned) for node in event.lost_nodes} == {0, 1}
        assert "node 0" in cluster.output(0) and "rack a" in cluster.output(0)
    finally:
        cluster.close()
