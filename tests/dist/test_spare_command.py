"""Hosts that `spare_command` brings to real agents; and commands that are slow, fail, hang, or bring two hosts."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
import yaml
from dist.stub_cluster import HERE, MARK, StubCluster

from deadpool_plugin import events
from deadpool_plugin.launch import job_files

STEPS, HOLD = 150, 5
RUN = ("--steps", str(STEPS), "--step-s", "0.03", "--hold-at", str(HOLD))
BRING = f"""\
import os, subprocess, sys
output_dir, directory, run, count = sys.argv[1:]
assert not [name for name in os.environ if name.startswith("DEADPOOL_") or name == "LOCAL_RANK"]
for _ in range(int(count)):
    node = sum(name.startswith("out.") for name in os.listdir(directory))
    with open(f"{{directory}}/out.{{node}}", "xb") as out:
        subprocess.Popen(
            [sys.executable, "{HERE / "stub_join.py"}", output_dir],
            env={{**os.environ, "PYTHONPATH": "{HERE.parent.parent}:{HERE.parent}", "{MARK}": f"{{run}}.{{node}}"}},
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )
print("asked for", count)
"""


class Supplied(StubCluster):
    """A cluster whose `spare_command` is a shell's, in which $BRING N brings N hosts."""

    def __init__(self, directory, nodes, *arguments, command, more="", **how):
        bring = directory / "bring.py"
        bring.write_text(BRING)
        self.first = nodes
        words = f'{sys.executable} {bring} "$0" {directory} "$(cat {directory / "run"})"'
        said = {"spare_command": ["sh", "-c", command.replace("$BRING", words), "{output_dir}", "{count}"]}
        more = f"memory_headroom_gib: 0\n{yaml.safe_dump(said)}{more}"
        super().__init__(directory, nodes, 1, *arguments, more=more, **how)
        (directory / "run").write_text(self.run)

    def loses(self, node):
        self.train()
        self.wait_step(HOLD + 3)
        self.kill_node(node)

    def await_hosts(self, count):
        self.wait_for("hosts that have joined", lambda: len(self.events(events.HostJoined)) == count)
        self.nodes = self.first + count

    def finishes(self, lost):
        self.finish()
        for node in set(range(self.first)) - {*lost}:
            assert self.wait_exit(node) == 0, self.all_output()
        for node in range(self.nodes):
            self.wait_gone(node)
        joined = {event.joined for event in self.events(events.HostJoined)}
        ends = {event.node: event.exit_code for event in self.events(events.NodeEnded)}
        assert {ends[node] for node in joined} <= {0}, ends
        assert self.finals() == self.expected_finals(STEPS)

    def attempts(self):
        return [event.attempt for event in self.events(events.SpareCommandStarted)]

    def close(self):
        self.nodes = sum(path.name.startswith("out.") for path in self.directory.iterdir())
        for node in range(self.nodes):
            self.signal_node(node, 9)
            shutil.rmtree(job_files.folder_of(f"{self.run}.{node}"), ignore_errors=True)
        super().close()


@pytest.fixture
def start(tmp_path):
    made = []

    def start_cluster(*args, **kwargs):
        made.append(Supplied(tmp_path, *args, **kwargs))
        return made[-1]

    yield start_cluster
    for cluster in made:
        cluster.close()


def pids(path):
    """The processes that a command has named there and that live."""
    named = [int(pid) for pid in path.read_text().split()] if path.exists() else []
    return [pid for pid in named if os.path.exists(f"/proc/{pid}") and "Z" not in state_of(pid)]


def state_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][0]
    except OSError:
        return "Z"


def test_a_command_that_fails_first_and_is_slow_then_brings_two_hosts(start, tmp_path):
    once = tmp_path / "once"
    command = f"if mkdir {once}; then echo no quota >&2; exit 3; fi; sleep 1; $BRING 2"
    cluster = start(3, *RUN, command=command)
    cluster.loses(1)
    cluster.await_hosts(2)
    cluster.finishes(lost=[1])
    assert cluster.attempts() == [1, 2], "the second host is a spare more"
    (failed,) = cluster.events(events.SpareCommandFailed)
    assert failed.reason == "exit code 3; spare_command1.node0.log: no quota" and failed.retry_s == 10.0
    (done,) = cluster.events(events.SpareCommandDone)
    assert done.said == "asked for 2"
    said = cluster.output(0)
    assert "spare_command runs when fewer than 1 spare(s) are left" in said
    assert "[deadpool] 1 host is missing; spare_command runs (attempt 1)" in said
    assert "[deadpool] spare_command has brought no host: exit code 3;" in said and "no quota" in said


@pytest.mark.slow
def test_a_job_that_waits_gets_a_host_for_each_that_is_missing(start):
    command = '$BRING "$1"'
    cluster = start(4, *RUN, command=command, spares=0, more="on_no_spare: wait\ncopies: 2\n")
    cluster.train()
    cluster.wait_step(HOLD + 3)
    cluster.signal_node(3, 19)
    cluster.kill_node(2)
    cluster.kill_node(3)
    cluster.await_hosts(2)
    cluster.finishes(lost=[2, 3])


def test_a_command_that_hangs_is_ended_and_holds_up_nothing(start, tmp_path):
    named = tmp_path / "pids"
    command = f"sleep 1000 & echo $$ $! >> {named}; wait"
    cluster = start(3, *RUN, command=command, more="spare_command_limit_s: 5\n")
    cluster.loses(1)
    cluster.wait_for("a run", lambda: named.exists() and named.read_text())
    first = set(named.read_text().split()[:2])
    cluster.wait_for("a failure", lambda: cluster.events(events.SpareCommandFailed))
    failed = cluster.events(events.SpareCommandFailed)[0].reason
    assert failed == "it was ended, as it still ran after 5 s; spare_command1.node0.log: no output"
    cluster.wait_for(
        "another run, the first being gone", lambda: pids(named) and first.isdisjoint(map(str, pids(named)))
    )
    cluster.finishes(lost=[1])
    cluster.wait_for("the end of its processes", lambda: not pids(named))


@pytest.mark.slow
def test_the_next_coordinator_runs_it(start, tmp_path):
    named = tmp_path / "pids"
    command = f'if [ "$1" = 1 ]; then echo $$ >> {named}; exec sleep 1000; fi; $BRING 1'
    cluster = start(5, *RUN, command=command, spares=2)
    cluster.loses(4)
    cluster.wait_for("a run", lambda: pids(named))
    cluster.kill_node(0)
    cluster.wait_for("the end of the lost host's run", lambda: not pids(named))
    cluster.await_hosts(1)
    cluster.finishes(lost=[0, 4])
    assert [(event.node, event.hosts) for event in cluster.events(events.SpareCommandStarted)][:2] == [(0, 1), (1, 2)]
