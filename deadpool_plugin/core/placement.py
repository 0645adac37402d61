"""Placement of mirrors, of takeovers and of rehearsals on nodes, and of a node's ranks on its slots.

Rules of this file: pure functions; every node computes the same answer from the same world, so none of it is ever sent.
But where racks matter the mirrors are part of the world: a swap moves none that may stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import TypeAlias

import msgspec

from .types import NodeId, Rank, World

Nodes: TypeAlias = Collection[NodeId]


class RehearsalTask(msgspec.Struct, frozen=True):
    spare: NodeId
    local_slot: int
    rank: Rank
    source: NodeId  # which holds the rank's start-up recording


def buddies_of(world: World, node: NodeId, copies: int) -> tuple[NodeId, ...]:
    """The nodes that hold `node`'s mirrors: the next `copies` active ones of the ring, then spares if too few."""
    if not world.ranks_of(node):
        return ()
    ring, own = world.active, world.positions[node]
    if world.mirrors:  # where racks matter; for the job's `copies`
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


def rehearsal_order(world: World, spare: NodeId, faults: Mapping[NodeId, int] = {}) -> tuple[NodeId, ...]:
    """Order the active nodes as `spare` rehearses them: its own share first, and in it those with most `faults`.

    Spares divide the hosts in turn. One that is through with its share goes on with those of the others.
    """
    ring, number, spares = world.active, world.spares.index(spare), len(world.spares)
    likely = sorted(range(len(ring)), key=lambda place: -faults.get(ring[place], 0))
    turns = sorted(range(len(ring)), key=lambda turn: (turn - number) % spares)
    return tuple(ring[likely[turn]] for turn in turns)


def rehearsals(world: World, faults: Mapping[NodeId, int] = {}) -> tuple[RehearsalTask, ...]:
    """Give every spare its first rehearsals: the ranks of one active node, one a local slot."""
    firsts = ((spare, rehearsal_order(world, spare, faults)[0]) for spare in world.spares)
    return tuple(
        RehearsalTask(spare, slot, rank, source=node)
        for spare, node in firsts
        for slot, rank in enumerate(world.ranks_of(node))
    )


def takers_of(
    world: World, lost: Nodes, joined: Nodes = (), covers: Mapping[NodeId, Mapping[Rank, bool]] = {}
) -> dict[NodeId, NodeId] | None:
    """Lost active node -> the spare or `joined` host that takes its ranks as a whole, or None if there are too few.

    Args: covers: spare -> rank -> whether the rank is rehearsed there; else that is under way.
    """
    free = [spare for spare in (*world.spares, *joined) if spare not in lost]
    vacant = [node for node in world.active if node in lost]
    if len(vacant) > len(free):
        return None
    firsts = {(task.source, task.spare) for task in rehearsals(world)}
    able = {spare for spare, ranks in covers.items() if any(ranks.values())}

    def worst(pair: tuple[NodeId, NodeId]) -> tuple[int, bool, int, bool]:
        found = [covers.get(pair[1], {}).get(rank) for rank in world.ranks_of(pair[0])]
        # One that has rehearsed nothing may compile for minutes.
        return -found.count(True), pair[1] not in able, -found.count(False), pair not in firsts

    takers: dict[NodeId, NodeId] = {}
    for node, spare in sorted(product(vacant, free), key=worst):
        if node not in takers and spare not in takers.values():
            takers[node] = spare
    return takers


def world_after(
    world: World,
    lost: Nodes,
    joined: Mapping[NodeId, str] = {},  # with their racks, "" for none
    copies: int = 1,
    covers: Mapping[NodeId, Mapping[Rank, bool]] = {},  # as in takers_of
    vacated: Nodes = (),
) -> World | None:
    """The next world without the `lost` nodes, with the `joined` hosts as spares after those of before, and the
    `vacated` ones, which live and whose ranks move, as the last ones; None if spares run out."""
    takers = takers_of(world, {*lost, *vacated}, joined, covers)
    if takers is None:
        return None
    gone = set(lost) | set(takers.values())
    after = World(
        generation=world.generation + 1,
        node_of=tuple(takers.get(node, node) for node in world.node_of),
        spares=tuple(spare for spare in (*world.spares, *joined, *vacated) if spare not in gone),
    )
    before = {
        takers.get(node, node): [takers.get(buddy, buddy) for buddy in buddies_of(world, node, copies)]
        for node in world.active
    }
    return with_racks(after, {**dict(world.racks), **joined}, copies, before)


