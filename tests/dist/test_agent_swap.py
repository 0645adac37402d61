"""Real agents, supervisors and launch stand-ins; workers without torch: nodes are lost, the right bytes go on."""

from __future__ import annotations

import signal

import psutil
import pytest
from dist.stub_cluster import StubCluster
from support import expect, slow_but

from deadpool_plugin import events

STEPS, HOLD = 100, 5
RUN = ("--steps", str(STEPS), "--step-s", "0.03", "--hold-at", str(HOLD))


def ready(cluster, spares=1, hosts=1):
    """In training, which does not end before `finishes` lets it, with so many hosts rehearsed on each spare."""
    cluster.wait_for("ready spares", lambda: len(cluster.events(events.SpareReady)) >= spares * hosts)
    cluster.train()
    cluster.wait_step(HOLD + 3)


def finishes(cluster, lost):
    """All nodes but the lost ones end with 0, and every rank has the state of an undisturbed run."""
    cluster.finish()
    for node in set(range(cluster.nodes)) - set(lost):
        assert cluster.wait_exit(node) == 0, cluster.all_output()
        cluster.wait_gone(node)
    assert cluster.finals() == cluster.expected_finals(STEPS)


@pytest.mark.slow
def test_undisturbed(tmp_path):
    cluster = StubCluster(tmp_path, 4, 2, *RUN)
    try:
        cluster.train()
        finishes(cluster, lost=())
        assert not cluster.events(events.SwapPlanned)
        assert "node 3" in cluster.output(0) and "spare" in cluster.output(0)
    finally:
        cluster.close()


@pytest.mark.parametrize(
    ("victim", "parks"),
    slow_but([(0, 0), (1, 0), (2, 1)], 1, 2),
    ids=["coordinator_rehearsed", "not_rehearsed", "last_of_all_parked"],
)
def test_a_lost_node_is_replaced(tmp_path, victim, parks):
    log = events.log_of(tmp_path / "logs", 0)
    log.parent.mkdir()
    log.write_bytes(events.encode(events.make("Note", {"text": "of an earlier job"}, node=0, generation=0)))
    networks = "127.0.0.1", "127.0.0.2"
    more = f"memory_headroom_gib: 0\npark_memory_gib: {parks}\ninterface_address: {','.join(networks)}\n"
    cluster = StubCluster(tmp_path, 4, 2, *RUN, more=more)
    try:
        ready(cluster, hosts=3 if parks else 1)
        agents = [psutil.Process(pid) for node in range(3) for pid in cluster.pids(node, "agent")]
        links = [link for agent in agents for link in agent.net_connections("tcp") if link.raddr]
        assert {*networks} == {link.raddr.ip for link in links}, "snapshots go over both"
        cluster.kill_node(victim)
        finishes(cluster, lost=[victim])
        (planned,) = cluster.events(events.SwapPlanned)
        assert planned.lost_nodes == (victim,) and planned.takers == {str(victim): 3}
        assert planned.restore_step >= 3
        assert {event.rank for event in cluster.events(events.SnapshotFetched)} == {2 * victim, 2 * victim + 1}
        taken = {event.rank: event.covered for event in cluster.events(events.RankTakenOver)}
        assert taken == dict.fromkeys((2 * victim, 2 * victim + 1), bool(parks) or victim == 0)
        assert [event.spares_left for event in cluster.events(events.Mirrored)] == [1, 0]
        said = cluster.all_output()
        assert "NO SPARE LEFT, the next lost node ends the job (on_no_spare: stop)" in said
        assert "[deadpool] spares left: 0; to add a host: deadpool join --to " in said
        assert (
            said.count(f"output_dir {log.parent} has files of an earlier job; this job's lines are added to them") == 1
        )
    finally:
        cluster.close()


def test_two_losses_one_after_the_other(tmp_path):
    cluster = StubCluster(tmp_path, 5, 1, *RUN, spares=2)
    try:
        ready(cluster, spares=2)
        cluster.kill_node(1)
        cluster.wait_for("protection again", lambda: len(cluster.events(events.Mirrored)) == 2)
        cluster.kill_node(0)
        finishes(cluster, lost=[0, 1])
        assert [event.lost_nodes for event in cluster.events(events.SwapPlanned)] == [(1,), (0,)]
    finally:
        cluster.close()


@pytest.mark.slow
def test_the_newcomer_is_lost_too(tmp_path):
    cluster = StubCluster(tmp_path, 5, 1, *RUN, spares=2)
    try:
        ready(cluster, spares=2)
        cluster.kill_node(2)
        cluster.wait_for("protection again", lambda: len(cluster.events(events.Mirrored)) == 2)
        (planned,) = cluster.events(events.SwapPlanned)
        taker = expect(int, planned.takers["2"])
        cluster.kill_node(taker)
        finishes(cluster, lost=[2, taker])
    finally:
        cluster.close()


