"""One simulated node's memory: arenas of its own ranks, mirrors of others, recordings, and the generation fence.

Rules of this file: the contract of mirror/store.py with toy snapshots: two slots a rank, a slot is emptied before its
first new byte and sealed after the last, nothing of an older generation than the fence is sealed or listed
(NO_STALE_WRITE), what is read out of it is compared with its checksum. `changed(rank, step)` hears of every change of
what can be served, so that the checkers need not look everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ..core.types import Generation, Holding, Rank, Step
from ..transport.calls import area_bytes
from .training import State, restored


class Refused(Exception):
    """A node says no, and why: not held, corrupt, or of an older generation. Trying again does not help."""


class Stale(Refused):
    """A write of a generation that is over there, or has not begun."""


class Snapshot(msgspec.Struct, frozen=True):
    """A sealed slot; `payload` is None where only the header is held. `sum` is that of the bytes that were staged."""

    rank: Rank
    step: Step
    generation: Generation
    header: bytes
    payload: bytes | None
    sum: int
    paired: int = 0
    """Digest of the rank's collectives up to the step."""

    @property
    def is_whole(self) -> bool:
        return self.payload is None or zlib.crc32(self.payload) == self.sum

    @property
    def state(self) -> State | None:
        """None if header and payload do not belong together."""
        return restored(self.payload, self.header) if self.payload is not None else None


def sealed(rank: Rank, step: Step, generation: Generation, state: State, paired: int = 0) -> Snapshot:
    payload = state.payload
    return Snapshot(rank, step, generation, state.header, payload, zlib.crc32(payload), paired)


@dataclass
class Pair:
    """A rank's two slots, and what it issues in its one group; its worker and the agent share it."""

    slots: list[Snapshot | None] = field(default_factory=lambda: [None, None])
    calls: memoryview = field(default_factory=lambda: memoryview(bytearray(area_bytes(groups=1))))

    def get(self, step: Step) -> Snapshot | None:
        found = self.slots[step % 2]
        return found if found is not None and found.step == step else None


