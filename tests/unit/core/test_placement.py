"""placement.py: tables, and that a swap keeps everything but rank -> node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_plugin.core.placement import Rehearsal, buddy_of, needs_payload, rehearsals, takers_of, world_after
from deadpool_plugin.core.types import World

from .strategies import worlds


@pytest.mark.parametrize(
    ("world", "buddies"),
    [
        (World(0, (0, 0, 1, 1, 2, 2), (3,)), {0: 1, 1: 2, 2: 0, 3: None}),
        (World(3, (7, 1, 4), ()), {7: 1, 1: 4, 4: 7}),
        (World(0, (0, 0), (5, 6)), {0: 5, 5: None}),
        (World(0, (0,)), {0: None}),
    ],
)
def test_buddies(world, buddies):
    assert {node: buddy_of(world, node) for node in buddies} == buddies


@pytest.mark.parametrize(
    ("rank", "replicas", "needed"), [(0, (0,), True), (0, (0, 1), True), (0, (0, 2), False), (2, (2, 3, 0), False)]
)
def test_payload_is_mirrored_unless_a_replica_is_elsewhere(rank, replicas, needed):
    assert needs_payload(World(0, (0, 0, 1, 1)), rank, replicas) is needed


def test_spares_rehearse_the_active_nodes_in_turn():
    assert rehearsals(World(0, (4, 4, 1), (2, 3, 5))) == (
        Rehearsal(2, 0, 0, 4),
        Rehearsal(2, 1, 1, 4),
        Rehearsal(3, 0, 2, 1),
        Rehearsal(5, 0, 0, 4),
        Rehearsal(5, 1, 1, 4),
    )


@pytest.mark.parametrize(
    ("lost", "takers"),
    [
        ({0}, {0: 3}),
        ({1}, {1: 4}),  # 4 has rehearsed it
        ({2}, {2: 3}),  # nobody has
        ({1, 4}, {1: 3}),
        ({0, 2}, {0: 3, 2: 4}),
        ({1, 2}, {1: 4, 2: 3}),
        ({3}, {}),
        ({0, 1, 2}, None),
        ({0, 3, 4}, None),
    ],
)
def test_takers(lost, takers):
    assert takers_of(World(0, (0, 1, 2), (3, 4)), lost) == takers


@given(world=worlds(), data=st.data())
def test_a_swap_changes_nothing_but_who_runs_what(world, data):
    lost = data.draw(st.sets(st.sampled_from(world.members)))
    after = world_after(world, lost)
    free = set(world.spares) - lost
    if after is None:
        assert len(free) < len(set(world.active) & lost)
        return
    assert after.generation == world.generation + 1
    assert len(after.node_of) == len(world.node_of)
    assert set(after.members) == set(world.members) - lost
    for before, now in zip(world.node_of, after.node_of, strict=True):
        assert now == before if before not in lost else now in free
    assert [world.ranks_of(n) for n in world.active] == [after.ranks_of(n) for n in after.active], (
        "nodes change as a whole"
    )
    assert [n for n in world.spares if n in after.spares] == list(after.spares)
