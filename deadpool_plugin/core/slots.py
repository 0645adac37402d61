"""Slots of a node, and what each runs once a plan is decided.

Rules of this file: a pure function of what the node's own slots are; agents and simulator alike place by it.
May import types only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .types import Rank


class LocalSlot(msgspec.Struct, frozen=True):
    """One slot of a node as a decided plan finds it; ranks are -1 where there is none.

    Args:
        rank: what it has run so far.
        serves: its process lives and runs that rank.
        rehearses: what its process rehearses, or has rehearsed.
    """

    rank: Rank
    serves: bool
    rehearses: Rank = -1


def divide(ranks: Sequence[Rank], slots: Sequence[LocalSlot]) -> tuple[dict[Rank, int], dict[Rank, int]]:
    """Divide: slots that go on with their rank, and those that are to take the node's other ranks over.

    A rank without a process gets its own slot, else the one that rehearses it, else one that has no rank.

    Args:
        ranks: what the node runs in the plan's world.

    Returns: rank -> index into `slots`, for both. A rank that there is no slot for is in neither.
    """
    staying = {rank: n for rank in ranks for n, slot in enumerate(slots) if slot.rank == rank and slot.serves}
    free = {n: slot for n, slot in enumerate(slots) if not slot.serves}
    placed: dict[Rank, int] = {}
    for fits in (_is_own, _is_rehearsed, _is_left):
        for rank in ranks:
            if rank not in staying and rank not in placed:
                number = next((n for n, slot in free.items() if fits(slot, rank)), None)
                if number is not None:
                    placed[rank] = number
                    del free[number]
    return staying, placed


def _is_own(slot: LocalSlot, rank: Rank) -> bool:
    return slot.rank == rank


def _is_rehearsed(slot: LocalSlot, rank: Rank) -> bool:
    return slot.rehearses == rank


def _is_left(slot: LocalSlot, rank: Rank) -> bool:
    return slot.rank < 0
