"""The holdings and progress of this node: the contents of its Reports and Promises.

Rules of this file: changed by inputs of this node and by decided plans only; every method answers whether anything
changed, so that a Report is sent on change and not otherwise. May import messages and types only.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from .messages import Report
from .types import NO_STEP, Generation, Holding, Rank, Step


class Inventory:
    """This node's side of the ledger."""

    def __init__(self) -> None:
        self._held: dict[tuple[Rank, Step], Holding] = {}
        self._floor: Step = NO_STEP
        self._ready: set[Rank] = set()
        self._finished: set[Rank] = set()
        self._moves = 0
        self.rehearsed: dict[int, Rank] = {}
        self.able = False
        """All that this node was told to rehearse is rehearsed, and nothing has failed since."""
        self.unable = ""
        """Why it could not take over, "" if nothing speaks against it."""
        self.pruned = False
        """Records of the first steps of a rank of this node are dropped."""
        self._offers: dict[int, tuple[bool, str]] = {}
        """Each local slot's store, and whether its process runs a rank; the newest last."""
        self._lost_stores: set[str] = set()

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

    def has_all(self, ranks: Iterable[Rank], step: Step) -> bool:
        return all((rank, step) in self._held for rank in ranks)

    def dropped(self, rank: Rank, newer_than: Step) -> bool:
        stale = [key for key in self._held if key[0] == rank and key[1] > newer_than]
        for key in stale:
            del self._held[key]
        return bool(stale)

    def ready(self, rank: Rank) -> bool:
        return _add(self._ready, rank)

    def moved(self) -> None:
        """A process has got on: the next report will say so."""
        self._moves += 1

    def finished(self, rank: Rank) -> bool:
        return _add(self._finished, rank)

    def rehearse(self, local_slot: int, rank: Rank) -> bool:
        if self.rehearsed.get(local_slot) == rank:
            return False
        self.rehearsed[local_slot] = rank
        return True

    def prune(self) -> bool:
        before, self.pruned = self.pruned, True
        return not before

    @property
    def store(self) -> str:
        """The one to build upon next, "" if there is none: the newest, and of a process that runs a rank if any is."""
        offers = [address for runs, address in self._offers.values() if runs] or [a for _, a in self._offers.values()]
        return offers[-1] if offers else ""

    def offer(self, address: str, local_slot: int, stand_in: bool) -> bool:
        before = self.store
        self._offers.pop(local_slot, None)
        self._offers[local_slot] = (not stand_in, address)
        return self.store != before

    def lose_store(self, address: str) -> bool:
        self._lost_stores.add(address)
        return self.consume(address)

    def consume(self, address: str) -> bool:
        """The store at `address` is built upon (or gone): nobody else may."""
        before = self.store
        self._offers = {slot: offer for slot, offer in self._offers.items() if offer[1] != address}
        return self.store != before

    def has_lost(self, store: str) -> bool:
        """Return whether `store` was to be built upon next and is gone."""
        return store in self._lost_stores

    def begin_generation(self, restore_step: Step, used_store: str) -> None:
        """The world went back to `restore_step`: newer snapshots are of a history that did not happen.

        Ranks are ready and finished again only when they say so again in the new generation. Where the script begins
        again every process is a new one, and so is its store.
        """
        self._floor = restore_step
        self._held = {key: holding for key, holding in self._held.items() if key[1] <= restore_step}
        self._ready.clear()
        self._finished.clear()
        self._moves = 0
        if restore_step == NO_STEP:
            self._offers.clear()
        self.consume(used_store)
        self._lost_stores.clear()

    def fill(self, report: Report) -> Report:
        """`report` with what this node holds and has reached."""
        return msgspec.structs.replace(
            report,
            holdings=self.holdings,
            ready=tuple(sorted(self._ready)),
            rehearsed=tuple(sorted(self.rehearsed.items())),
            finished=tuple(sorted(self._finished)),
            store=self.store,
            moved=self._moves,
            able=self.able,
            unable=self.unable,
            pruned=self.pruned,
        )


def _add(found: set[Rank], rank: Rank) -> bool:
    changed = rank not in found
    found.add(rank)
    return changed
