"""What this node itself holds and has reached: the contents of its Reports and Promises.

Rules of this file: changed by inputs of this node and by decided plans only; every method answers whether anything
changed, so that a Report is sent on change and not otherwise. May import messages and types only.
"""

from __future__ import annotations

from .messages import Report
from .types import NO_STEP, Generation, Holding, NodeId, Rank, Step


class Inventory:
    """This node's side of the ledger."""

    def __init__(self) -> None:
        self._held: dict[tuple[Rank, Step], Holding] = {}
        self._floor: Step = NO_STEP
        self._ready: set[Rank] = set()
        self._finished: set[Rank] = set()
        self.rehearsed: dict[int, Rank] = {}
        self.store = ""

    @property
    def holdings(self) -> tuple[Holding, ...]:
        return tuple(self._held[key] for key in sorted(self._held))

    def held(self, holding: Holding, generation: Generation, current: Generation) -> bool:
        """A verified snapshot. One of an older generation counts only up to the step the world went back to."""
        if generation != current and not (generation < current and holding.step <= self._floor):
            return False
        key = (holding.rank, holding.step)
        if self._held.get(key) == holding:
            return False
        self._held[key] = holding
        for rank, step in list(self._held):
            if rank == holding.rank and step < holding.step - 1:
                del self._held[rank, step]
        return True

    def dropped(self, rank: Rank, newer_than: Step) -> bool:
        stale = [key for key in self._held if key[0] == rank and key[1] > newer_than]
        for key in stale:
            del self._held[key]
        return bool(stale)

    def ready(self, rank: Rank) -> bool:
        return _add(self._ready, rank)

    def finished(self, rank: Rank) -> bool:
        return _add(self._finished, rank)

    def rehearse(self, local_slot: int, rank: Rank) -> bool:
        if self.rehearsed.get(local_slot) == rank:
            return False
        self.rehearsed[local_slot] = rank
        return True

    def offer(self, address: str) -> bool:
        changed, self.store = self.store != address, address
        return changed

    def begin_generation(self, restore_step: Step, used_store: str) -> None:
        """The world went back to `restore_step`: newer snapshots are of a history that did not happen.

        Ranks are ready and finished again only when they say so again in the new generation.
        """
        self._floor = restore_step
        self._held = {key: holding for key, holding in self._held.items() if key[1] <= restore_step}
        self._ready.clear()
        self._finished.clear()
        if self.store == used_store:
            self.store = ""

    def report(self, generation: Generation, node: NodeId) -> Report:
        return Report(
            generation=generation,
            node=node,
            holdings=self.holdings,
            ready=tuple(sorted(self._ready)),
            rehearsed=tuple(sorted(self.rehearsed.items())),
            finished=tuple(sorted(self._finished)),
            store=self.store,
        )


def _add(found: set[Rank], rank: Rank) -> bool:
    changed = rank not in found
    found.add(rank)
    return changed
