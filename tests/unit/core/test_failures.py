"""Processes lost on healthy nodes: replaced in place, within their budget; a script's own errors end the job."""

from __future__ import annotations

import pytest

from deadpool_plugin.core import io
from deadpool_plugin.core.policy import Policy
from deadpool_plugin.core.types import NO_STEP, World

from .cluster import Cluster
from .test_cluster import finished

WORLD = World(0, (0, 0, 1, 1, 2, 2), (3,))
SEEDS = [None, 1, 2, 3]


def started(seed=None, at: int = 2, world: World = WORLD, **options) -> Cluster:
    cluster = Cluster(world, seed=seed, **options)
    cluster.form()
    assert cluster.run(lambda: bool(cluster.said("Mirrored")) and cluster.knows_of_training() and cluster.at_step(at))
    return cluster


@pytest.mark.parametrize("rank", range(6))
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("exit_code", [-9, 1])
def test_a_lost_process_is_replaced_on_its_node(seed, rank, exit_code):
    cluster = started(seed)
    cluster.kill_rank(WORLD.node_of[rank], rank, exit_code)
    assert cluster.run()
    finished(cluster)
    assert set(cluster.plans) == {1}
    assert cluster.plans[1].lost_ranks == (rank,) and cluster.plans[1].lost_nodes == ()
    assert cluster.plans[1].world == World(1, WORLD.node_of, WORLD.spares)
    assert [event["rank"] for event in cluster.said("RankLost")] == [rank]
    assert not cluster.said("NodeLost")


@pytest.mark.parametrize("seed", range(12))
def test_processes_and_a_node_lost_at_once(seed):
    cluster = started(seed)
    cluster.kill_rank(1, 2)
    cluster.kill_rank(2, 5)
    cluster.kill(0)
    assert cluster.run()
    finished(cluster)
    assert len(cluster.said("RankLost")) == 2


@pytest.mark.parametrize("seed", range(12))
def test_a_failure_told_to_a_coordinator_that_dies_is_told_again(seed):
    cluster = started(seed)
    cluster.kill_rank(2, 4)
    assert cluster.run(lambda: bool(cluster.said("RankLost")))
    cluster.kill(0)
    assert cluster.run()
    finished(cluster)
    (named,) = {plan.lost_ranks for plan in cluster.plans.values() if plan.lost_ranks}
    assert named == (4,)


@pytest.mark.parametrize("rank", range(6))
@pytest.mark.parametrize("when", ["Prepare", "Propose", "Reconfigure"])
@pytest.mark.parametrize("seed", [4, 5, 6])
def test_a_process_lost_during_the_swap(seed, when, rank):
    """Before the promise, after it (also the one that hosts the chosen store), and after Reconfigure: never a hang."""
    cluster = started(seed)
    cluster.kill_rank(1, 2 if rank != 2 else 3)
    home = cluster.nodes[WORLD.node_of[rank]]
    if when == "Reconfigure":
        assert cluster.run(lambda: home.controller.generation == 1)
    elif when == "Propose":
        assert cluster.run(lambda: cluster.has_proposed(1))
    else:
        assert cluster.run(lambda: home.fence == 1)
    cluster.kill_rank(home.number, rank)
    assert cluster.run()
    finished(cluster)
    assert len(cluster.said("RankLost")) == 2
    assert max(cluster.plans) <= 2


def test_the_budget_is_the_nodes_and_a_spare_takes_over_then():
    cluster = started(7, last_step=30, policy=Policy(restarts_max=2))
    for generation in (1, 2):
        cluster.kill_rank(1, 2)
        assert cluster.run(lambda n=generation: len(cluster.said("SwapDone")) == n)
    cluster.kill_rank(1, 3)  # another rank's budget is its own
    assert cluster.run(lambda: len(cluster.said("SwapDone")) == 3)
    cluster.kill_rank(1, 2)
    assert cluster.run()
    finished(cluster, {1})
    assert cluster.exits()[1] == 87 and "restarts_max" in cluster.nodes[1].left[1]
    assert cluster.plans[4].lost_nodes == (1,) and cluster.plans[4].world.node_of == (0, 0, 3, 3, 2, 2)


@pytest.mark.parametrize("window_s, lost", [(40.0, set()), (1000.0, {1})])
def test_losses_long_ago_do_not_count(window_s, lost):
    """Each loss of the rank is some 60 s after the one before."""
    cluster = started(7, last_step=30, policy=Policy(restarts_max=2, restarts_window_s=window_s))
    for number in range(1, 4):
        cluster.kill_rank(1, 2)
        assert cluster.run(lambda n=number: len(cluster.said("SwapDone")) == n)
        cluster.hold, until = True, cluster.now + 60
        assert cluster.run(lambda end=until: cluster.now >= end)
        cluster.hold = False
    assert cluster.run()
    finished(cluster, lost)
    assert [plan.lost_nodes for plan in cluster.plans.values()] == [(), (), tuple(lost)]


