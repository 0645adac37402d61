"""Tests of how old a node's certainties may be: four heartbeat intervals and a tick, whatever the pace of the job."""

from __future__ import annotations

import pytest

from simulator.cluster import Cluster
from simulator.network import faked
from simulator.schedule import scenario

JOB = {
    "faults": (), "drift": 0.0, "active": 4, "spares": 2, "slots": 1, "shards": 4, "copies": 1, "racks": 0,
    "latency_s": 0.002, "wait_for_hosts": False, "witness": False,
}  # fmt: skip
INTERVALS = 4


@pytest.mark.parametrize("step_s", [0.1, 0.49, 0.9, 2.0])
def test_certainty_lags_by_no_more_than_four_heartbeats(step_s):
    """Steps shorter than a heartbeat interval, about as long, and longer: each commit is a Status of its own."""
    cluster = Cluster(scenario(1, fixed={**JOB, "compute_s": step_s}))
    worst = 0.0
    with faked():
        while not cluster.is_over and cluster.timeline.step():
            if cluster.checkers.committed.get(0, -1) >= 3:
                contexts = [node.controller._ctx for node in cluster.nodes.values() if node.up]
                worst = max([worst, *(ctx.now - ctx.contact_at for ctx in contexts if not ctx.ended)])
    assert 0.0 < worst <= INTERVALS * cluster.timing.heartbeat_interval_s + 2 * cluster.config.tick_s
    assert not cluster.events["ContactLost"] and cluster.events["JobFinished"]
