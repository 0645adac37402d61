"""Hosts join a running job: as spares, as the last resort of a job that waits, two at once; the right bytes go on.
And a host that has the job's secret ends it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from dist.stub_cluster import HERE, MARK, StubCluster
from support import slow_but

from deadpool_plugin import events
from deadpool_plugin.launch import job_files

STEPS, HOLD = 150, 5
RUN = ("--steps", str(STEPS), "--step-s", "0.03", "--hold-at", str(HOLD))
WAIT = "memory_headroom_gib: 0\non_no_spare: wait\n"


def join(cluster, to="", stdin=subprocess.DEVNULL):
    """One more host; its node id, if nobody else joins at the same time, is its place in the cluster.

    `stdin`: having found the job it does nothing until there is no more to read.
    """
    node, logs = cluster.nodes, cluster.directory / "logs"
    where = [str(cluster.directory / "deadpool.yaml"), to] if to else [str(logs)]
    words = [str(HERE / "stub_join.py"), *where]
    env = {**os.environ, "PYTHONPATH": f"{HERE.parent.parent}:{HERE.parent}", MARK: f"{cluster.run}.{node}"}
    with (cluster.directory / f"out.{node}").open("wb") as out:
        started = subprocess.Popen(
            [sys.executable, *words], env=env, stdin=stdin, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    cluster.launchers.append(started)
    cluster.nodes += 1
    return node


def in_training(cluster):
    """The job runs, and stays where it is until it is let go: a host has all the time it needs."""
    cluster.wait_step(HOLD - 2)


def joined(cluster):
    return {event.joined for event in cluster.events(events.HostJoined)}


def finishes(cluster, lost):
    cluster.finish()
    for node in set(range(cluster.nodes)) - set(lost):
        assert cluster.wait_exit(node) == 0, cluster.all_output()
        cluster.wait_gone(node)
    assert cluster.finals() == cluster.expected_finals(STEPS)


@pytest.fixture
def start(tmp_path):
    made = []

    def start_cluster(*args, **kwargs):
        made.append(StubCluster(tmp_path, *args, **kwargs))
        return made[-1]

    yield start_cluster
    for cluster in made:
        cluster.close()
        for node in range(cluster.nodes):
            shutil.rmtree(job_files.folder_of(f"{cluster.run}.{node}"), ignore_errors=True)


def test_a_host_joins_becomes_a_spare_and_takes_over(start):
    cluster = start(3, 2, *RUN, spares=0)
    in_training(cluster)
    contact = json.loads((cluster.directory / "logs/nodes/1.json").read_text())
    host, port = contact["control"]
    node = join(cluster, f"{host}:{port}")
    cluster.wait_for("a host that has joined", lambda: node in joined(cluster))
    cluster.wait_for("a ready spare", lambda: cluster.events(events.SpareReady))
    cluster.train()
    cluster.wait_step(HOLD + 3)
    cluster.kill_node(0)
    finishes(cluster, lost=[0])
    taken = [event.takers for event in cluster.events(events.SwapPlanned) if event.lost_nodes]
    assert taken == [{"0": node}]
    assert "deadpool join --to" in cluster.output(0)
    assert not {1, 2, node} & {int(path.stem) for path in (cluster.directory / "logs/nodes").glob("*.json")}


def test_a_job_that_waits_goes_on_when_a_host_joins(start):
    cluster = start(3, 1, *RUN, spares=0, more=WAIT)
    cluster.train()
    cluster.wait_step(HOLD + 3)
    cluster.kill_node(1)
    cluster.wait_for("waiting", lambda: cluster.events(events.WaitingForHost))
    node = join(cluster)
    finishes(cluster, lost=[1])
    (planned,) = cluster.events(events.SwapPlanned)
    assert planned.takers == {"1": node} and planned.joined == (node,)


@pytest.mark.slow
def test_two_hosts_at_once_are_both_taken_in(start):
    cluster = start(2, 1, *RUN, spares=0)
    in_training(cluster)
    hosts = {join(cluster), join(cluster)}
    cluster.wait_for("two hosts that have joined", lambda: joined(cluster) == hosts)
    cluster.train()
    finishes(cluster, lost=[])


@pytest.mark.slow
def test_a_host_that_dies_while_it_joins_costs_nothing_but_itself(start):
    cluster = start(2, 1, *RUN, spares=0)
    in_training(cluster)
    node = join(cluster)
    cluster.wait_for("its file", lambda: (cluster.directory / f"logs/nodes/{node}.json").exists())
    cluster.kill_node(node)
    cluster.train()
    finishes(cluster, lost=[node])


def stop(cluster):
    words = [sys.executable, "-m", "deadpool_plugin", "stop", str(cluster.directory / "logs")]
    return subprocess.run(words, cwd=HERE.parent.parent, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize("waits", slow_but([False, True], 0), ids=["in-training", "waiting-for-a-host"])
def test_a_job_is_ended_from_outside_on_all_hosts(start, waits):
    cluster = start(3, 2, *RUN, spares=0 if waits else 1, more=WAIT)
    in_training(cluster)
    there = {0, 1, 2}
    late = None if waits else join(cluster, stdin=subprocess.PIPE)
    if late is not None:
        cluster.wait_for("a host that has found the job", lambda: "found the job" in cluster.output(late))
    if waits:
        cluster.train()
        cluster.wait_step(HOLD + 3)
        cluster.kill_node(0)
        cluster.wait_for("waiting", lambda: cluster.events(events.WaitingForHost))
        there = {1, 2}
    ended = stop(cluster)
    said = "[deadpool] the job has ended; its last processes may need some seconds more"
    assert ended.returncode == 0 and ended.stdout.splitlines()[-1].startswith(said), ended
    for node in there:
        assert cluster.wait_exit(node) == 130, cluster.all_output()
        cluster.wait_gone(node)
    assert {event.exit_code for event in cluster.events(events.JobStopped)} == {130}
    assert "ended by `deadpool stop` on" in cluster.events(events.JobStopped)[0].reason
    if late is not None:
        cluster.launchers[late].stdin.close()
        assert cluster.wait_exit(late) != 0
        said = cluster.output(late)  # another job may have got the port of a member that has left
        assert "the job has ended before it took this host in" in said or "secret" in said, said
        assert late not in {event.node for event in cluster.events(events.NodeEnded)}, "it is none of the job's hosts"
    again = stop(cluster)
    assert again.returncode == 78 and "ago: the job stopped: ended by `deadpool stop` on" in again.stderr, again