def test_no_restarts_means_a_crash_costs_the_host():
    cluster = started(8, policy=Policy(restarts_max=0))
    cluster.kill_rank(2, 5)
    assert cluster.run()
    finished(cluster, {2})
    assert cluster.plans[1].lost_nodes == (2,)


def test_an_error_that_comes_back_ends_the_job():
    cluster = started(9, last_step=30)
    cluster.kill_rank(1, 2, 3)
    assert cluster.run(lambda: bool(cluster.said("SwapDone")))
    cluster.kill_rank(1, 2, 3)
    assert cluster.run()
    assert set(cluster.exits().values()) == {3}
    assert all("rank 2" in node.left[1] and "ValueError" in node.left[1] for node in cluster.nodes.values())
    assert not any("new processes" in node.left[1] for node in cluster.nodes.values()), "its own is the only one"


def test_an_error_that_comes_back_beside_a_newcomer_may_be_the_newcomers():
    """A collective that a newcomer issues and the others do not is an error in who reads its answer."""
    cluster = started(9, last_step=30)
    cluster.kill(2)
    assert cluster.run(lambda: len(cluster.said("SwapDone")) == 1)
    cluster.kill_rank(1, 2, 3)
    assert cluster.run(lambda: len(cluster.said("SwapDone")) == 2)
    cluster.kill_rank(1, 2, 3)
    assert cluster.run()
    exits = [node.left for node in cluster.nodes.values() if not node.killed]
    assert {code for code, _ in exits} == {3}
    assert all("rank(s) 4, 5 run in new processes" in reason for _, reason in exits)


def test_an_error_long_after_another_is_another():
    cluster = started(10, last_step=30)
    for generation in (1, 2):
        cluster.kill_rank(1, 2, 3)
        assert cluster.run(lambda n=generation: len(cluster.said("SwapDone")) == n)
        newest = max(cluster.committed.values())
        assert cluster.run(lambda n=newest: max(cluster.committed.values()) > n + 3)
    assert cluster.run()
    finished(cluster)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_error_of_every_rank_ends_the_job_at_once(seed):
    cluster = started(seed)
    for rank, home in enumerate(WORLD.node_of):
        cluster.kill_rank(home, rank, 3 + rank)
    for node in cluster.nodes.values():
        while node.deaths and node.up:
            cluster.notice(node)
    assert cluster.run()
    assert set(cluster.exits().values()) == {3}
    assert "rank 0" in cluster.nodes[3].left[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_an_error_before_training_ends_the_job(seed):
    cluster = Cluster(WORLD, seed=seed)
    cluster.form()
    cluster.nodes[1].inputs.append(io.WorkerFailed(2, 3, "ImportError"))
    assert cluster.run()
    assert set(cluster.exits().values()) == {3} and not cluster.plans


@pytest.mark.parametrize("rank", range(6))
@pytest.mark.parametrize("seed", SEEDS)
def test_a_process_lost_before_training_begins_the_script_again(seed, rank):
    cluster = Cluster(WORLD, seed=seed)
    cluster.form()
    cluster.run(lambda: any(cluster.starts.values()))
    cluster.kill_rank(WORLD.node_of[rank], rank)
    assert cluster.run()
    finished(cluster)
    assert cluster.plans[1].restore_step in (NO_STEP, 0)
    assert cluster.plans[1].world.spares == WORLD.spares


@pytest.mark.parametrize("seed", range(8))
def test_losses_while_the_script_begins_again(seed):
    cluster = Cluster(WORLD, seed=seed)
    cluster.form()
    cluster.kill_rank(0, 1)
    assert cluster.run(lambda: cluster.nodes[2].controller.generation == 1)
    cluster.kill_rank(2, 4)
    assert cluster.run(lambda: 2 in cluster.plans)
    cluster.kill(0)
    assert cluster.run()
    finished(cluster)


@pytest.mark.parametrize("exit_code", [-9, 1])
def test_the_only_node_replaces_its_processes_too(exit_code):
    cluster = Cluster(World(0, (0, 0)))
    cluster.form()
    assert cluster.run(lambda: cluster.knows_of_training() and cluster.at_step(2))
    cluster.kill_rank(0, 1, exit_code)
    assert cluster.run()
    finished(cluster)
    assert set(cluster.plans) == {1}
