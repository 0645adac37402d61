"""Agents that are late, with real processes: a rank stands still meanwhile, and nobody is replaced for it."""

from __future__ import annotations

import signal
import time

import pytest
from dist.stub_cluster import StubCluster
from dist.test_agent_swap import RUN, finishes, ready

from deadpool_plugin import events


@pytest.mark.slow
def test_ranks_stand_still_while_their_agents_have_no_contact_and_go_on(tmp_path):
    """The coordinator's agent is stopped until the others have lost contact: longer costs it its place."""
    cluster = StubCluster(tmp_path, 4, 1, *RUN, patience_s=20.0)  # of which a tenth is left to wake it in time
    try:
        ready(cluster)
        time.sleep(5)  # some heartbeats: who has had no contact yet does not say that it has lost it
        (agent,) = cluster.pids(0, "agent")
        cluster.signal_pid(agent, signal.SIGSTOP)
        cluster.wait_for("lost contact", lambda: cluster.events(events.ContactLost), 60.0)
        cluster.signal_pid(agent, signal.SIGCONT)
        cluster.wait_for(
            "contact again",
            lambda: len(cluster.events(events.ContactRegained)) == len(cluster.events(events.ContactLost)),
        )
        finishes(cluster, lost=())
        assert not cluster.events(events.SwapPlanned) and not cluster.events(events.RankLost)
    finally:
        cluster.close()
