"""placement.py: tables, and that a swap keeps everything but rank -> node."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from deadpool_plugin.core.placement import (
    LocalSlot,
    RehearsalTask,
    buddies_of,
    copies_needed,
    divide,
    held_by,
    mirrored_by,
    needs_payload,
    rehearsals,
    takers_of,
    world_after,
)
from deadpool_plugin.core.types import World

from .strategies import worlds


@pytest.mark.parametrize(
    ("world", "copies", "buddies"),
    [
        (World(0, (0, 0, 1, 1, 2, 2), (3,)), 1, {0: (1,), 1: (2,), 2: (0,), 3: ()}),
        (World(3, (7, 1, 4), ()), 1, {7: (1,), 1: (4,), 4: (7,)}),
        (World(3, (7, 1, 4), ()), 2, {7: (1, 4), 1: (4, 7), 4: (7, 1)}),
        (World(3, (7, 1, 4), (5,)), 3, {7: (1, 4, 5), 1: (4, 7, 5), 4: (7, 1, 5)}),
        (World(3, (7, 1, 4), ()), 9, {7: (1, 4), 1: (4, 7), 4: (7, 1)}),
        (World(0, (0, 0), (5, 6)), 1, {0: (5,), 5: ()}),
        (World(0, (0,)), 2, {0: ()}),
    ],
)
def test_buddies(world, copies, buddies):
    assert {node: buddies_of(world, node, copies) for node in buddies} == buddies


@given(
    node_of=st.lists(st.integers(0, 3), max_size=8) | worlds().map(lambda world: [*world.node_of]),
    spare=st.integers(10, 11),
)
def test_the_ranks_of_a_node_are_those_that_the_world_says(node_of, spare):
    """Also in worlds that no job has: a node's ranks need not be neighbours, nor as many as another's."""
    world = World(0, tuple(node_of), (spare,))
    for node in (*node_of, spare, 12):
        assert world.ranks_of(node) == tuple(rank for rank, home in enumerate(node_of) if home == node)
    assert world.active == tuple(dict.fromkeys(node_of)) and world.members == (*world.active, spare)
    assert [world.positions[node] for node in world.members] == [*range(len(world.members))]


@given(world=worlds(), copies=st.integers(1, 4))
def test_buddies_are_as_many_as_a_commit_asks_for(world, copies):
    for node in world.active:
        buddies = buddies_of(world, node, copies)
        assert len(set(buddies) - {node}) == len(buddies) == copies_needed(world, copies)


@given(world=worlds(), copies=st.integers(1, 4))
def test_who_is_mirrored_by_a_node_is_who_has_it_for_a_buddy(world, copies):
    for node in world.members:
        owners = {owner for owner in world.active if node in buddies_of(world, owner, copies)}
        assert sorted(mirrored_by(world, node, copies)) == sorted(owners)
        ranks = {rank for owner in owners | {node} for rank in world.ranks_of(owner)}
        assert held_by(world, node, copies) == ranks


@pytest.mark.parametrize(
    ("rank", "replicas", "copies", "needed"),
    [
        (0, (0,), 1, True),
        (0, (0, 1), 1, True),
        (0, (0, 2), 1, False),
        (2, (2, 3, 0), 1, False),
        (0, (0, 2), 2, True),
        (0, (0, 2, 3), 2, True),
        (0, (0, 2, 4), 2, False),
        (0, (0, 2, 4), 3, False),  # there are no more nodes
    ],
)
def test_payload_is_mirrored_unless_enough_replicas_are_elsewhere(rank, replicas, copies, needed):
    assert needs_payload(World(0, (0, 0, 1, 1, 2, 2)), rank, replicas, copies) is needed


def test_spares_rehearse_the_active_nodes_in_turn():
    assert rehearsals(World(0, (4, 4, 1), (2, 3, 5))) == (
        RehearsalTask(2, 0, 0, 4),
        RehearsalTask(2, 1, 1, 4),
        RehearsalTask(3, 0, 2, 1),
        RehearsalTask(5, 0, 0, 4),
        RehearsalTask(5, 1, 1, 4),
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
    assert takers_of(World(0, (0, 1, 2), (3, 4)), lost, covers={3: {9: True}, 4: {9: True}}) == takers


@pytest.mark.parametrize(
    ("lost", "able", "takers"),
    [
        ({0}, {4}, {0: 4}),  # 3, which is to rehearse it, has not rehearsed anything
        ({1}, {3}, {1: 3}),
        ({2}, {4}, {2: 4}),
        ({0, 1}, {4}, {0: 3, 1: 4}),  # the able one has rehearsed another of them
        ({0, 2}, {4}, {0: 4, 2: 3}),
        ({0, 3}, {4}, {0: 4}),
    ],
)
def test_a_spare_that_is_ready_takes_over_before_one_that_may_still_compile(lost, able, takers):
    assert takers_of(World(0, (0, 1, 2), (3, 4)), lost, covers={spare: {9: True} for spare in able}) == takers


@pytest.mark.parametrize(
    ("lost", "joined", "after"),
    [
        (set(), (5,), World(1, (0, 1), (3, 5))),
        ({0}, (5,), World(1, (3, 1), (5,))),
        ({1}, (5,), World(1, (0, 3), (5,))),  # who has stood by goes first
        ({0, 1}, (5, 6), World(1, (3, 5), (6,))),
        ({3}, (5,), World(1, (0, 1), (5,))),
        ({0, 1, 3}, (5,), None),
    ],
)
def test_who_joins_stands_by_or_takes_over_at_once(lost, joined, after):
    assert world_after(World(0, (0, 1), (3,)), lost, dict.fromkeys(joined, "")) == after


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


@pytest.mark.parametrize(
    ("ranks", "slots", "staying", "placed"),
    [
        ((4, 5), [LocalSlot(4, True), LocalSlot(5, True)], {4: 0, 5: 1}, {}),
        ((4, 5), [LocalSlot(4, False), LocalSlot(5, True)], {5: 1}, {4: 0}),
        ((4, 5), [LocalSlot(-1, False, (5,)), LocalSlot(-1, False, (4,))], {}, {5: 0, 4: 1}),
        ((4, 5), [LocalSlot(-1, False, (4,)), LocalSlot(-1, False, (7,))], {}, {4: 0, 5: 1}),
        ((4, 5), [LocalSlot(5, False, (4,)), LocalSlot(-1, False, (5,))], {}, {5: 0, 4: 1}),  # its own comes first
        ((4, 5), [LocalSlot(4, True), LocalSlot(9, True)], {4: 0}, {}),
        ((), [LocalSlot(-1, False)], {}, {}),
    ],
)
def test_each_rank_has_the_slot_that_is_nearest_to_it(ranks, slots, staying, placed):
    assert divide(ranks, slots) == (staying, placed)


@given(st.data())
def test_slots_suffice_for_whatever_a_node_is_asked_to_run(data):
    """A node that has no rank takes as many as it has slots; one that has ranks keeps them, whoever of them lives."""
    count = data.draw(st.integers(1, 6))
    stands_by = data.draw(st.booleans())
    known = st.integers(0, count)
    slots = [
        LocalSlot(-1 if stands_by else n, not stands_by and data.draw(st.booleans()), tuple(data.draw(st.sets(known))))
        for n in range(count)
    ]
    ranks = data.draw(st.permutations(range(count)))
    staying, placed = divide(ranks, slots)
    assert staying.keys() | placed.keys() == set(ranks)
    assert sorted([*staying.values(), *placed.values()]) == list(range(count))
    assert all(slots[number].serves for number in staying.values())
    assert stands_by or all(slots[number].rank == rank for rank, number in placed.items())
