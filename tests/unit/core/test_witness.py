"""Ties that a witness breaks: what counts as half, and whose plan is proposed. Whole jobs: simulator/test_ties.py."""

from __future__ import annotations

from itertools import combinations

import msgspec
import pytest

from deadpool_plugin.core import api
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.policy import Policy
from deadpool_plugin.core.types import Holding, World

from .test_controller import TIMING


@pytest.mark.parametrize("spares", range(5))
def test_a_half_shares_a_member_with_every_majority(spares):
    world = World(0, tuple(range(6 - spares)), tuple(range(6 - spares, 6)))
    subsets = [set(c) for size in range(7) for c in combinations(world.members, size)]
    halves = [one for one in subsets if world.is_half(one)]
    majorities = [one for one in subsets if world.is_quorum(one, witness=True)]
    assert all(a & b for a in halves for b in majorities)
    assert all(len(one) > 3 for one in majorities)


def test_what_the_witness_keeps_of_an_earlier_attempt_is_proposed_as_it_is():
    controller = Controller(1, TIMING, Policy(witness=True))
    controller.step(api.WorldFormed(World(0, (0,), (1,))), 0.0)
    for event in (api.StoreOffered("store"), api.SnapshotHeld(Holding(0, 4, True, (0,)), 0)):
        controller.step(event, 0.1)
    (claim,) = [one for one in controller.step(api.LinkLost(0, "reset"), 0.2) if isinstance(one, api.Claim)]
    kept = msgspec.structs.replace(claim.plan, store="that of the attempt before")
    assert api.Reconfigure(kept) in controller.step(api.Claimed(kept), 0.3)
