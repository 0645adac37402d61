"""Losses before training has begun: everything is taken from the top, on the nodes that are left."""

from __future__ import annotations

import pytest
from dist.stub_cluster import StubCluster
from dist.test_agent_swap import RUN, finishes
from support import slow_but

from deadpool_plugin import events

START = (*RUN[:-1], "-1")


@pytest.mark.parametrize("victim", slow_but([0, 1], 0), ids=["coordinator", "another"])
def test_a_node_lost_in_start_up_is_replaced(tmp_path, victim):
    cluster = StubCluster(tmp_path, 4, 2, *START)
    try:
        cluster.wait_for("workers", lambda: all(len(workers(cluster, node)) == 2 for node in range(3)))
        before = [pid for node in range(3) for pid in workers(cluster, node)]
        cluster.kill_node(victim)
        cluster.wait_for("a plan", lambda: cluster.events(events.SwapPlanned))
        cluster.train()
        cluster.wait_for("training", lambda: cluster.events(events.TrainingStarted))
        assert not set(before) & {pid for node in range(4) for pid in workers(cluster, node)}
        finishes(cluster, lost=[victim])
        (planned,) = cluster.events(events.SwapPlanned)
        assert (planned.restore_step, planned.takers) == (-1, {str(victim): 3})
        assert "every rank begins its script again" in cluster.all_output()
    finally:
        cluster.close()


def test_a_process_killed_in_start_up_is_replaced_and_spares_still_rehearse(tmp_path):
    cluster = StubCluster(tmp_path, 4, 1, *START)
    try:
        cluster.wait_for("workers", lambda: all(workers(cluster, node) for node in range(3)))
        cluster.kill(1, "worker0")
        cluster.wait_for("a plan", lambda: cluster.events(events.SwapPlanned))
        cluster.train()
        cluster.wait_for("a ready spare", lambda: cluster.events(events.SpareReady))
        # A spare may be ready before a step is mirrored.
        cluster.wait_for("protection", lambda: cluster.events(events.Protected))
        cluster.kill_node(2)
        finishes(cluster, lost=[2])
        first, second = cluster.events(events.SwapPlanned)
        assert (first.restore_step, first.lost_ranks, first.takers) == (-1, (1,), {})
        assert second.takers == {"2": 3} and second.restore_step >= 0
    finally:
        cluster.close()


def test_an_error_in_start_up_ends_the_job_at_once(tmp_path):
    cluster = StubCluster(tmp_path, 3, 1, "--steps", "5", "--fail-start", "1:4")
    try:
        assert [cluster.wait_exit(node) for node in range(3)] == [4, 4, 4]
        assert "RuntimeError: told to at start" in cluster.output(0)
        assert not cluster.events(events.SwapPlanned)
    finally:
        cluster.close()


def workers(cluster, node):
    return [pid for pid, role in cluster.processes(node).items() if role.startswith("worker")]
