"""Processes die, raise or get stuck on nodes that are well: they are replaced where they were, within a budget."""

from __future__ import annotations

import signal
import time

import pytest
from dist.stub_cluster import StubCluster
from dist.test_agent_swap import HOLD, RUN, STEPS, finishes, ready
from support import slow_but

from deadpool_plugin import events
from deadpool_plugin.config import Config


def swapped(cluster, count=1):
    cluster.wait_for(f"{count} swap(s)", lambda: len(cluster.events(events.SwapDone)) == count)


def in_place(planned, *ranks):
    return (planned.lost_nodes, planned.lost_ranks, planned.takers) == ((), ranks, {})


def test_a_killed_process_is_replaced_on_its_node(tmp_path):
    cluster = StubCluster(tmp_path, 4, 2, *RUN)
    try:
        ready(cluster)
        before = [cluster.processes(node) for node in range(4)]
        killed = cluster.kill(1, "worker1")
        swapped(cluster)
        for node in range(4):
            left = {pid: role for pid, role in before[node].items() if pid != killed}
            assert left.items() <= cluster.processes(node).items()
        (planned,) = cluster.events(events.SwapPlanned)
        assert in_place(planned, 3) and planned.restore_step >= HOLD
        assert not cluster.events(events.SnapshotFetched)
        finishes(cluster, lost=())
        assert [event.rank for event in cluster.events(events.RankLost)] == [3]
    finally:
        cluster.close()


@pytest.mark.parametrize("times", slow_but([1, 9], 1))
def test_a_newcomer_that_reads_other_data_is_replaced_once_and_then_ends_the_job(tmp_path, times):
    """The rank is the first order of its agent, its newcomers are the next ones."""
    cluster = StubCluster(tmp_path, 3, 1, *RUN, "--differs", f"1:{1 + times}", spares=0)
    try:
        cluster.train()
        cluster.wait_step(HOLD)
        cluster.kill(1, "worker0")
        if times == 1:
            finishes(cluster, lost=())
        else:
            assert [cluster.wait_exit(node) for node in range(3)] == [1, 1, 1]
            (verdict, *_) = cluster.events(events.JobStopped)
            assert (
                "read other data than rank 1 in step" in verdict.reason
                and "rank 1 on node 1 ended with 1" in verdict.reason
            )
        refused = {event.reason for event in cluster.events(events.RehearsalFailed)}
        assert len(cluster.events(events.RehearsalFailed)) == min(times, 3) and all("rank 1" in one for one in refused)
    finally:
        cluster.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_is_alone_replaces_its_processes_too(tmp_path, rank):
    """Rank 0's offers the store, which nobody else could; without rank 1's the plan is decided at once."""
    cluster = StubCluster(tmp_path, 1, 2, *RUN, spares=0)
    try:
        cluster.train()
        cluster.wait_step(HOLD)
        cluster.kill(0, f"worker{rank}")
        finishes(cluster, lost=())
        (planned,) = cluster.events(events.SwapPlanned)
        assert in_place(planned, rank)
    finally:
        cluster.close()


def test_a_spare_whose_store_was_used_has_another_when_it_is_the_last(tmp_path):
    more = f"memory_headroom_gib: 0\nwitness: {tmp_path / 'witness'}\n"
    cluster = StubCluster(tmp_path, 2, 1, *RUN, more=more)
    try:
        ready(cluster)
        cluster.kill(0, "worker0")
        swapped(cluster)
        cluster.wait_for("protection again", lambda: len(cluster.events(events.Mirrored)) == 2)
        cluster.kill_node(0)
        finishes(cluster, lost=[0])
    finally:
        cluster.close()


def test_all_processes_at_once(tmp_path):
    """The next groups' store can only be one of the new processes', which rehearse longer than a phase may last."""
    cluster = StubCluster(tmp_path, 2, 1, *RUN, "--rehearse-s", "7", spares=0, patience_s=3.0)
    try:
        cluster.train()
        cluster.wait_step(HOLD)
        for node in range(2):
            cluster.kill(node, "worker0")
        finishes(cluster, lost=())
        assert {event.rank for event in cluster.events(events.Rehearsed)} == {0, 1}, "one may be lost as a store's host"
        assert not cluster.events(events.NodeLost)
    finally:
        cluster.close()


def test_the_budget_of_a_rank_is_its_nodes(tmp_path):
    patience_s = 1.0
    more = "memory_headroom_gib: 0\nrestarts_max: 1\n"
    cluster = StubCluster(tmp_path, 4, 1, *RUN, more=more, patience_s=patience_s)
    try:
        ready(cluster)
        cluster.kill(1, "worker0")
        swapped(cluster)
        cluster.wait_for("protection again", lambda: len(cluster.events(events.Mirrored)) == 2)
        time.sleep(Config(patience_s=patience_s).slow_after_s)  # what follows within it is the same storm
        cluster.kill(1, "worker0")
        finishes(cluster, lost=[1])
        first, second = cluster.events(events.SwapPlanned)
        assert in_place(first, 1) and second.takers == {"1": 3}
        assert "restarts_max" in cluster.output(1)
    finally:
        cluster.close()