def test_one_active_node_is_mirrored_by_its_spare(tmp_path):
    cluster = StubCluster(tmp_path, 3, 2, *RUN, spares=2)
    try:
        ready(cluster, spares=2)
        cluster.kill_node(0)
        finishes(cluster, lost=[0])
    finally:
        cluster.close()


def test_replicas_are_restored_from_a_peer(tmp_path):
    """With identical payloads only headers are mirrored."""
    cluster = StubCluster(tmp_path, 3, 1, *RUN, "--replicas", "0,1", "--same-state")
    try:
        ready(cluster)
        cluster.kill_node(1)
        cluster.finish()
        for node in (0, 2):
            assert cluster.wait_exit(node) == 0, cluster.all_output()
        assert {value for _, value in cluster.finals().values()} == {cluster.expected_finals(STEPS)[0][1]}
    finally:
        cluster.close()


def test_no_spare_ends_with_86_and_says_so(tmp_path):
    cluster = StubCluster(tmp_path, 3, 1, *RUN, spares=0)
    try:
        cluster.train()
        cluster.wait_step(HOLD + 3)
        cluster.kill_node(2)
        assert [cluster.wait_exit(node) for node in (0, 1)] == [86, 86]
        for node in (0, 1):
            cluster.wait_gone(node)
        said = cluster.output(0)
        assert "no spare is left" in said and "newest committed step" in said
        stopped = cluster.events(events.JobStopped)[0]
        assert stopped.lost_ranks == (2,) and stopped.newest_committed >= 3
    finally:
        cluster.close()


@pytest.mark.slow
def test_a_second_loss_after_the_last_spare_ends_with_86(tmp_path):
    cluster = StubCluster(tmp_path, 4, 1, *RUN)
    try:
        ready(cluster)
        cluster.kill_node(1)
        cluster.wait_for("protection again", lambda: len(cluster.events(events.Mirrored)) == 2)
        cluster.kill_node(2)
        assert [cluster.wait_exit(node) for node in (0, 3)] == [86, 86]
    finally:
        cluster.close()


def test_memory_is_checked_before_training(tmp_path):
    cluster = StubCluster(tmp_path, 3, 1, *RUN, more="memory_headroom_gib: 100000\n")
    try:
        assert [cluster.wait_exit(node) for node in range(3)] == [78, 78, 78]
        assert "memory_headroom_gib" in cluster.all_output() and not cluster.events(events.TrainingStarted)
    finally:
        cluster.close()


@pytest.mark.slow
def test_a_wrong_secret_is_said_on_both_sides(tmp_path):
    more = "memory_headroom_gib: 0\nstart_timeout_s: 60\n"
    cluster = StubCluster(tmp_path, 2, 1, *RUN, patience_s=0.5, wrong_secret=1, more=more)
    try:
        assert cluster.wait_exit(1) == 78
        assert cluster.wait_exit(0) != 0
        assert "secret" in cluster.output(0) and "secret" in cluster.output(1)
    finally:
        cluster.close()


@pytest.mark.slow
def test_a_refused_rehearsal_takes_only_the_spare_out(tmp_path):
    cluster = StubCluster(tmp_path, 4, 1, *RUN, "--refuse", "0", spares=1)
    try:
        assert cluster.wait_exit(3) == 87
        cluster.train()
        finishes(cluster, lost=[3])
        assert "cannot stand in for rank 0: told to" in cluster.output(3)
    finally:
        cluster.close()


def test_a_node_that_stands_still_is_replaced_and_fenced_when_it_wakes(tmp_path):
    cluster = StubCluster(tmp_path, 4, 1, *RUN, patience_s=3.0)
    try:
        ready(cluster)
        cluster.signal_node(1, signal.SIGSTOP)
        finishes(cluster, lost=[1])
        cluster.signal_node(1, signal.SIGCONT)
        assert cluster.wait_exit(1) == 87
        cluster.wait_gone(1)
        assert cluster.finals() == cluster.expected_finals(STEPS)
    finally:
        cluster.close()


def test_the_coordinator_is_lost_while_the_newcomer_rehearses(tmp_path):
    cluster = StubCluster(tmp_path, 6, 1, *RUN, "--rehearse-s", "0.5", spares=2)
    try:
        ready(cluster, spares=2)
        cluster.kill_node(2)
        cluster.wait_for("a plan", lambda: cluster.events(events.SwapPlanned))
        cluster.kill_node(0)
        finishes(cluster, lost=[0, 2])
        assert [event.lost_nodes for event in cluster.events(events.SwapPlanned)] == [(2,), (0,)]
    finally:
        cluster.close()
