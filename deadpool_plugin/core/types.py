"""The nouns of the protocol: world, holdings, plans.

Rules of this file: frozen values, and what follows from them alone. World size, rank order and group rank lists never
change in a swap, only rank -> node does (so a `World` is all a swap replaces).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Annotated

import msgspec

# Bounds hold for what is decoded: nothing else may come from another process.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
NodeId = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
Step = Annotated[int, msgspec.Meta(ge=-1, le=1 << 48)]
Generation = Count
ExitCode = Annotated[int, msgspec.Meta(ge=-255, le=255)]  # negative for a signal, as in subprocess
Digest = Annotated[int, msgspec.Meta(ge=0)]  # of 64 bits: decoded numbers hold no more; msgspec bounds 63 at most

NO_STEP: Step = -1
MASK = (1 << 64) - 1  # the largest digest
NEVER = -1.0  # before any time of any clock

EXIT_UNRECOVERABLE = 86  # of every process after a verdict; as in errors.py, which core may not import
EXIT_FENCED = 87  # of the processes of one node that is out of the job
EXIT_SIGNALLED = 128  # and more: the signal with which a person has ended the job


class World(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The nodes that run the ranks in one generation, and those that stand by."""

    generation: Generation
    node_of: tuple[NodeId, ...]  # by rank
    spares: tuple[NodeId, ...] = ()  # in the order in which they take over
    racks: tuple[tuple[NodeId, str], ...] = ()  # of each member that has one; who has none stands alone
    mirrors: tuple[tuple[NodeId, ...], ...] = ()  # where racks matter the buddies of each of `active`, in that order

    @cached_property
    def active(self) -> tuple[NodeId, ...]:
        """Nodes that run ranks, in the order of their first rank: the ring along which buddies are chosen."""
        return tuple(dict.fromkeys(self.node_of))

    @cached_property
    def members(self) -> tuple[NodeId, ...]:
        """Every node of this generation, spares included: the voters."""
        return self.active + self.spares

    @cached_property
    def positions(self) -> dict[NodeId, int]:
        return dict(zip(self.members, range(len(self.members)), strict=True))

    @cached_property
    def seniority(self) -> tuple[NodeId, ...]:
        """The members in the order in which they coordinate: the lowest living one does."""
        return tuple(sorted(self.members))

    @cached_property
    def _ranks(self) -> dict[NodeId, tuple[Rank, ...]]:
        found: dict[NodeId, list[Rank]] = {}
        for rank, node in enumerate(self.node_of):
            found.setdefault(node, []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    @cached_property
    def _slots(self) -> int:
        """How many ranks each active node has if they are neighbours and each has as many, else 0. In a job they are
        and it has; and then there is nothing to count, which every member would do in every swap."""
        slots, rest = divmod(len(self.node_of), len(self.active) or 1)
        return 0 if rest or any(self.node_of[slot::slots] != self.active for slot in range(slots)) else slots

    def ranks_of(self, node: NodeId) -> tuple[Rank, ...]:
        if not self._slots:
            return self._ranks.get(node, ())
        place = self.positions.get(node, len(self.active))
        return tuple(range(place * self._slots, (place + 1) * self._slots)) if place < len(self.active) else ()

    @cached_property
    def _racks(self) -> dict[NodeId, str]:
        return {node: f"rack {rack}" for node, rack in self.racks}

    def rack_of(self, node: NodeId) -> str:
        """Name the unit that may fail as a whole with `node`: its rack, or itself alone."""
        return self._racks.get(node, f"node {node}")

    # Any two quorums share a member, so no generation has two worlds (ONE_WORLD_PER_GENERATION).

    def is_quorum(self, nodes: Collection[NodeId], witness: bool = False) -> bool:
        """Return whether `nodes` may decide: more than half, or without a `witness` half with the first active one."""
        return 2 * len(nodes) >= len(self.members) and self.is_quorum_without(self.positions.keys() - nodes, witness)

    def is_quorum_without(self, lost: Collection[NodeId], witness: bool = False) -> bool:
        """Return whether all members but `lost` (distinct members) may. Costs the same in a world of any size."""
        total, present = len(self.members), len(self.members) - len(lost)
        return 2 * present > total or (2 * present == total and self.active[0] not in lost and not witness)

    def is_half(self, nodes: Collection[NodeId]) -> bool:
        """Return whether `nodes` may decide what a witness keeps: whatever any half accepts is that one plan."""
        return 2 * len(self.positions.keys() & nodes) >= len(self.members)


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """One verified snapshot in one node's memory."""

    rank: Rank
    step: Step
    payload: bool  # else the header (scalars, call records) alone: another node keeps the payload of a replica
    replicas: tuple[Rank, ...]  # every rank whose payload is identical, the rank itself included
    paired: Digest = 0  # what the rank's collectives up to this step come to (pairing.py)


class Source(msgspec.Struct, frozen=True, array_like=True):
    rank: Rank  # whose snapshot of the restore step is to be had
    header_node: NodeId
    payload_node: NodeId
    payload_rank: Rank  # a replica, whose snapshot of the same step has the payload


class Failure(msgspec.Struct, frozen=True, array_like=True):
    rank: Rank  # whose process is gone from a healthy node
    exit_code: ExitCode  # of a script that ended by itself with an error, -1 if something else ended it
    reason: str
    raises: Count = 0  # how often its script has raised by now, each time soon after the one before


class Suspicion(msgspec.Struct, frozen=True, array_like=True):
    """Errors of one rank's script that may be the script's own, or its host's (README.md, "Whose fault")."""

    rank: Rank
    raises: Count  # the newest one included
    step: Step  # the newest committed one at the newest of them


class Checkpoint(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A complete checkpoint on disk, as the script's own saving call left it. The newest is the largest."""

    whole: bool = False  # saved by all ranks as one; a file that a script writes beside those is never the newest
    step: Step = NO_STEP
    path: str = ""


class SwapPlan(msgspec.Struct, frozen=True, array_like=True):
    """The plan that every node carries out once a majority has accepted it."""

    world: World
    restore_step: Step  # NO_STEP where training had not begun: every rank begins its script again in a new process
    lost_nodes: tuple[NodeId, ...]
    sources: tuple[Source, ...]
    store: str  # "" with NO_STEP, until one of the new processes offers one
    lost_ranks: tuple[Rank, ...] = ()  # on nodes that survive, which start a new process for them
    joined: tuple[NodeId, ...] = ()  # hosts that were no members before
    vacated: tuple[NodeId, ...] = ()  # living nodes whose ranks move to others, and that stand by from now on
    suspicions: tuple[Suspicion, ...] = ()  # those that count in this generation
    every: Count = 1  # how many steps the first snapshots after `restore_step` are apart (chain.py)


class Unrecoverable(msgspec.Struct, frozen=True, array_like=True):
    reason: str
    lost_ranks: tuple[Rank, ...]
    newest_committed: Step


class Ballot(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Fencing token of one attempt to decide one generation's world; larger wins."""

    generation: Generation
    round: Count
    node: NodeId


def listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
