"""The nouns of the protocol: world, holdings, plans.

Rules of this file: frozen values only, no behaviour beyond look-ups; world size, rank order and group
rank lists never change in a swap, only rank -> node does (so a `World` is all a swap replaces).
May import nothing of this package.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
"""Bounds hold for what is decoded: nothing else may come from another process."""
NodeId = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
Step = Annotated[int, msgspec.Meta(ge=-1, le=1 << 48)]
Generation = Count
ExitCode = Annotated[int, msgspec.Meta(ge=-255, le=255)]
"""Negative for a signal, as in subprocess."""

Digest = Annotated[int, msgspec.Meta(ge=0)]
"""Mask of 64 bits: decoded numbers hold no more, and msgspec takes no bound above 63."""

NO_STEP: Step = -1
MASK = (1 << 64) - 1
"""The largest digest."""
NEVER = -1.0
"""Before any time of any clock."""

EXIT_UNRECOVERABLE = 86
"""Every process ends with this after a verdict; the same as in errors.py, which core may not import."""
EXIT_FENCED = 87
"""The processes of one node that is out of the job end with this."""
EXIT_SIGNALLED = 128
"""More than this by so many as the signal with which a person has ended the job."""


class World(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The nodes that run the ranks in one generation, and those that stand by.

    `node_of[rank]` is the node of that rank; `spares` are the standing-by nodes in the order in which they
    take over. `racks`: the rack of each member that has one; who has none stands alone. `mirrors`: where racks matter,
    the buddies of each active node, in the order of `active` (else they follow from the ring, see placement.py).
    """

    generation: Generation
    node_of: tuple[NodeId, ...]
    spares: tuple[NodeId, ...] = ()
    racks: tuple[tuple[NodeId, str], ...] = ()
    mirrors: tuple[tuple[NodeId, ...], ...] = ()

    @cached_property
    def active(self) -> tuple[NodeId, ...]:
        """Nodes that run ranks, in the order of their first rank: the ring along which buddies are chosen."""
        return tuple(self._ranks)

    @cached_property
    def members(self) -> tuple[NodeId, ...]:
        """Every node of this generation, spares included: the voters."""
        return self.active + self.spares

    @cached_property
    def positions(self) -> dict[NodeId, int]:
        """Each member's place in `members`."""
        return {node: place for place, node in enumerate(self.members)}

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

    def ranks_of(self, node: NodeId) -> tuple[Rank, ...]:
        return self._ranks.get(node, ())

    def rack_of(self, node: NodeId) -> str:
        """Name the unit that may fail as a whole with `node`: its rack, or itself alone."""
        return self._rack_of.get(node, f"node {node}")

    @cached_property
    def _rack_of(self) -> dict[NodeId, str]:
        return {node: f"rack {rack}" for node, rack in self.racks}


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """One verified snapshot in one node's memory.

    `payload` is False where only the header (scalars, call records) is held because another rank of
    `replicas` on another node keeps the same payload. `replicas` names every rank whose payload is identical,
    the rank itself included. `paired`: what the rank's collectives up to this step come to (pairing.py).
    """

    rank: Rank
    step: Step
    payload: bool
    replicas: tuple[Rank, ...]
    paired: Digest = 0


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Source of a lost rank's snapshot: its header from one node, its payload from `payload_rank`'s
    snapshot of the same step on a (possibly different) node."""

    rank: Rank
    header_node: NodeId
    payload_node: NodeId
    payload_rank: Rank


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The process of `rank` is gone from a healthy node. `exit_code` is that of a script that ended by itself with an
    error, -1 if something else ended it."""

    rank: Rank
    exit_code: ExitCode
    reason: str


class Checkpoint(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A complete checkpoint on disk, as the script's own saving call left it. The newest is the largest.

    `whole`: saved by all ranks as one. A file that a script writes beside those is never the newest checkpoint.
    """

    whole: bool = False
    step: Step = NO_STEP
    path: str = ""


class SwapPlan(msgspec.Struct, frozen=True, array_like=True):
    """The plan that every node carries out once a majority has accepted it.

    `restore_step` is NO_STEP where nothing was lost because training had not begun: every rank then begins its script
    again in a new process, and `store` is "" until one of them offers one. `lost_ranks` lived on nodes that survive:
    their own node starts a new process for them. `joined` are hosts that were no members before.
    """

    world: World
    restore_step: Step
    lost_nodes: tuple[NodeId, ...]
    sources: tuple[Source, ...]
    store: str
    lost_ranks: tuple[Rank, ...] = ()
    joined: tuple[NodeId, ...] = ()


class Unrecoverable(msgspec.Struct, frozen=True, array_like=True):
    """No plan exists; `reason` says why, for people."""

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