def with_racks(
    world: World, racks: Mapping[NodeId, str], copies: int, before: Mapping[NodeId, Nodes] | None = None
) -> World:
    """`world` with its members' racks, and mirrors as `before` as far as they allow; as it is if they have none."""
    known = tuple((node, racks[node]) for node in world.members if racks.get(node))
    if not known:
        return world
    placed = msgspec.structs.replace(world, racks=known)
    buddies = _Assignment(placed, min(copies, len(world.members) - 1), before or {}).buddies
    return msgspec.structs.replace(placed, mirrors=tuple(map(tuple, buddies.values())))


class _Assignment:
    """The buddies of each active node where hosts stand in racks: never two copies in one while another has room.

    A node has room for as many mirrors as it gives away itself; a spare has as much. What is lost is filled in, by
    having others move where nobody has room, and the rest is left alone. Among equals it is the next along the ring.
    Source of the search: augmenting paths, Kuhn (1955), with racks as a further condition on each edge.
    """

    def __init__(self, world: World, copies: int, before: Mapping[NodeId, Nodes]) -> None:
        self._world, self._copies = world, copies
        self._rack = {node: world.rack_of(node) for node in world.members}
        self.buddies: dict[NodeId, list[NodeId]] = {node: [] for node in world.active}  # in the order of the ring
        self._load: Counter[NodeId] = Counter()
        for node in world.active:
            for buddy in before.get(node, ()):
                wanted = len(self.buddies[node]) < copies and self._load[buddy] < copies
                if wanted and buddy in self._fitting(node, {buddy}, apart=True):
                    self._give(node, buddy)
        active, members = frozenset(world.active), frozenset(world.members)
        for among, apart, others_apart in (
            (active, True, True), (members, True, True), (members, False, True), (members, False, False),
        ):  # fmt: skip
            for node in world.active:
                while len(self.buddies[node]) < copies:
                    if not self._find(node, among, apart, others_apart, set(), before.get(node, ())):
                        break

    def _give(self, node: NodeId, buddy: NodeId) -> None:
        self.buddies[node].append(buddy)
        self._load[buddy] += 1

    def _find(
        self, node: NodeId, among: Nodes, apart: bool, others_apart: bool, asked: set[NodeId], before: Nodes = ()
    ) -> bool:
        """Find one buddy more for `node`, if need be by having others move. `apart`: in racks that hold no copy yet."""
        fitting = [one for one in self._fitting(node, among, apart) if one not in asked]
        free = [one for one in fitting if self._load[one] < self._copies]
        if free:
            self._give(node, min(free, key=lambda one: (one not in before, self._load[one])))
            return True
        for buddy in fitting:
            if buddy in asked:
                continue
            asked.add(buddy)
            for other in [one for one, held in self.buddies.items() if buddy in held and one != node]:
                self.buddies[other].remove(buddy)
                self._load[buddy] -= 1
                if self._find(other, among, others_apart, others_apart, asked):
                    self._give(node, buddy)
                    return True
                self._give(other, buddy)
        return False

    def _fitting(self, node: NodeId, among: Nodes, apart: bool) -> list[NodeId]:
        """List who could be the next buddy of `node`: along the ring from it on, then the spares."""
        ring, rack, own = self._world.active, self._rack, self._world.positions[node]
        held = {node, *self.buddies[node]}
        racks = {rack[one] for one in held} if apart else set()
        order = (*ring[own + 1 :], *ring[:own], *self._world.spares)
        return [one for one in order if one in among and one not in held and rack[one] not in racks]


class LocalSlot(msgspec.Struct, frozen=True):
    """One slot of a node as a decided plan finds it; ranks are -1 where there is none."""

    rank: Rank  # what it has run so far
    serves: bool  # its process lives and runs that rank
    rehearses: tuple[Rank, ...] = ()  # what processes of it rehearse, or have rehearsed


def divide(ranks: Sequence[Rank], slots: Sequence[LocalSlot]) -> tuple[dict[Rank, int], dict[Rank, int]]:
    """Divide a node's slots among its `ranks`: rank -> index of those that go on, and of those that take it over."""
    staying = {rank: n for rank in ranks for n, slot in enumerate(slots) if slot.rank == rank and slot.serves}
    free = {n: slot for n, slot in enumerate(slots) if not slot.serves}
    vacant, placed = [rank for rank in ranks if rank not in staying], dict[Rank, int]()
    for choice, rank, (number, slot) in product(range(3), vacant, free.items()):
        fits = (slot.rank == rank, rank in slot.rehearses, slot.rank < 0)[choice]  # its own slot first
        if fits and rank not in placed and number not in placed.values():
            placed[rank] = number
    return staying, placed
