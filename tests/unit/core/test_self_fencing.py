"""Quorums, and since when a majority is certain to have been heard. Whole jobs: simulator/test_contact.py."""

from __future__ import annotations

from hypothesis import given, strategies as st

from deadpool_plugin.core.contact import Contact, value_of_quorum
from deadpool_plugin.core.types import NEVER, World

from .strategies import worlds


@given(world=worlds(), data=st.data())
def test_value_of_quorum(world, data):
    values = {node: float(data.draw(st.integers(0, 4))) for node in world.members if data.draw(st.booleans())}
    witness = data.draw(st.booleans())
    found = value_of_quorum(world, values, NEVER, witness)
    reached = [
        value
        for value in {NEVER, *values.values()}
        if world.is_quorum({node for node in world.members if values.get(node, NEVER) >= value}, witness)
    ]
    assert found == max(reached)


def test_a_report_is_certain_once_a_majority_has_heard_of_its_receiver_after_it():
    contact = Contact(World(0, (0, 1, 2), ()), witness=False)
    contact.hear(1, 50.0, NEVER)
    contact.beat(10.0, 5.0)
    assert contact.certain(1) == NEVER
    contact.hear(1, 51.0, 10.0)
    contact.beat(11.0, 5.0)
    assert contact.certain(1) == NEVER, "node 1 alone is no majority"
    contact.hear(0, 11.0, 11.0)
    contact.beat(12.0, 5.0)
    assert contact.certain(1) == 50.0, "51 came after the Status that both have heard of"
    contact.hear(2, 70.0, 12.0)
    contact.beat(13.0, 5.0)
    assert (contact.certain(1), contact.certain(0), contact.certain(2)) == (51.0, NEVER, NEVER)
    for now in range(14, 99):
        contact.beat(float(now), 5.0)
    assert len(contact._beats) <= 7, "BOUNDED"
