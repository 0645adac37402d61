"""Who mirrors whom, who takes over from whom, and which rank a spare rehearses: functions of the world alone.

Rules of this file: pure functions; every node computes the same answer from the same world, so none of it is ever
sent. May import types only.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from .types import NodeId, Rank, World


class Rehearsal(msgspec.Struct, frozen=True):
    """`spare`'s worker in `local_slot` rehearses `rank`, whose start-up recording `source` holds."""

    spare: NodeId
    local_slot: int
    rank: Rank
    source: NodeId


def buddy_of(world: World, node: NodeId) -> NodeId | None:
    """The node that holds `node`'s mirrors: the next active one, or the first spare if there is only one active node.

    Returns: None for a node without ranks, and where no second node exists.
    """
    ring = world.active
    if node not in ring:
        return None
    if len(ring) == 1:
        return world.spares[0] if world.spares else None
    return ring[(ring.index(node) + 1) % len(ring)]


def needs_payload(world: World, rank: Rank, replicas: Collection[Rank]) -> bool:
    """Whether `rank`'s payload must be mirrored: no rank of `replicas` keeps the same payload on another node."""
    home = world.node_of[rank]
    return all(world.node_of[replica] == home for replica in replicas)


def rehearsals(world: World) -> tuple[Rehearsal, ...]:
    """What every spare rehearses: spare i the ranks of the i-th active node, modulo their number, one a local slot."""
    ring = world.active
    return tuple(
        Rehearsal(spare, slot, rank, source=ring[index % len(ring)])
        for index, spare in enumerate(world.spares)
        for slot, rank in enumerate(world.ranks_of(ring[index % len(ring)]))
    )


def takers_of(world: World, lost: Collection[NodeId]) -> dict[NodeId, NodeId] | None:
    """Lost active node -> the surviving spare that takes its ranks as a whole, or None if there are too few spares.

    Preferred is the spare that rehearses that node; others take over in the order of the spares.
    """
    free = [spare for spare in world.spares if spare not in lost]
    vacant = [node for node in world.active if node in lost]
    if len(vacant) > len(free):
        return None
    rehearsed = {(r.source, r.spare) for r in rehearsals(world)}
    takers: dict[NodeId, NodeId] = {}
    for node in vacant:
        match = next((spare for spare in free if (node, spare) in rehearsed), None)
        if match is not None:
            takers[node] = match
            free.remove(match)
    for node in vacant:
        if node not in takers:
            takers[node] = free.pop(0)
    return takers


def world_after(world: World, lost: Collection[NodeId]) -> World | None:
    """The next generation's world without the `lost` nodes: same ranks, same ring positions; None if spares run out."""
    takers = takers_of(world, lost)
    if takers is None:
        return None
    gone = set(lost) | set(takers.values())
    return World(
        generation=world.generation + 1,
        node_of=tuple(takers.get(node, node) for node in world.node_of),
        spares=tuple(spare for spare in world.spares if spare not in gone),
    )
