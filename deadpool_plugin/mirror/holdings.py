"""Snapshots that lie in this node's slots, whole and unchanged, and reading them.

Rules of this file: any thread. A holding is listed only while its slot is sealed and verified; one whose payload is
found changed since it was sent or received is none any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from ..core.types import Generation, Holding, Rank, Step
from ..errors import TransportError
from .arena import SlotPair, SnapshotHeader, arena_bytes
from .integrity import Checksums, CorruptSnapshot, Sums
from .records import NotHeld, Records

SMALL_BYTES = 64 << 20
"""Up to so much is freed by the caller itself, more by a thread of its own."""


class Snapshot(NamedTuple):
    """One as it lies in its slot, for whoever reads it. The view keeps the memory; `check_read` checks the content."""

    pair: SlotPair
    header: SnapshotHeader
    encoded: bytes
    digest: int
    payload: memoryview


class Holdings(Records):
    """Own ranks' slots, other ranks' mirrors, and what they hold. See Records for the argument."""

    def __init__(self, history_limit_bytes: int) -> None:
        super().__init__(history_limit_bytes)
        self._own: dict[Rank, SlotPair] = {}
        self._mirrored: dict[Rank, SlotPair] = {}
        self._holdings: dict[tuple[Rank, Step], Holding] = {}
        self._sums = Checksums()
        self._on_corrupt: list[Callable[[Rank, Step], None]] = []

    def owns(self, rank: Rank, step: Step) -> bool:
        """Return whether (rank, step) is held in own slots (and not, so far, as a mirror)."""
        return rank in self._own and (rank, step) in self._holdings

    def own(self, rank: Rank) -> SlotPair | None:
        return self._own.get(rank)

    def announce(self, generation: Generation) -> None:
        """Lets the processes of own slots see that `generation` begins, whatever else they hear."""
        with self._lock:
            for pair in self._own.values():
                pair.announce(generation)

    def paired(self, rank: Rank, step: Step) -> int:
        """Return the sum of the rank's collectives up to `step`, of its snapshot; 0 if that is not here."""
        with self._lock:
            pair = self._pair(rank)
            header = pair.open(step) if pair is not None else None
            return header.paired if header is not None else 0

    def holds(self, rank: Rank) -> bool:
        """Return whether slots or a recording of `rank` take memory here."""
        return rank in self._own or rank in self._mirrored or rank in self._recordings

    def ranks(self) -> list[Rank]:
        """Every rank of which anything is here: few, however many ranks the job has."""
        with self._lock:
            return sorted({*self._own, *self._mirrored, *self._recordings, *self._histories})

    def staged(self, rank: Rank, step: Step, generation: Generation, replicas: tuple[Rank, ...]) -> Holding:
        """Takes note that the own rank's slot of `step` was sealed (by its worker, or after a fetch).

        Raises: StaleGeneration; TransportError if the slot does not hold it.
        """
        with self._lock:
            self.check_generation(generation)
            pair = self._own.get(rank)
            header = pair.open(step) if pair is not None else None
            if header is None:
                raise TransportError(f"rank {rank} says it staged step {step}, but its slot does not hold it")
            return self._hold(Holding(rank, step, True, replicas, header.paired))

    def _hold(self, holding: Holding) -> Holding:
        for rank, step in list(self._holdings):
            if rank == holding.rank and (step < holding.step - 1 or step % 2 == holding.step % 2):
                del self._holdings[rank, step]
        self._holdings[holding.rank, holding.step] = holding
        return holding

    def holdings(self) -> tuple[Holding, ...]:
        """Everything this node can serve now; an own slot that its worker has begun to overwrite is not listed."""
        with self._lock:
            return tuple(
                self._holdings[rank, step]
                for rank, step in sorted(self._holdings)
                if (pair := self._pair(rank)) is not None and pair.header_digest(step) is not None
            )

    def _pair(self, rank: Rank) -> SlotPair | None:
        return self._own.get(rank) or self._mirrored.get(rank)

    def _drop_holdings(self, rank: Rank) -> None:
        for key in [key for key in self._holdings if key[0] == rank]:
            del self._holdings[key]

    def drop_newer(self, rank: Rank, step: Step) -> None:
        """A swap rolls back to `step`: forgets later holdings and records; own slots are left to the worker."""
        with self._lock:
            for held_rank, held_step in list(self._holdings):
                if held_rank == rank and held_step > step:
                    del self._holdings[held_rank, held_step]
            self._truncate(rank, step)

    def release(self, rank: Rank) -> None:
        """Frees everything held for a rank that is neither run nor mirrored here any more."""
        with self._lock:
            self._drop_holdings(rank)
            self._sums.forget(rank)
            self._forget_records(rank)
            pairs = [pair for pair in (self._own.pop(rank, None), self._mirrored.pop(rank, None)) if pair is not None]
        free(pairs)

    def readable(self, rank: Rank, step: Step, *, payload: bool) -> Snapshot:
        """Snapshot (rank, step), its payload only if asked. Raises: NotHeld."""
        with self._lock:
            holding = self._holdings.get((rank, step))
            pair = self._pair(rank)
            sealed = pair.sealed(step) if pair is not None else None
            if holding is None or pair is None or sealed is None or (payload and not holding.payload):
                what = "payload" if payload else "header"
                raise NotHeld(f"the {what} of rank {rank}, step {step} is not held here; held: {self.holdings()}")
            size = sealed.header.payload_bytes if payload else 0
            return Snapshot(pair, *sealed, pair.payload(step)[:size])

    # ---- payloads at rest

    def on_corrupt(self, tell: Callable[[Rank, Step], None]) -> None:
        """`tell(rank, step)` for every snapshot found corrupt, which is no holding any more. Thread: any."""
        self._on_corrupt.append(tell)

    def check_read(self, read: Snapshot, sums: Sums) -> None:
        """All of `read` has been read by now, and its payload gave `sums`: it must have been as it was staged.

        What is corrupt is told and no holding any more.

        Raises: NotHeld if it was overwritten meanwhile; CorruptSnapshot.
        """
        rank, step = read.header.rank, read.header.step
        if read.pair.header_digest(step) != read.digest:
            raise NotHeld(f"the snapshot of rank {rank}, step {step} was overwritten while it was read")
        try:
            with self._lock:
                if sums:
                    self._sums.check(rank, step, read.digest, sums)
        except CorruptSnapshot:
            with self._lock:
                self._holdings.pop((rank, step), None)
            for tell in self._on_corrupt:
                tell(rank, step)
            raise


def free(pairs: list[SlotPair]) -> None:
    """Closes slots nobody uses any more; large ones, which take about 0.1 s per GiB, on a thread of their own."""
    if sum(arena_bytes(pair.header_bytes, pair.payload_bytes) for pair in pairs) <= SMALL_BYTES:
        close(pairs)
    else:
        threading.Thread(target=close, args=(pairs,), name="deadpool-free", daemon=True).start()


def close(pairs: list[SlotPair]) -> None:
    for pair in pairs:
        pair.close()
