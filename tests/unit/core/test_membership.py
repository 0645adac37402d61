"""voter.py and swaps.py: quorums intersect; a proposer that follows the rules never changes what was decided."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from deadpool_plugin.core.messages import Promise
from deadpool_plugin.core.swaps import Proposal
from deadpool_plugin.core.types import Ballot, SwapPlan, World
from deadpool_plugin.core.voter import Acceptor

PLANS = [SwapPlan(World(1, (node,)), 0, (), (), "store") for node in range(3)]


@pytest.mark.parametrize(
    "world", [World(0, tuple(range(n - s)), tuple(range(n - s, n))) for n in range(1, 7) for s in range(n)]
)
def test_any_two_quorums_share_a_member(world):
    subsets = [set(c) for size in range(len(world.members) + 1) for c in combinations(world.members, size)]
    quorums = [subset for subset in subsets if world.is_quorum(subset)]
    assert set(world.members) in quorums
    assert all(a & b for a in quorums for b in quorums)


@pytest.mark.parametrize("witness", [False, True])
@pytest.mark.parametrize("spares", range(4))
def test_a_quorum_may_be_counted_from_who_is_missing(spares, witness):
    for nodes in (4, 5):
        world = World(0, tuple(range(nodes - spares)), tuple(range(nodes - spares, nodes)))
        for size in range(nodes + 1):
            for lost in combinations(world.members, size):
                left = set(world.members) - set(lost)
                assert world.is_quorum_without(lost, witness) is world.is_quorum(left, witness)


@pytest.mark.parametrize(
    ("nodes", "enough"), [({0, 1}, True), ({1, 2}, False), ({1, 2, 3}, True), ({0}, False), ({0, 9, 8}, False)]
)
def test_half_needs_the_first_active_node(nodes, enough):
    assert World(0, (0, 1, 2), (3,)).is_quorum(nodes) is enough


def test_an_acceptor_keeps_its_promise():
    acceptor = Acceptor()
    low, high = Ballot(1, 1, 5), Ballot(1, 2, 0)
    assert acceptor.prepare(low) and acceptor.prepare(low) and acceptor.prepare(high)
    assert not acceptor.prepare(low)
    assert not acceptor.accept(low, PLANS[0]) and acceptor.accepted is None
    assert acceptor.accept(high, PLANS[1]) and acceptor.accepted == (high, PLANS[1])


def test_a_round_inherits_the_plan_of_the_largest_ballot():
    proposal = Proposal(Ballot(1, 3, 0), {}, 0.0)
    assert proposal.inherited() is None
    proposal.promises = {
        0: Promise(proposal.ballot, None, (), ""),
        1: Promise(proposal.ballot, (Ballot(1, 1, 9), PLANS[0]), (), ""),
        2: Promise(proposal.ballot, (Ballot(1, 2, 1), PLANS[1]), (), ""),
    }
    assert proposal.inherited() == PLANS[1]


@pytest.mark.parametrize("seed", range(200))
def test_one_world_per_generation(seed):
    """ONE_WORLD_PER_GENERATION: three proposers, messages lost and mixed; all decisions are the same plan."""
    rng = random.Random(seed)
    world = World(0, (0, 1, 2), (3,))
    acceptors = {node: Acceptor() for node in world.members}
    decided = []
    rounds = [(number, node) for number in range(1, 6) for node in range(3)]
    running: list[Proposal] = []
    while rounds or running:
        if rounds and (not running or rng.random() < 0.3):
            number, node = rounds.pop(0)
            running.append(Proposal(Ballot(1, number, node), {}, 0.0))
        proposal = rng.choice(running)
        voter = rng.choice(world.members)
        acceptor = acceptors[voter]
        if rng.random() < 0.1:
            running.remove(proposal)
        elif proposal.plan is None:
            if acceptor.prepare(proposal.ballot):
                proposal.promises[voter] = Promise(proposal.ballot, acceptor.accepted, (), "")
            if world.is_quorum(proposal.promises):
                proposal.plan = proposal.inherited() or PLANS[proposal.ballot.node]
        elif acceptor.accept(proposal.ballot, proposal.plan):
            proposal.accepted.add(voter)
            if proposal.is_decided(world, witness=False):
                decided.append(proposal.plan)
                running.remove(proposal)
    assert len(set(map(id, decided))) <= 1
