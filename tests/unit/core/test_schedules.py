"""Random schedules: nodes and processes are lost and hosts join at any time, also during swaps and each other's.

What must hold: ONE_WORLD_PER_GENERATION and RESTORABLE (the cluster checks them with every plan), one history, and
LIVENESS: everybody ends, well or with a verdict.
"""

from __future__ import annotations

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deadpool_plugin.core.policy import Policy
from deadpool_plugin.core.types import World

from .cluster import Cluster
from .test_cluster import check_events

FAULTS = ["kill", "freeze", "process", "process", "error", "join", "join", "pause"]


def strike(cluster: Cluster, fault: str, draw) -> None:
    number = draw(st.sampled_from(sorted(cluster.nodes)))
    node = cluster.nodes[number]
    if fault == "kill":
        cluster.kill(number)
    elif fault == "freeze":
        node.frozen = True
    elif fault == "join" and max(cluster.nodes) < 9:
        cluster.join(max(cluster.nodes) + 1)
    elif fault in ("process", "error"):
        ranks = node.controller.world.ranks_of(number) if node.controller.world else ()
        if ranks and not node.frozen:
            cluster.kill_rank(number, draw(st.sampled_from(ranks)), -9 if fault == "process" else 3)


def idle(cluster: Cluster) -> bool:
    """Everybody waits, and nobody has come yet."""
    return cluster.waits() and max(cluster.nodes) < 5


def everybody_is_done(cluster: Cluster) -> bool:
    return not any(node.up and not node.frozen for node in cluster.nodes.values())


def check_the_end(cluster: Cluster) -> None:
    moving = [node for node in cluster.nodes.values() if node.exit and not node.frozen]
    codes = {node.left[0] for node in moving}
    assert codes <= {0, 3, 86, 87}
    if 0 in codes:
        assert len({worker.state for node in moving if node.left[0] == 0 for worker in node.workers.values()}) <= 1
    check_events(cluster)


@settings(max_examples=80, phases=[Phase.generate], derandomize=True)
@given(seed=st.integers(0, 10**6), copies=st.integers(1, 2), at_start=st.booleans(), data=st.data())
def test_whatever_happens_the_job_ends_well_or_with_a_verdict(seed, copies, at_start, data):
    cluster = Cluster(World(0, (0, 0, 1, 2), (3, 4)), seed=seed, last_step=8, policy=Policy(copies=copies))
    cluster.duplicates = data.draw(st.booleans())
    cluster.form()
    if not at_start:
        assert cluster.run(lambda: bool(cluster.said("Mirrored")) and cluster.training())
    for fault in data.draw(st.lists(st.sampled_from(FAULTS), min_size=1, max_size=5)):
        for _ in range(data.draw(st.integers(0, 250))):
            cluster.one_event()
        strike(cluster, fault, data.draw)
    assert cluster.run(lambda: everybody_is_done(cluster)), "LIVENESS"
    check_the_end(cluster)


@settings(max_examples=50, phases=[Phase.generate], derandomize=True)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_whoever_waits_goes_on_once_enough_hosts_have_joined(seed, data):
    """Losses that `copies` cover (of a protected job), no spare, hosts that come late: the job ends well."""
    policy = Policy(copies=2, wait_for_hosts=True, restarts_max=9)
    cluster = Cluster(World(0, (0, 1, 2, 3, 4)), seed=seed, last_step=8, policy=policy)
    cluster.form()
    assert cluster.run(lambda: bool(cluster.said("Mirrored")) and cluster.knows_of_training())
    victims = data.draw(st.permutations(range(5)))[:2]
    for what in data.draw(st.permutations(["lose", "lose", "join", "join", "process"])):
        for _ in range(data.draw(st.integers(0, 150))):
            cluster.one_event()
        if what == "lose":
            assert cluster.run(lambda: cluster.generation_protected() or idle(cluster) or everybody_is_done(cluster))
            lost = victims.pop()
            cluster.kill(lost)
            assert cluster.run(lambda lost=lost: not cluster.speaks(lost)), "a loss nobody knows of is none"
        elif what == "join":
            cluster.join(max(cluster.nodes) + 1)
        else:
            strike(cluster, what, data.draw)
    assert cluster.run(lambda: everybody_is_done(cluster)), "LIVENESS"
    check_the_end(cluster)
    assert {node.left[0] for number, node in cluster.nodes.items() if number < 5 and not node.killed} == {0}
