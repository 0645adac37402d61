"""Ties that a witness breaks: one half goes on, whichever it is; the other, or a half without its answer, leaves."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deadpool_plugin.core import io
from deadpool_plugin.core.membership import is_half, is_quorum
from deadpool_plugin.core.policy import Policy
from deadpool_plugin.core.types import EXIT_FENCED, SwapPlan, World

from .cluster import TIMING, Cluster
from .test_cluster import finished
from .test_contact import elapse

WITNESS = Policy(witness=True, restarts_max=9)
FOUR = World(0, (0, 1), (2, 3))


def trained(world: World, seed: int = 1) -> Cluster:
    cluster = Cluster(world, seed=seed, policy=WITNESS, last_step=8)
    cluster.form()
    assert cluster.run(lambda: bool(cluster.said("Mirrored")) and cluster.knows_of_training())
    return cluster


@pytest.mark.parametrize("lost", [0, 1])
def test_one_active_node_and_a_spare_survive_the_loss_of_either(lost):
    cluster = trained(World(0, (0, 0), (1,)))
    cluster.kill(lost)
    assert cluster.run()
    finished(cluster)
    assert cluster.witness == cluster.plans and cluster.plans[1].lost_nodes == (lost,)


@settings(max_examples=60, phases=[Phase.generate], derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    half=st.sampled_from([{0, 2}, {0, 3}]),
    heals_after_s=st.sampled_from([4.6, 5.1, 5.5, 7.0, 60.0]),
)
def test_of_two_halves_one_goes_on(seed, half, heals_after_s):
    """ONE_WORLD_PER_GENERATION and that the other one has stopped before are asserted with every plan."""
    cluster = trained(FOUR, seed)
    cluster.hold = True
    cluster.isolate(half)
    elapse(cluster, heals_after_s)
    cluster.silent.clear()
    elapse(cluster, 6 * TIMING.silent_after_s)
    cluster.hold = False
    assert cluster.run(), "LIVENESS"
    ends = cluster.exits()
    well = {node for node, code in ends.items() if code == 0}
    assert well == set((cluster.newest().world if cluster.plans else FOUR).members), (ends, cluster.plans)
    assert set(ends.values()) <= {0, 86, 87}


def test_a_half_that_gets_no_answer_leaves():
    cluster = trained(World(0, (0, 0), (1,)))
    cluster.kill(0)
    cluster.witness = Unreachable()
    with pytest.raises(OSError):
        cluster.run()
    cluster.nodes[1].inputs.clear()
    cluster.witness = {}
    assert cluster.run()
    assert cluster.nodes[1].left[0] == 86 and "witness has not answered" in cluster.nodes[1].left[1]


class Unreachable(dict[int, SwapPlan]):
    def setdefault(self, generation, plan, /):
        raise OSError("stale file handle")


@pytest.mark.parametrize("spares", range(5))
def test_a_half_shares_a_member_with_every_majority(spares):
    world = World(0, tuple(range(6 - spares)), tuple(range(6 - spares, 6)))
    subsets = [set(c) for size in range(7) for c in combinations(world.members, size)]
    halves = [one for one in subsets if is_half(world, one)]
    majorities = [one for one in subsets if is_quorum(world, one, witness=True)]
    assert all(a & b for a in halves for b in majorities)
    assert all(len(one) > 3 for one in majorities)


def test_what_the_witness_keeps_of_an_earlier_attempt_is_proposed_as_it_is():
    cluster = trained(World(0, (0, 0), (1,)))
    cluster.kill(0)
    assert cluster.run(lambda: bool(cluster.witness))
    kept = cluster.witness[1]
    cluster.nodes[1].inputs.clear()
    cluster.feed(cluster.nodes[1], io.Claimed(kept))
    assert cluster.plans[1] == kept


@pytest.mark.parametrize("half", [0, 1])
def test_a_half_that_waits_for_a_host_finds_that_the_other_has_gone_on(half):
    policy = Policy(witness=True, wait_for_hosts=True, restarts_max=9)
    cluster = Cluster(World(0, (0, 1)), seed=1, policy=policy, last_step=8)
    cluster.form()
    assert cluster.run(lambda: bool(cluster.said("Mirrored")) and cluster.knows_of_training())
    cluster.cut(0, 1)
    assert cluster.run(lambda: len(cluster.said("WaitingForHost")) == 2)
    plan = SwapPlan(World(1, (half, 7)), 0, (1 - half,), (), "store", joined=(7,))
    cluster.idle(3 * TIMING.silent_after_s)
    assert cluster.nodes[0].up and cluster.nodes[1].up, "the witness keeps nothing yet"
    cluster.witness[1] = plan
    cluster.kill(half)
    assert cluster.run(), "it leaves"
    assert cluster.nodes[1 - half].left[0] == EXIT_FENCED
