"""Whichever process of a node is killed how, nothing of the node is left, and the other nodes are not touched by it."""

from __future__ import annotations

import itertools
import signal

import pytest
from dist.stub_cluster import StubCluster
from support import slow_but

from deadpool_plugin import events

ALWAYS = ("--steps", "100000", "--children")


def started(directory, **options):
    cluster = StubCluster(directory, 3, 2, *ALWAYS, **options)
    cluster.wait_for("a ready spare", lambda: cluster.events(events.SpareReady))
    cluster.wait_for("grandchildren", lambda: len(sleepers(cluster, 1)) == 4)
    cluster.wait_for("a committed step", lambda: cluster.events(events.StepCommitted))  # else a loss is the end
    return cluster


def sleepers(cluster, node):
    return {pid for pid, role in cluster.processes(node).items() if role.startswith("sleep")}


ENDED = itertools.product(
    [signal.SIGKILL, signal.SIGTERM], ["standby1", "supervisor0", "agent", "launcher", "supervisor1"]
)


@pytest.mark.parametrize(("number", "role"), slow_but([*ENDED, (signal.SIGSTOP, "standby1")], 1, 2))
def test_nothing_is_left_of_the_node_and_its_ranks_move(tmp_path, role, number):
    cluster = started(tmp_path, executes=True)
    try:
        before = cluster.processes(0)
        cluster.kill(1, role, number)
        cluster.wait_gone(1)
        cluster.wait_for("the swap", lambda: cluster.events(events.SwapDone))
        (planned,) = cluster.events(events.SwapPlanned)
        assert planned.lost_nodes == (1,)
        assert before.items() <= cluster.processes(0).items()
    finally:
        cluster.close()


def test_sigterm_of_every_launcher_ends_everything(tmp_path):
    cluster = started(tmp_path)
    try:
        for launcher in cluster.launchers:
            launcher.terminate()
        for node in range(3):
            cluster.wait_gone(node)
            assert cluster.wait_exit(node) != 0
    finally:
        cluster.close()


@pytest.mark.parametrize("number", slow_but([signal.SIGKILL, signal.SIGTERM], 0))
def test_a_process_leaves_nothing_behind_when_it_is_replaced(tmp_path, number):
    cluster = started(tmp_path, executes=True)
    try:
        before = sleepers(cluster, 1)
        cluster.kill(1, "worker1", number)
        cluster.wait_for("the swap", lambda: cluster.events(events.SwapDone))
        cluster.wait_for("new grandchildren", lambda: len(sleepers(cluster, 1)) == 4)
        assert len(sleepers(cluster, 1) & before) == 2
        (planned,) = cluster.events(events.SwapPlanned)
        assert (planned.lost_nodes, planned.lost_ranks) == ((), (3,))
    finally:
        cluster.close()


def without_reader(tmp_path, policy, *nodes):
    """Started, and then nobody reads what these nodes say."""
    more = f"memory_headroom_gib: 0\non_launcher_loss: {policy}\n"
    cluster = started(tmp_path, piped=nodes, more=more)
    for node in nodes:
        cluster.launchers[node].stdout.close()
    return cluster


def test_a_job_goes_on_without_its_launcher(tmp_path):
    cluster = without_reader(tmp_path, "continue", 0, 1, 2)
    try:
        before = max(event.step for event in cluster.events(events.StepCommitted))
        cluster.wait_for("more steps", lambda: cluster.events(events.StepCommitted)[-1].step > before + 20)
        assert not cluster.events(events.SwapPlanned)
    finally:
        cluster.close()


@pytest.mark.slow
def test_a_job_stops_without_its_launcher_if_it_shall(tmp_path):
    cluster = without_reader(tmp_path, "stop", 0, 1, 2)
    try:
        for node in range(3):
            cluster.wait_gone(node)
        assert any("found the launcher gone" in event.reason for event in cluster.events(events.NodeFenced))
    finally:
        cluster.close()


def test_one_node_that_has_lost_its_launcher_is_replaced(tmp_path):
    cluster = without_reader(tmp_path, "stop", 1)
    try:
        cluster.wait_for("the swap", lambda: cluster.events(events.SwapDone))
        cluster.wait_gone(1)
        (planned,) = cluster.events(events.SwapPlanned)
        assert planned.lost_nodes == (1,)
    finally:
        cluster.close()


def test_nothing_is_left_after_an_error_of_the_script(tmp_path):
    cluster = StubCluster(tmp_path, 3, 1, "--steps", "50", "--exit-at", "1:5:3")
    try:
        assert [cluster.wait_exit(node) for node in range(3)] == [3, 3, 3]
        for node in range(3):
            cluster.wait_gone(node)
        assert "script of rank 1 on node 1 ended with 3" in cluster.all_output()
    finally:
        cluster.close()


def test_an_early_clean_exit_is_a_fault(tmp_path):
    cluster = StubCluster(tmp_path, 3, 1, "--steps", "50", "--exit-at", "1:5:0")
    try:
        assert [cluster.wait_exit(node) for node in range(3)] == [1, 1, 1]
        assert "exited with 0 before" in cluster.all_output()
    finally:
        cluster.close()


def test_a_death_by_signal_after_the_training_is_no_success(tmp_path):
    cluster = StubCluster(tmp_path, 3, 1, "--steps", "50", "--killed-late", f"1:{int(signal.SIGKILL)}")
    try:
        assert [cluster.wait_exit(node) for node in range(3)] == [0, 128 + signal.SIGKILL, 0]
        assert len(cluster.events(events.JobFinished)) == 3
    finally:
        cluster.close()
