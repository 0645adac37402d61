"""The store of this node: its own ranks' slots, other ranks' mirrors, recordings, histories; and the generation fence.

Rules of this file: the agent's event loop and the bulk threads share it, every public method may be called from any
thread. How slots come to hold something is here; that it is held, whole and readable, is in holdings.py, what belongs
to a rank beside snapshots in records.py. One writer at a time per mirrored rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import xxhash

from ..core.types import Generation, Holding, Rank, Step
from ..errors import TransportError
from .arena import TOUCH_BYTES, SlotPair, arena_bytes, decode_header
from .holdings import Holdings, close, free
from .integrity import Sums
from .memory import check_memory

WRITER_TIMEOUT_S = 10.0


@dataclass(eq=False)
class _Making:
    """Slots that are being made. `untouched_bytes`: what they have not taken yet of what is available."""

    rank: Rank
    untouched_bytes: int


class SnapshotStore(Holdings):
    """See the module.

    Args:
        history_limit_bytes: per rank.
        headroom_bytes: host memory that new slots must leave free.
    """

    def __init__(self, history_limit_bytes: int = 256 << 20, headroom_bytes: int = 0) -> None:
        super().__init__(history_limit_bytes)
        self._headroom_bytes = headroom_bytes
        self._prepared: dict[Rank, SlotPair] = {}
        self._writers: dict[Rank, threading.Lock] = {}
        self._makers: dict[Rank, threading.Lock] = {}
        self._in_making: list[_Making] = []
        self._asking = threading.Lock()

    def has_slots(self, rank: Rank) -> bool:
        """Return whether slots of `rank` are here or being made: available memory is less by (some of) them already."""
        in_making = [making.rank for making in tuple(self._in_making)]
        return any(rank in slots for slots in (in_making, self._own, self._mirrored, self._prepared))

    def check_memory(self, need_bytes: int) -> None:
        """Check that so much can be had beside what is being made. Raises: MemoryShortage."""
        untouched = sum(making.untouched_bytes for making in tuple(self._in_making))
        check_memory(need_bytes + untouched, self._headroom_bytes)

    def _make(
        self, rank: Rank, header_bytes: int, payload_bytes: int, going_on: Callable[[], None] = lambda: None
    ) -> SlotPair:
        """New slots. Raises: MemoryShortage, what `going_on` raises. Blocks: about 0.6 s per GiB."""
        making = _Making(rank, arena_bytes(header_bytes, payload_bytes))

        def touched() -> None:
            making.untouched_bytes = max(0, making.untouched_bytes - TOUCH_BYTES)
            going_on()

        with self._asking:  # many ask at the same moment, when nobody has taken anything yet
            self.check_memory(making.untouched_bytes)
            self._in_making.append(making)
        try:
            return SlotPair.create(rank, header_bytes, payload_bytes, touched)
        finally:
            self._in_making.remove(making)

    # ---- own slots

    def create_own(
        self, rank: Rank, header_bytes: int, payload_bytes: int, going_on: Callable[[], None] = lambda: None
    ) -> SlotPair:
        """New slots for a rank that runs on this node; its descriptor goes to the worker. They replace what was held.

        Args: going_on: as for `make_own`.
        Raises: MemoryShortage. Blocks: about 0.6 s per GiB.
        """
        pair = self.make_own(rank, header_bytes, payload_bytes, going_on)
        with self._lock:
            old = self._become_own(pair)
        close(old)
        return pair

    def make_own(
        self, rank: Rank, header_bytes: int, payload_bytes: int, going_on: Callable[[], None] = lambda: None
    ) -> SlotPair:
        """Slots for `adopt_own`: the prepared ones, also if they are still being made, or new ones. They belong to
        the caller until it has them adopted, or puts them back.

        Args: going_on: called again and again while new ones are made; what it raises ends that.
        Raises: MemoryShortage. Blocks: about 0.6 s per GiB.
        """
        with self._maker(rank):
            return self._take_prepared(rank, header_bytes, payload_bytes) or self._make(
                rank, header_bytes, payload_bytes, going_on
            )

    def _maker(self, rank: Rank) -> threading.Lock:
        """The lock for making own slots of `rank`: two makers would take their memory twice."""
        with self._lock:
            return self._makers.setdefault(rank, threading.Lock())

    def adopt_own(self, pair: SlotPair, step: Step, generation: Generation, replicas: tuple[Rank, ...]) -> Holding:
        """Slots with `step` in them become their rank's own. At every moment either they or the mirror they
        replace is held.

        Raises: StaleGeneration; TransportError if they do not hold it. Nothing has changed then.
        """
        with self._lock:
            self.check_generation(generation)
            if (header := pair.open(step)) is None:
                raise TransportError(f"these slots of rank {pair.rank} do not hold step {step}")
            old = self._become_own(pair)
            holding = self._hold(Holding(pair.rank, step, True, replicas, header.paired))
        close(old)
        return holding

    def _become_own(self, pair: SlotPair) -> list[SlotPair]:
        """The caller has the lock. Returns: what it replaces."""
        rank = pair.rank
        self._drop_holdings(rank)
        self._sums.forget(rank)
        old = [self._own.get(rank), self._mirrored.pop(rank, None)]
        self._own[rank] = pair
        return [replaced for replaced in old if replaced is not None]

    def prepare_own(self, rank: Rank, header_bytes: int, payload_bytes: int) -> None:
        """Slots for a rank this node may take over, made now because the first touch takes long. Nothing is held yet.

        Raises: MemoryShortage. Blocks: about 0.6 s per GiB.
        """
        with self._maker(rank):
            self.put_back(self._make(rank, header_bytes, payload_bytes))

    def put_back(self, pair: SlotPair) -> None:
        """Slots of the caller's that hold nothing: for whoever makes own ones next, unless their rank has some."""
        with self._lock:
            unused = pair if pair.rank in self._own else self._prepared.get(pair.rank)
            if unused is not pair:
                self._prepared[pair.rank] = pair
        if unused is not None:
            free([unused])

    def _take_prepared(self, rank: Rank, header_bytes: int, payload_bytes: int) -> SlotPair | None:
        with self._lock:
            pair = self._prepared.pop(rank, None)
        if pair is not None and (pair.header_bytes, pair.payload_bytes) != (header_bytes, payload_bytes):
            pair.close()
            return None
        return pair

    def drop_prepared(self, kept: Collection[Rank] = ()) -> None:
        """Frees the prepared slots of all ranks but those."""
        with self._lock:
            unused = [self._prepared.pop(rank) for rank in list(self._prepared) if rank not in kept]
        free(unused)

    # ---- mirrors (bulk server)

    @contextmanager
    def writing(self, rank: Rank, timeout_s: float = WRITER_TIMEOUT_S) -> Iterator[None]:
        """Excludes other writers of the rank's mirror. Raises: TransportError if one does not end in time."""
        with self._lock:
            writer = self._writers.setdefault(rank, threading.Lock())
        if not writer.acquire(timeout=timeout_s):
            raise TransportError(f"another transfer of rank {rank} still runs after {timeout_s:g} s")
        try:
            yield
        finally:
            writer.release()

    def begin_mirror(
        self,
        rank: Rank,
        step: Step,
        generation: Generation,
        header_bytes: int,
        payload_bytes: int,
        going_on: Callable[[], None] = lambda: None,
    ) -> SlotPair:
        """Slots of at least this size, the one of `step` emptied; the caller is `writing`.

        Args: going_on: called again and again while slots are made; what it raises ends that.
        Raises: StaleGeneration, MemoryShortage; TransportError for a rank of this node.
        Blocks: for the first touch when slots are made.
        """
        with self._lock:
            self._check_mirror(rank, generation)
            pair = self._mirrored.get(rank)
            if pair is not None and pair.payload_bytes >= payload_bytes and pair.header_bytes >= header_bytes:
                self._empty(pair, step)
                return pair
        pair = self._make(rank, header_bytes, payload_bytes, going_on)
        unused: SlotPair | None = pair
        try:
            with self._lock:
                self._check_mirror(rank, generation)
                unused = self._replace_mirror(pair)
                self._empty(pair, step)
        finally:
            if unused is not None:
                free([unused])
        return pair

    def _check_mirror(self, rank: Rank, generation: Generation) -> None:
        self.check_generation(generation)
        if rank in self._own:
            raise TransportError(f"rank {rank} runs on this node, which cannot be its mirror")

    def _empty(self, pair: SlotPair, step: Step) -> None:
        """The caller has the lock."""
        for held in [key for key in self._holdings if key[0] == pair.rank and key[1] % 2 == step % 2]:
            del self._holdings[held]
        pair.invalidate(step)

    def _replace_mirror(self, new: SlotPair) -> SlotPair | None:
        """Headers move into the larger slots; a payload is worth nothing there once its size has changed.

        The caller has the lock. Returns: what it replaces.
        """
        old = self._mirrored.get(new.rank)
        for key, holding in [item for item in self._holdings.items() if item[0][0] == new.rank]:
            sealed = old.sealed(holding.step) if old is not None else None
            if sealed is None or holding.payload:
                del self._holdings[key]
            else:
                new.seal_encoded(holding.step, sealed.encoded)
        self._mirrored[new.rank] = new
        return old

    def finish_mirror(
        self,
        pair: SlotPair,
        encoded: bytes,
        generation: Generation,
        holding: Holding,
        records: list[bytes],
        sums: Sums = (),
    ) -> Holding:
        """Seals the slot with the encoded header, lists the holding, and appends call records that end at its step.

        Args:
            sums: checksums of the payload's frames as it arrived, empty where only the header is held.

        Returns: the holding, with what the header says of the rank's collectives.
        Raises: StaleGeneration; TransportError if the header is another snapshot's, or the rank was released.
        """
        header, rank, step = decode_header(encoded), holding.rank, holding.step
        if (header.rank, header.step) != (rank, step):
            raise TransportError(f"the header of rank {header.rank}, step {header.step}", f"rank {rank}, step {step}")
        holding = msgspec.structs.replace(holding, paired=header.paired)
        with self._lock:
            self.check_generation(generation)
            if self._mirrored.get(rank) is not pair:
                raise TransportError(f"the mirror of rank {rank} was released while step {step} arrived")
            pair.seal_encoded(step, encoded)
            self._hold(holding)
            self._sums.put(rank, step, xxhash.xxh3_64_intdigest(encoded), sums)
            for past, record in enumerate(records, step - len(records) + 1):
                self._history(rank).append(past, record)
        return holding

    def already_mirrored(self, rank: Rank, step: Step, digest: int, payload: bool) -> Holding | None:
        """The holding, if just this snapshot (by its header's digest) is mirrored here already."""
        with self._lock:
            holding, pair = self._holdings.get((rank, step)), self._mirrored.get(rank)
            if holding is None or pair is None or (payload and not holding.payload):
                return None
            if pair.header_digest(step) != digest:
                return None
            return holding
