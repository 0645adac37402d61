"""Checksums of payloads at rest: what their frames had when first sent or received, compared at every later read.

Rules of this file: they cost nothing in training, because transfers compute them anyway (wire.py); a rank has two, as
it has two slots; they belong to one header (by its digest), so a slot that is written anew begins anew.
"""

from __future__ import annotations

import os

import xxhash

from ..core.types import Digest, Rank, Step
from ..errors import DeadpoolError

FRAME_BYTES = 4 << 20
Sums = tuple[Digest, ...]
"""xxh3 of every frame of a payload, in order; none where only the header is held."""


class CorruptSnapshot(DeadpoolError):
    """A payload in this node's memory is not what was written there."""


def frame_sums(payload: memoryview) -> Sums:
    """Blocks: about 0.05 s per GB."""
    offsets = range(0, len(payload), FRAME_BYTES)
    return tuple(xxhash.xxh3_64_intdigest(payload[offset : offset + FRAME_BYTES]) for offset in offsets)


class Checksums:
    """Thread: no locking."""

    def __init__(self) -> None:
        self._known: dict[tuple[Rank, int], tuple[int, Sums]] = {}

    def put(self, rank: Rank, step: Step, header_digest: int, sums: Sums) -> None:
        self._known[rank, step % 2] = (header_digest, sums)

    def forget(self, rank: Rank) -> None:
        for slot in (0, 1):
            self._known.pop((rank, slot), None)

    def check(self, rank: Rank, step: Step, header_digest: int, sums: Sums) -> None:
        """The payload under this header has just been read and gave `sums`: compare, or remember the first.

        Raises: CorruptSnapshot.
        """
        known, before = self._known.get((rank, step % 2), (0, ()))
        if known != header_digest or not before:
            self.put(rank, step, header_digest, sums)
            return
        wrong = [at for at, (was, now) in enumerate(zip(before, sums, strict=True)) if was != now]
        if wrong:
            raise CorruptSnapshot(
                f"rank {rank}'s snapshot of step {step}, held on {os.uname().nodename}, has changed in memory: "
                f"{len(wrong)} of {len(sums)} frames fail their checksum, the first is frame {wrong[0]}",
                "the bytes that were staged",
                "it is not used; suspect that host's memory, or a process that writes where it must not",
            )
