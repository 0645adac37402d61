"""ledger.py against a dumb oracle that tries everything."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st
from support import expect

from deadpool_plugin.core.ledger import Ledger, RestorePoint
from deadpool_plugin.core.placement import buddies_of
from deadpool_plugin.core.types import NO_STEP, Holding, Source, World

from .strategies import inventories, worlds

STEPS = 3


def restored(point: RestorePoint | str) -> RestorePoint:
    """The point to go back to, where a test knows that there is one."""
    return expect(RestorePoint, point)


def holding_of(held, node, rank, step):
    return next((h for h in held[node] if (h.rank, h.step) == (rank, step)), None)


def oracle_committed(world, held, step, copies=1):
    for rank, home in enumerate(world.node_of):
        own = holding_of(held, home, rank, step)
        if own is None or not own.payload:
            return False
        others = [node for node in world.members if node != home]
        buddies = buddies_of(world, home, copies)
        elsewhere = {world.node_of[replica] for replica in own.replicas} - {home}
        bare_will_do = len(elsewhere) >= min(copies, len(others))
        header = [n for n in buddies if (h := holding_of(held, n, rank, step)) and (h.payload or bare_will_do)]
        payload = {
            node
            for node in others
            if node in buddies or node in {world.node_of[replica] for replica in own.replicas}
            for replica in {rank, *own.replicas}
            if (h := holding_of(held, node, replica, step)) is not None and h.payload
        }
        if min(len(header), len(payload)) < min(copies, len(others)):
            return False
    return True


def oracle_restorable(world, held, survivors, step):
    for rank, home in enumerate(world.node_of):
        own = holding_of(held, home, rank, step) if home in survivors else None
        if own is not None and own.payload:
            continue
        headers = [h for node in survivors if (h := holding_of(held, node, rank, step))]
        payloads = [
            node
            for header in headers
            for node in survivors
            for replica in {rank, *header.replicas}
            if (h := holding_of(held, node, replica, step)) is not None and h.payload
        ]
        if not payloads:
            return False
    return True


@settings(max_examples=150)
@given(data=st.data(), world=worlds())
def test_a_step_can_be_had_where_nothing_of_it_is_missing(data, world):
    held = data.draw(inventories(world, STEPS))
    survivors = data.draw(st.sets(st.sampled_from(world.members), min_size=1))
    ledger = Ledger({node: held[node] for node in survivors})
    for step in range(STEPS):
        restorable = oracle_restorable(world, held, survivors, step)
        assert (ledger.missing(world, step, survivors) == ()) is restorable


@settings(max_examples=150)
@given(data=st.data(), world=worlds(), copies=st.integers(1, 3))
def test_committed_is_what_the_oracle_says(data, world, copies):
    held = data.draw(inventories(world, STEPS))
    expected = max((s for s in range(STEPS) if oracle_committed(world, held, s, copies)), default=NO_STEP)
    assert Ledger(held).committed(world, copies=copies) == expected


@settings(max_examples=150)
@given(data=st.data(), world=worlds())
def test_restore_point_is_what_the_oracle_says(data, world):
    held = data.draw(inventories(world, STEPS))
    lost = data.draw(st.sets(st.sampled_from(world.members), max_size=2))
    survivors = [node for node in world.members if node not in lost]
    expected = [s for s in range(STEPS) if oracle_restorable(world, held, survivors, s)] if survivors else []
    point = Ledger(held).restore_point(world, survivors)
    if isinstance(point, str):
        assert not expected and point
        return
    assert restored(point).step == max(expected)
    for source in point.sources:
        assert {source.header_node, source.payload_node} <= set(survivors)
        header = holding_of(held, source.header_node, source.rank, point.step)
        payload = holding_of(held, source.payload_node, source.payload_rank, point.step)
        assert payload.payload and source.payload_rank in {source.rank, *header.replicas}
    sourced = {source.rank for source in point.sources}
    for rank, home in enumerate(world.node_of):
        own = holding_of(held, home, rank, point.step) if home in survivors else None
        assert (rank in sourced) != (own is not None and own.payload)


@settings(max_examples=150)
@given(data=st.data(), world=worlds(), copies=st.integers(1, 3))
def test_a_committed_step_survives_any_losses_of_as_many_nodes_as_there_are_copies(data, world, copies):
    """RESTORABLE"""
    held = data.draw(inventories(world, STEPS))
    ledger = Ledger(held)
    committed = ledger.committed(world, copies=copies)
    if committed == NO_STEP:
        return
    for lost in combinations(world.members, min(copies, len(world.members) - 1)):
        survivors = [node for node in world.members if node not in lost]
        point = ledger.restore_point(world, survivors)
        assert not isinstance(point, str) and point.step >= committed
        assert oracle_restorable(world, held, survivors, point.step)


def bears(world, held, survivors, step, losses_max):
    """The oracle tries every further loss."""
    for count in range(1, losses_max + 1):
        for more in combinations(survivors, count):
            if not oracle_restorable(world, held, [node for node in survivors if node not in more], step):
                return count - 1
    return losses_max


@settings(max_examples=150)
@given(data=st.data(), world=worlds(), losses_max=st.integers(1, 2))
def test_the_restore_point_is_the_newest_step_that_bears_most_further_losses(data, world, losses_max):
    held = data.draw(inventories(world, STEPS))
    lost = data.draw(st.sets(st.sampled_from(world.members), max_size=2))
    committed = data.draw(st.integers(-1, STEPS - 1))
    survivors = [node for node in world.members if node not in lost]
    able = [s for s in range(STEPS) if oracle_restorable(world, held, survivors, s)] if survivors else []
    point = Ledger(held).restore_point(world, survivors, losses_max, committed)
    if not able:
        assert isinstance(point, str)
        return
    allowed = [step for step in able if step >= committed] or able
    assert restored(point).step == max(
        allowed, key=lambda step: (bears(world, held, survivors, step, losses_max), step)
    )


def test_a_step_that_nobody_mirrors_yet_is_not_gone_back_to():
    """Nobody is lost: the newest step is staged everywhere, the one before it is committed."""
    world = World(0, (0, 1, 2))
    held = {node: [Holding(node, step, True, (node,)) for step in (4, 5)] for node in world.members}
    for node in world.members:
        held[(node + 1) % 3].append(Holding(node, 4, True, (node,)))
    assert restored(Ledger(held).restore_point(world, world.members, 1, 4)).step == 4
    assert restored(Ledger(held).restore_point(world, world.members, 1, 5)).step == 5, (
        "what is committed is never given up"
    )
    assert restored(Ledger(held).restore_point(world, [0, 1], 1, 4)).step == 4, "rank 2's newest was nowhere else"
    held[0].append(Holding(2, 5, True, (2,)))
    assert restored(Ledger(held).restore_point(world, [0, 1], 1, 4)).step == 5, (
        "one copy each is all there is of either"
    )


def test_a_copy_that_nobody_keeps_commits_nothing():
    """Node 2 held it in the world before; its buddy in this one is node 1."""
    world = World(1, (0, 1, 2))
    held = {node: [Holding(node, 4, True, (node,))] for node in world.members}
    for node in world.members:
        held[(node + 2) % 3].append(Holding(node, 4, True, (node,)))
    assert not Ledger(held).is_committed(world, 4)
    for node in world.members:
        held[(node + 1) % 3].append(Holding(node, 4, True, (node,)))
    assert Ledger(held).is_committed(world, 4)


def test_a_header_that_is_to_be_written_anew_with_its_payload_commits_nothing():
    """Two nodes keep one payload for both ranks; now a third has joined, and `copies` asks for payloads everywhere."""
    world = World(generation=1, node_of=(0, 1), spares=(2,))
    bare, whole = (Holding(rank=0, step=5, payload=payload, replicas=(0, 1)) for payload in (False, True))
    other = Holding(rank=1, step=5, payload=True, replicas=(0, 1))
    ledger = Ledger({0: (whole, other), 1: (bare, other), 2: (whole, other)})
    assert not ledger.is_committed(world, 5, copies=2)
    ledger.replace(1, (whole, other))
    assert ledger.is_committed(world, 5, copies=2)


@pytest.mark.parametrize(("copies", "nodes"), [(1, 4), (2, 4), (3, 5)])
def test_mirrors_along_the_ring_commit_and_one_copy_less_does_not(copies, nodes):
    """The buddies placement names are enough for a commit, all of them are needed, and one loss more is fatal."""
    world = World(0, tuple(range(nodes)))
    held: dict[int, list[Holding]] = {node: [Holding(node, 1, True, (node,))] for node in world.members}
    for node in world.active:
        for buddy in buddies_of(world, node, copies):
            held[buddy].append(Holding(node, 1, True, (node,)))
    assert Ledger(held).is_committed(world, 1, copies)
    assert copies + 1 >= nodes - 1 or not Ledger(held).is_committed(world, 1, copies + 1)
    for buddy in buddies_of(world, 0, copies):
        less = held | {buddy: [holding for holding in held[buddy] if holding.rank != 0]}
        assert not Ledger(less).is_committed(world, 1, copies)
    fatal = {0, *buddies_of(world, 0, copies)}
    assert isinstance(Ledger(held).restore_point(world, set(world.members) - fatal), str)


@given(data=st.data(), world=worlds())
def test_replacing_leaves_no_trace(data, world):
    first, second = data.draw(inventories(world, STEPS)), data.draw(inventories(world, STEPS))
    ledger = Ledger(first)
    for node, held in second.items():
        ledger.replace(node, held)
    assert ledger.committed(world) == Ledger(second).committed(world)
    for node in world.members:
        ledger.replace(node, ())
    assert not ledger._copies and not any(ledger._of_node.values())


def test_a_header_from_one_node_and_the_payload_from_a_replica_of_another():
    world = World(0, (0, 1, 2, 3))
    replicas = (0, 2)
    held = {
        1: [Holding(1, 4, True, (1, 3)), Holding(0, 4, False, replicas)],
        2: [Holding(2, 4, True, replicas)],
        3: [Holding(3, 4, True, (1, 3))],
    }
    point = restored(Ledger(held).restore_point(world, [1, 2, 3]))
    assert point.step == 4 and point.sources == (Source(0, header_node=1, payload_node=2, payload_rank=2),)


def test_reasons_are_for_people():
    world = World(0, (0, 1))
    assert "rank(s) 1" in expect(str, Ledger({0: [Holding(0, 1, True, (0,))]}).restore_point(world, [0]))
    held = {0: [Holding(0, 1, True, (0,)), Holding(1, 2, True, (1,))]}
    assert "rank 0: [1], rank 1: [2]" in expect(str, Ledger(held).restore_point(world, [0]))
    assert Ledger(held).restore_point(world, []) == "no node survives"
