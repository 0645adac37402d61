"""Placement of mirrors, of takeovers and of rehearsals: functions of the world alone.

Rules of this file: pure functions; every node computes the same answer from the same world, so none of it is ever
sent (but where racks matter). May import mirrors and types only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec

from .mirrors import assign
from .types import NodeId, Rank, World


class Rehearsal(msgspec.Struct, frozen=True):
    """`spare`'s worker in `local_slot` rehearses `rank`, whose start-up recording `source` holds."""

    spare: NodeId
    local_slot: int
    rank: Rank
    source: NodeId


def buddies_of(world: World, node: NodeId, copies: int) -> tuple[NodeId, ...]:
    """The nodes that hold `node`'s mirrors: the next `copies` active ones of the ring, then spares if too few.

    Where the world names racks it has an assignment of its own (mirrors.py), made for the job's `copies`.
    Returns: () for a node without ranks; fewer than `copies` where the world has no more members.
    """
    if not world.ranks_of(node):
        return ()
    ring, own = world.active, world.positions[node]
    if world.mirrors:
        return world.mirrors[own]
    near = tuple(ring[(own + hop) % len(ring)] for hop in range(1, min(copies + 1, len(ring))))
    return near + world.spares[: copies - len(near)]


def held_by(world: World, node: NodeId, copies: int) -> frozenset[Rank]:
    """The ranks whose snapshots `node` is to hold: those it runs and those it mirrors."""
    return frozenset(rank for owner in (node, *mirrored_by(world, node, copies)) for rank in world.ranks_of(owner))


def mirrored_by(world: World, node: NodeId, copies: int) -> tuple[NodeId, ...]:
    """The nodes whose mirrors `node` holds: `buddies_of` backwards, without asking every node of the ring."""
    ring = world.active
    if world.mirrors:
        return tuple(owner for owner, buddies in zip(ring, world.mirrors, strict=True) if node in buddies)
    near = min(copies, len(ring) - 1)
    if not world.ranks_of(node):
        return ring if node in world.spares[: copies - near] else ()
    own = world.positions[node]
    return tuple(ring[own - hop] for hop in range(1, near + 1))


def needs_payload(world: World, rank: Rank, replicas: Collection[Rank], copies: int = 1) -> bool:
    """Return whether `rank`'s payload must be mirrored: too few other nodes keep the same one for `replicas`."""
    elsewhere = {world.node_of[replica] for replica in replicas} - {world.node_of[rank]}
    return len(elsewhere) < copies_needed(world, copies)


def copies_needed(world: World, copies: int) -> int:
    """On how many nodes other than its own a snapshot must be to be safe: `copies`, but all of a smaller world's."""
    return min(copies, len(world.members) - 1)


def rehearsals(world: World) -> tuple[Rehearsal, ...]:
    """Give every spare its rehearsals: spare i the ranks of active node i (modulo their number), one a local slot."""
    ring = world.active
    return tuple(
        Rehearsal(spare, slot, rank, source=ring[index % len(ring)])
        for index, spare in enumerate(world.spares)
        for slot, rank in enumerate(world.ranks_of(ring[index % len(ring)]))
    )


def takers_of(
    world: World, lost: Collection[NodeId], joined: Collection[NodeId] = (), able: Collection[NodeId] = ()
) -> dict[NodeId, NodeId] | None:
    """Lost active node -> the spare or `joined` host that takes its ranks as a whole, or None if there are too few.

    Preferred is the spare that rehearses that node. If that has not rehearsed anything yet (it may compile for minutes)
    one of the `able` ones takes over, if one is free; then others in the order of the spares, joined hosts last.
    """
    free = [spare for spare in (*world.spares, *joined) if spare not in lost]
    vacant = [node for node in world.active if node in lost]
    if len(vacant) > len(free):
        return None
    rehearsed = {(r.source, r.spare) for r in rehearsals(world)}
    takers: dict[NodeId, NodeId] = {}

    def fits(node: NodeId, spare: NodeId, has_rehearsed_it: bool, is_able: bool) -> bool:
        return (not has_rehearsed_it or (node, spare) in rehearsed) and (not is_able or spare in able)

    for has_rehearsed_it, is_able in ((True, True), (False, True), (True, False), (False, False)):
        for node in (node for node in vacant if node not in takers):
            taker = next((spare for spare in free if fits(node, spare, has_rehearsed_it, is_able)), None)
            if taker is not None:
                takers[node] = taker
                free.remove(taker)
    return {node: takers[node] for node in vacant}


def world_after(
    world: World,
    lost: Collection[NodeId],
    joined: Collection[NodeId] = (),
    racks: Mapping[NodeId, str] = MappingProxyType({}),
    copies: int = 1,
    able: Collection[NodeId] = (),
) -> World | None:
    """The next generation's world without the `lost` nodes and with the `joined` hosts as its last spares.

    Args: racks: those of the joined hosts. able: as for `takers_of`.
    Returns: the same ranks at the same ring positions, or None if spares run out.
    """
    takers = takers_of(world, lost, joined, able)
    if takers is None:
        return None
    gone = set(lost) | set(takers.values())
    after = World(
        generation=world.generation + 1,
        node_of=tuple(takers.get(node, node) for node in world.node_of),
        spares=tuple(spare for spare in (*world.spares, *joined) if spare not in gone),
    )
    before = {
        takers.get(node, node): [takers.get(buddy, buddy) for buddy in buddies_of(world, node, copies)]
        for node in world.active
    }
    return with_racks(after, {**dict(world.racks), **racks}, copies, before)


def with_racks(
    world: World,
    racks: Mapping[NodeId, str],
    copies: int,
    before: Mapping[NodeId, Collection[NodeId]] = MappingProxyType({}),
) -> World:
    """`world` with its members' racks and the mirrors that follow from them; as it is if they have none.

    Args: before: whose mirrors are where already.
    """
    known = tuple((node, racks[node]) for node in world.members if racks.get(node))
    if not known:
        return world
    placed = msgspec.structs.replace(world, racks=known)
    return msgspec.structs.replace(placed, mirrors=assign(placed, copies, before))
