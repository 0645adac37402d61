"""Two hosts, one of them a spare: with a witness the spare goes on alone when the other one is lost."""

from __future__ import annotations

from dist.stub_cluster import StubCluster
from dist.test_agent_swap import RUN, finishes, ready

from deadpool_plugin import events


def test_the_second_half_goes_on_too(tmp_path):
    more = f"memory_headroom_gib: 0\nwitness: {tmp_path / 'witness'}\n"
    cluster = StubCluster(tmp_path, 2, 1, *RUN, more=more)
    try:
        ready(cluster)
        cluster.kill_node(0)
        finishes(cluster, lost=[0])
        (planned,) = cluster.events(events.SwapPlanned)
        kept = [path for path in (tmp_path / "witness").iterdir() if path.suffix != ".shared" and path.name[0] != "."]
        assert planned.takers == {"0": 1} and len(kept) == 1
    finally:
        cluster.close()