def test_an_error_that_does_not_come_back_is_survived(tmp_path):
    cluster = StubCluster(tmp_path, 3, 1, *RUN, "--exit-at", "1:9:3", "--once")
    try:
        ready(cluster)
        finishes(cluster, lost=())
        (planned,) = cluster.events(events.SwapPlanned)
        assert in_place(planned, 1)
        assert "RuntimeError: told to at step 9" in cluster.output(1)
    finally:
        cluster.close()


def test_an_error_that_comes_back_is_tried_elsewhere_and_then_ends_the_job_with_its_exit_code(tmp_path):
    cluster = StubCluster(tmp_path, 3, 1, *RUN, "--exit-at", "1:9:3")
    try:
        ready(cluster)
        assert [cluster.wait_exit(node) for node in range(3)] == [3, 3, 3]
        first, second = cluster.events(events.SwapPlanned)
        assert in_place(first, 1) and (second.takers, second.vacated) == ({"1": 2}, (1,))
        assert "script of rank 1 on node 2 ended with 3: RuntimeError: told to at step 9" in cluster.output(0)
    finally:
        cluster.close()


def test_an_error_that_stays_on_its_host_leaves_it_standing_by(tmp_path):
    cluster = StubCluster(tmp_path, 3, 1, *RUN, "--exit-at", "1:9:3", "--only-on", "1")
    try:
        ready(cluster)
        finishes(cluster, lost=())
        assert [(plan.lost_nodes, plan.vacated) for plan in cluster.events(events.SwapPlanned)] == [
            ((), ()),
            ((), (1,)),
        ]
        assert "node 1 stands by from now on" in cluster.all_output()
    finally:
        cluster.close()


@pytest.mark.parametrize("times", slow_but([1, 2, 5], 2))
def test_an_error_of_the_machine_is_survived_however_often_it_comes(tmp_path, times):
    cluster = StubCluster(tmp_path, 3, 1, *RUN, "--disk-fails-at", f"1:9:{times}")
    try:
        ready(cluster)
        finishes(cluster, lost=())
        assert "an error of a file system (Input/output error)" in cluster.all_output()
    finally:
        cluster.close()


def test_an_error_of_every_rank_ends_the_job(tmp_path):
    cluster = StubCluster(tmp_path, 3, 1, *RUN, "--exit-at=-1:9:5")
    try:
        ready(cluster)
        assert [cluster.wait_exit(node) for node in range(3)] == [5, 5, 5]
    finally:
        cluster.close()


def test_a_stopped_process_is_killed_and_replaced_in_place(tmp_path):
    cluster = StubCluster(tmp_path, 4, 1, *RUN, patience_s=3.0)
    try:
        ready(cluster)
        stopped = cluster.kill(1, "worker0", signal.SIGSTOP)
        swapped(cluster)
        assert stopped not in cluster.processes(1)
        finishes(cluster, lost=())
        (planned,) = cluster.events(events.SwapPlanned)
        assert in_place(planned, 1) and "stopped (state T)" in cluster.all_output()
    finally:
        cluster.close()


@pytest.mark.slow
def test_a_process_that_cannot_unwind_is_killed_and_replaced_in_place(tmp_path):
    cluster = StubCluster(tmp_path, 4, 1, *RUN, "--stuck-at", "1:9", patience_s=3.0)
    try:
        ready(cluster)
        (stuck,) = cluster.pids(1, "worker0")
        cluster.wait_for("rank 1 to be stuck", lambda: "rank 1 has come to the step" in cluster.output(1))
        cluster.kill_node(2)
        finishes(cluster, lost=[2])
        first, second = cluster.events(events.SwapPlanned)
        assert first.takers == {"2": 3} and in_place(second, 1)
        (lost,) = cluster.events(events.RankLost)
        assert f"process {stuck} had not left its call" in lost.reason
    finally:
        cluster.close()


def test_a_process_that_hangs_is_seen_when_nothing_comes_of_training_any_more(tmp_path):
    more = "memory_headroom_gib: 0\nstall_timeout_s: 5\n"
    cluster = StubCluster(tmp_path, 3, 1, "--steps", str(STEPS), "--stuck-at", "1:9", patience_s=3.0, more=more)
    try:
        finishes(cluster, lost=())
        first, second = cluster.events(events.SwapPlanned)
        assert (first.lost_nodes, first.lost_ranks) == ((), ()) and in_place(second, 1)
        assert any("no rank got any further" in note.text for note in cluster.events(events.Note))
    finally:
        cluster.close()


@pytest.mark.slow
def test_two_nodes_at_once_with_two_copies(tmp_path):
    cluster = StubCluster(tmp_path, 6, 1, *RUN, spares=2, more="memory_headroom_gib: 0\ncopies: 2\n")
    try:
        ready(cluster, spares=2)
        for node in (1, 2):
            cluster.signal_node(node, signal.SIGSTOP)
        for node in (1, 2):
            cluster.signal_node(node, signal.SIGKILL)
        finishes(cluster, lost=[1, 2])
        lost = [node for planned in cluster.events(events.SwapPlanned) for node in planned.lost_nodes]
        assert sorted(lost) == [1, 2]
    finally:
        cluster.close()