class Store:
    """See the module. `records[rank]` is the newest step whose call records are held."""

    def __init__(self, changed: Callable[[Rank, Step], None]) -> None:
        self.fence: Generation = 0
        self.entered: Generation = 0
        """The newest generation in which others may mirror here."""
        self.own: dict[Rank, Pair] = {}
        self.mirrored: dict[Rank, Pair] = {}
        self.recordings: set[Rank] = set()
        self.listed: dict[tuple[Rank, Step], Holding] = {}
        self.writers: dict[Rank, object] = {}
        """The writer that is just writing a rank's mirror."""
        self._changed = changed

    def check(self, generation: Generation) -> None:
        if generation < self.fence:
            raise Stale(f"a write of generation {generation}, the fence is at {self.fence}")

    def pair(self, rank: Rank) -> Pair | None:
        return self.own.get(rank) or self.mirrored.get(rank)

    # -- slots -------------------------------------------------------------------------------------------------

    def empty(self, pair: Pair, rank: Rank, step: Step) -> None:
        """The slot of `step` is about to be written."""
        old = pair.slots[step % 2]
        pair.slots[step % 2] = None
        if old is not None:
            self._changed(rank, old.step)

    def seal(self, pair: Pair, snapshot: Snapshot) -> None:
        pair.slots[snapshot.step % 2] = snapshot
        self._changed(snapshot.rank, snapshot.step)

    def create_own(self, rank: Rank) -> Pair:
        """New slots for a rank that begins its script here; they replace what was held."""
        self._unlist(rank)
        self.mirrored.pop(rank, None)
        self.own[rank] = pair = Pair()
        return pair

    def adopt_own(self, pair: Pair, rank: Rank, step: Step, generation: Generation, replicas: tuple[Rank, ...]) -> None:
        """Slots with `step` in them become the rank's own. At no time is neither they nor a mirror held."""
        self.check(generation)
        if (held := pair.get(step)) is None:
            raise Refused(f"these slots of rank {rank} do not hold step {step}")
        self.mirrored.pop(rank, None)
        self.own[rank] = pair
        self._list(Holding(rank, step, True, replicas, held.paired))
        for key in [key for key in self.listed if key[0] == rank and key[1] != step]:
            del self.listed[key]
            self._changed(*key)

    def staged(self, rank: Rank, step: Step, generation: Generation, replicas: tuple[Rank, ...]) -> Holding:
        """The own slot of `step` was sealed."""
        self.check(generation)
        pair = self.own.get(rank)
        if pair is None or (held := pair.get(step)) is None:
            raise Refused(f"rank {rank} says it staged step {step}, but its slot does not hold it")
        return self._list(Holding(rank, step, True, replicas, held.paired))

    def begin_mirror(self, rank: Rank, step: Step, generation: Generation) -> Pair:
        self.check(generation)
        if rank in self.own:
            raise Refused(f"rank {rank} runs on this node, which cannot be its mirror")
        pair = self.mirrored.setdefault(rank, Pair())
        for key in [key for key in self.listed if key[0] == rank and key[1] % 2 == step % 2]:
            del self.listed[key]
        self.empty(pair, rank, step)
        return pair

    def finish_mirror(self, pair: Pair, snapshot: Snapshot, holding: Holding) -> None:
        self.check(snapshot.generation)
        if self.mirrored.get(snapshot.rank) is not pair:
            raise Refused(f"the mirror of rank {snapshot.rank} was released while step {snapshot.step} arrived")
        self._list(holding)
        self.seal(pair, snapshot)

    def already_mirrored(self, snapshot: Snapshot) -> Holding | None:
        """The holding, if just this snapshot is mirrored here already."""
        holding = self.listed.get((snapshot.rank, snapshot.step))
        pair = self.mirrored.get(snapshot.rank)
        there = pair.get(snapshot.step) if pair is not None else None
        if holding is None or there is None or (snapshot.payload is not None and not holding.payload):
            return None
        same = (there.header, there.sum, there.paired) == (snapshot.header, snapshot.sum, snapshot.paired)
        return holding if same else None

    def _list(self, holding: Holding) -> Holding:
        for rank, step in list(self.listed):
            if rank == holding.rank and (step < holding.step - 1 or step % 2 == holding.step % 2):
                del self.listed[rank, step]
        self.listed[holding.rank, holding.step] = holding
        self._changed(holding.rank, holding.step)
        return holding

    def _unlist(self, rank: Rank) -> None:
        for key in [key for key in self.listed if key[0] == rank]:
            del self.listed[key]
            self._changed(*key)

    # -- reading -----------------------------------------------------------------------------------------------

    def readable(self, rank: Rank, step: Step, payload: bool) -> Snapshot:
        """Raises: Refused if (rank, step) is not held."""
        holding, pair = self.listed.get((rank, step)), self.pair(rank)
        found = pair.get(step) if pair is not None else None
        if holding is None or found is None or (payload and not holding.payload):
            raise Refused(f"the {'payload' if payload else 'header'} of rank {rank}, step {step} is not held")
        return found

    def forget_corrupt(self, rank: Rank, step: Step) -> None:
        if self.listed.pop((rank, step), None) is not None:
            self._changed(rank, step)

    def corrupt(self, rank: Rank, step: Step) -> bool:
        """Flip a bit of that payload; False if there is none."""
        pair = self.pair(rank)
        found = pair.get(step) if pair is not None else None
        if pair is None or found is None or found.payload is None:
            return False
        damaged = bytes([found.payload[0] ^ 1]) + found.payload[1:]
        pair.slots[step % 2] = msgspec.structs.replace(found, payload=damaged)
        self._changed(rank, step)
        return True

    # -- swaps -------------------------------------------------------------------------------------------------

    def drop_newer(self, rank: Rank, step: Step) -> None:
        """A swap rolls back to `step`; own slots are left to the worker."""
        for key in [key for key in self.listed if key[0] == rank and key[1] > step]:
            del self.listed[key]
            self._changed(*key)

    def holds(self, rank: Rank) -> bool:
        return rank in self.own or rank in self.mirrored or rank in self.recordings

    def release(self, rank: Rank) -> None:
        """Nothing of `rank` is kept here any more."""
        self._unlist(rank)
        self.own.pop(rank, None)
        self.mirrored.pop(rank, None)
        self.recordings.discard(rank)
