"""Resources that a swap gives back: descriptors, threads and connections do not grow with the number of swaps."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from functools import reduce
from pathlib import Path

import pytest
from dist.stub_cluster import StubCluster
from dist.test_agent_swap import HOLD, ready

from deadpool_plugin import events

ALWAYS = ("--steps", "1000000", "--step-s", "0.01", "--hold-at", str(HOLD))


def lose_processes(cluster, count):
    """`count` swaps in which a process of node 0 and one of node 1 are replaced in turn, each back under protection."""
    for number in range(count):
        done = len(cluster.events(events.SwapDone)) + 1
        cluster.kill(number % 2, "worker0")
        cluster.wait_for("the swap", lambda done=done: len(cluster.events(events.SwapDone)) == done)
        generation = cluster.events(events.SwapDone)[-1].generation
        protected = lambda g=generation: any(event.generation == g for event in cluster.events(events.Mirrored))  # noqa: E731
        cluster.wait_for("protection", protected)


def held(cluster):
    """(node, role) -> how many descriptors of each kind, and threads; workers are new ones each time."""
    found = {}
    for node in range(cluster.nodes):
        for pid, role in cluster.processes(node).items():
            if not role.startswith(("worker", "launcher")):
                found[node, role] = Counter(kind_of(pid, fd) for fd in os.listdir(f"/proc/{pid}/fd"))
                found[node, role]["thread"] = len(os.listdir(f"/proc/{pid}/task"))
    return found


def kind_of(pid, fd):
    """Name what the descriptor is open to; files of /proc are alike, whichever process they are of."""
    try:
        return re.sub("/proc/[0-9]+/", "/proc/PID/", os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")[0])
    except FileNotFoundError:
        return "closed meanwhile"


def samples(cluster):
    """The job runs on: connections and threads for single questions come and go in every moment of it."""
    for _ in range(20):
        yield held(cluster)
        time.sleep(0.1)


def most(cluster):
    return reduce(lambda one, other: {who: one[who] | other[who] for who in one}, samples(cluster))


def least(cluster):
    return reduce(lambda one, other: {who: one[who] & other[who] for who in one}, samples(cluster))


@pytest.mark.slow
def test_twenty_swaps_leave_nothing_behind(tmp_path):
    more = "memory_headroom_gib: 0\nrestarts_max: 100\n"
    cluster = StubCluster(tmp_path, 3, 1, *ALWAYS, more=more, executes=True)
    try:
        ready(cluster)
        lose_processes(cluster, 4)
        before = most(cluster)
        lose_processes(cluster, 8)
        half = {who: counts - before[who] for who, counts in least(cluster).items()}
        between = most(cluster)
        lose_processes(cluster, 8)
        after = least(cluster)
        grown = {who: after[who] - before[who] for who in before}
        for who, counts in grown.items():  # asyncio's pool may make one at any time; what leaks does so in every swap
            threads = min(half[who]["thread"], (after[who] - between[who])["thread"])
            counts["thread"] = threads if threads > 2 else 0
        assert {who: +counts for who, counts in grown.items() if +counts} == {}
        assert len(list((Path(tmp_path) / "logs").glob("rank*.log"))) == 2
    finally:
        cluster.close()
