"""slots.py: a table, and that the slots of a node suffice for its ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_plugin.core.slots import LocalSlot, divide


@pytest.mark.parametrize(
    ("ranks", "slots", "staying", "placed"),
    [
        ((4, 5), [LocalSlot(4, True), LocalSlot(5, True)], {4: 0, 5: 1}, {}),
        ((4, 5), [LocalSlot(4, False), LocalSlot(5, True)], {5: 1}, {4: 0}),
        ((4, 5), [LocalSlot(-1, False, 5), LocalSlot(-1, False, 4)], {}, {5: 0, 4: 1}),
        ((4, 5), [LocalSlot(-1, False, 4), LocalSlot(-1, False, 7)], {}, {4: 0, 5: 1}),
        ((4, 5), [LocalSlot(5, False, 4), LocalSlot(-1, False, 5)], {}, {5: 0, 4: 1}),  # its own comes first
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
    known = st.sampled_from([-1, *range(count)])
    slots = [
        LocalSlot(-1 if stands_by else n, not stands_by and data.draw(st.booleans()), data.draw(known))
        for n in range(count)
    ]
    ranks = data.draw(st.permutations(range(count)))
    staying, placed = divide(ranks, slots)
    assert staying.keys() | placed.keys() == set(ranks)
    assert sorted([*staying.values(), *placed.values()]) == list(range(count))
    assert all(slots[number].serves for number in staying.values())
    assert stands_by or all(slots[number].rank == rank for rank, number in placed.items())
