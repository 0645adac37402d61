"""What this node holds: its own ranks' slots, other ranks' mirrors, recordings, histories; and the generation fence.

Rules of this file: the agent's event loop and the bulk threads share it, every public method may be called from any
thread. A holding is listed only while its slot is sealed and verified; one whose payload is found changed since it was
sent or received is none any more. A write of an older generation than the fence never becomes a holding
(NO_STALE_WRITE). One writer at a time per mirrored rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import xxhash

from ..core.types import Generation, Holding, Rank, Step
from ..errors import DeadpoolError, StaleGeneration, TransportError
from .arena import SlotPair, arena_bytes, decode_header
from .history import History
from .integrity import Checksums, CorruptSnapshot, Sums, frame_sums
from .memory import check_memory

WRITER_TIMEOUT_S = 10.0


SMALL_BYTES = 64 << 20


class NotHeld(DeadpoolError):
    """This node does not hold what somebody asked it for."""


class SnapshotStore:
    """See the module.

    Args:
        history_limit_bytes: per rank.
        headroom_bytes: host memory that new mirrors must leave free.
    """

    def __init__(self, history_limit_bytes: int = 256 << 20, headroom_bytes: int = 0) -> None:
        self._history_limit_bytes = history_limit_bytes
        self._headroom_bytes = headroom_bytes
        self._lock = threading.RLock()
        self._own: dict[Rank, SlotPair] = {}
        self._mirrored: dict[Rank, SlotPair] = {}
        self._prepared: dict[Rank, SlotPair] = {}
        self._writers: dict[Rank, threading.Lock] = {}
        self._holdings: dict[tuple[Rank, Step], Holding] = {}
        self._recordings: dict[Rank, bytes] = {}
        self._histories: dict[Rank, History] = {}
        self._generation: Generation = 0
        self._on_fence: list[Callable[[Generation], None]] = []
        self._sums = Checksums()
        self._on_corrupt: list[Callable[[Rank, Step], None]] = []

    # ---- the fence

    @property
    def generation(self) -> Generation:
        """The oldest generation whose writes are accepted."""
        return self._generation

    def fence(self, generation: Generation) -> None:
        """From now on writes of generations before `generation` are refused; transfers of them are cut."""
        with self._lock:
            if generation <= self._generation:
                return
            self._generation = generation
        for tell in list(self._on_fence):
            tell(generation)

    def on_fence(self, tell: Callable[[Generation], None]) -> None:
        self._on_fence.append(tell)

    def check_generation(self, generation: Generation) -> None:
        """Raises: StaleGeneration if `generation` is over."""
        if generation < self._generation:
            raise StaleGeneration(f"a write of generation {generation}", f"generation {self._generation} or newer")

    # ---- slots and holdings

    def create_own(self, rank: Rank, header_bytes: int, payload_bytes: int) -> SlotPair:
        """New slots for a rank that runs on this node; its descriptor goes to the worker. They replace what was held.

        Raises: MemoryShortage. Blocks: about 0.6 s per GiB.
        """
        pair = self.make_own(rank, header_bytes, payload_bytes)
        with self._lock:
            old = self._become_own(pair)
        _close(old)
        return pair

    def make_own(self, rank: Rank, header_bytes: int, payload_bytes: int) -> SlotPair:
        """Slots for `adopt_own`: the prepared ones, or new ones. They are the caller's until then.

        Raises: MemoryShortage. Blocks: about 0.6 s per GiB.
        """
        pair = self._take_prepared(rank, header_bytes, payload_bytes)
        if pair is None:
            check_memory(arena_bytes(header_bytes, payload_bytes), self._headroom_bytes)
            pair = SlotPair.create(rank, header_bytes, payload_bytes)
        return pair

    def adopt_own(self, pair: SlotPair, step: Step, generation: Generation, replicas: tuple[Rank, ...]) -> Holding:
        """Slots with `step` in them become their rank's own. At no time is neither they nor a mirror held.

        Raises: StaleGeneration; TransportError if they do not hold it. Nothing has changed then.
        """
        with self._lock:
            self.check_generation(generation)
            if pair.open(step) is None:
                raise TransportError(f"these slots of rank {pair.rank} do not hold step {step}")
            old = self._become_own(pair)
            holding = self._hold(Holding(pair.rank, step, True, replicas))
        _close(old)
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
        check_memory(arena_bytes(header_bytes, payload_bytes), self._headroom_bytes)
        pair = SlotPair.create(rank, header_bytes, payload_bytes)
        with self._lock:
            unused = pair if rank in self._own else self._prepared.get(rank)
            if unused is not pair:
                self._prepared[rank] = pair
        if unused is not None:
            unused.close()

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
        _free(unused)

    def owns(self, rank: Rank, step: Step) -> bool:
        """Whether (rank, step) is held in own slots (and not, so far, as a mirror)."""
        return rank in self._own and (rank, step) in self._holdings

    def own(self, rank: Rank) -> SlotPair | None:
        return self._own.get(rank)

    def mirrored(self, rank: Rank) -> SlotPair | None:
        return self._mirrored.get(rank)

    def staged(self, rank: Rank, step: Step, generation: Generation, replicas: tuple[Rank, ...]) -> Holding:
        """Takes note that the own rank's slot of `step` was sealed (by its worker, or after a fetch).

        Raises: StaleGeneration; TransportError if the slot does not hold it.
        """
        with self._lock:
            self.check_generation(generation)
            pair = self._own.get(rank)
            if pair is None or pair.open(step) is None:
                raise TransportError(f"rank {rank} says it staged step {step}, but its slot does not hold it")
            return self._hold(Holding(rank, step, True, replicas))

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
            if rank in self._histories:
                self._histories[rank].truncate(step)

    def release(self, rank: Rank) -> None:
        """Frees everything held for a rank that is neither run nor mirrored here any more."""
        with self._lock:
            self._drop_holdings(rank)
            self._sums.forget(rank)
            self._recordings.pop(rank, None)
            self._histories.pop(rank, None)
            pairs = [pair for pair in (self._own.pop(rank, None), self._mirrored.pop(rank, None)) if pair is not None]
        _free(pairs)

    def readable(self, rank: Rank, step: Step, *, payload: bool) -> tuple[SlotPair, Holding]:
        """The slots that hold (rank, step). Raises: NotHeld."""
        with self._lock:
            holding = self._holdings.get((rank, step))
            pair = self._pair(rank)
            if holding is None or pair is None or pair.header_digest(step) is None or (payload and not holding.payload):
                what = "payload" if payload else "header"
                raise NotHeld(f"the {what} of rank {rank}, step {step} is not held here; held: {self.holdings()}")
            return pair, holding

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
        self, rank: Rank, step: Step, generation: Generation, header_bytes: int, payload_bytes: int
    ) -> SlotPair:
        """Slots of at least this size, the one of `step` emptied; the caller is `writing`.

        Raises: StaleGeneration, MemoryShortage; TransportError for a rank of this node.
        Blocks: for the first touch when slots are made.
        """
        with self._lock:
            self.check_generation(generation)
            if rank in self._own:
                raise TransportError(f"rank {rank} runs on this node, which cannot be its mirror")
            old = self._mirrored.get(rank)
        if old is None or old.payload_bytes < payload_bytes or old.header_bytes < header_bytes:
            check_memory(arena_bytes(header_bytes, payload_bytes), self._headroom_bytes)
            pair = SlotPair.create(rank, header_bytes, payload_bytes)
            self._replace_mirror(rank, old, pair)
        else:
            pair = old
        with self._lock:
            self.check_generation(generation)
            for held in [key for key in self._holdings if key[0] == rank and key[1] % 2 == step % 2]:
                del self._holdings[held]
            pair.invalidate(step)
        return pair

    def _replace_mirror(self, rank: Rank, old: SlotPair | None, new: SlotPair) -> None:
        """Headers move into the larger slots; a payload is worth nothing there once its size has changed."""
        with self._lock:
            for key, holding in [item for item in self._holdings.items() if item[0][0] == rank and old is not None]:
                encoded = old.encoded_header(holding.step) if old is not None else None
                if encoded is None or holding.payload:
                    del self._holdings[key]
                else:
                    new.seal_encoded(holding.step, encoded)
            self._mirrored[rank] = new

    def finish_mirror(
        self,
        pair: SlotPair,
        encoded: bytes,
        generation: Generation,
        holding: Holding,
        records: list[bytes],
        sums: Sums = (),
    ) -> None:
        """Seals the slot with the encoded header, lists the holding, and appends call records that end at its step.

        Args:
            sums: checksums of the payload's frames as it arrived, empty where only the header is held.

        Raises: StaleGeneration; TransportError if the header is another snapshot's, or the rank was released.
        """
        header, rank, step = decode_header(encoded), holding.rank, holding.step
        if (header.rank, header.step) != (rank, step):
            raise TransportError(f"the header of rank {header.rank}, step {header.step}", f"rank {rank}, step {step}")
        with self._lock:
            self.check_generation(generation)
            if self._mirrored.get(rank) is not pair:
                raise TransportError(f"the mirror of rank {rank} was released while step {step} arrived")
            pair.seal_encoded(step, encoded)
            self._hold(holding)
            self._sums.put(rank, step, xxhash.xxh3_64_intdigest(encoded), sums)
            for past, record in enumerate(records, step - len(records) + 1):
                self._history(rank).append(past, record)

    def already_mirrored(self, rank: Rank, step: Step, digest: int, payload: bool) -> Holding | None:
        """The holding, if just this snapshot (by its header's digest) is mirrored here already."""
        with self._lock:
            holding, pair = self._holdings.get((rank, step)), self._mirrored.get(rank)
            if holding is None or pair is None or (payload and not holding.payload):
                return None
            if pair.header_digest(step) != digest:
                return None
            return holding

    # ---- payloads at rest

    def on_corrupt(self, tell: Callable[[Rank, Step], None]) -> None:
        """`tell(rank, step)` for every snapshot found corrupt, which is no holding any more. Thread: any."""
        self._on_corrupt.append(tell)

    def check_sums(self, rank: Rank, step: Step, header_digest: int, sums: Sums) -> None:
        """As `Checksums.check`; what is corrupt is told and no holding any more. Raises: CorruptSnapshot."""
        try:
            with self._lock:
                self._sums.check(rank, step, header_digest, sums)
        except CorruptSnapshot:
            with self._lock:
                self._holdings.pop((rank, step), None)
            for tell in self._on_corrupt:
                tell(rank, step)
            raise

    def verify(self, rank: Rank, step: Step) -> None:
        """Read the payload of (rank, step) as it lies here and compare it with what was sent or received of it.

        Raises: CorruptSnapshot, NotHeld. Blocks: about 0.05 s per GB; call it in a thread.
        """
        pair, _ = self.readable(rank, step, payload=True)
        digest, sums = pair.header_digest(step), frame_sums(pair.payload(step))
        if digest is None or pair.header_digest(step) != digest:
            raise NotHeld(f"rank {rank}'s slot of step {step} was overwritten while it was verified")
        self.check_sums(rank, step, digest, sums)

    # ---- recordings and histories

    def put_recording(self, rank: Rank, recording: bytes, generation: Generation | None = None) -> None:
        """Args: generation: the one another node sends it in. Raises: StaleGeneration if that is over."""
        with self._lock:
            if generation is not None:
                self.check_generation(generation)
            self._recordings[rank] = recording

    def get_recording(self, rank: Rank) -> bytes:
        """Raises: NotHeld."""
        with self._lock:
            if rank not in self._recordings:
                raise NotHeld(f"no recording of rank {rank} is held here; held: {sorted(self._recordings)}")
            return self._recordings[rank]

    def has_recording(self, rank: Rank) -> bool:
        return rank in self._recordings

    def holds(self, rank: Rank) -> bool:
        """Whether slots or a recording of `rank` take memory here."""
        return rank in self._own or rank in self._mirrored or rank in self._recordings

    def ranks(self) -> list[Rank]:
        """Every rank of which anything is here: few, however many ranks the job has."""
        with self._lock:
            return sorted({*self._own, *self._mirrored, *self._recordings, *self._histories})

    def _history(self, rank: Rank) -> History:
        return self._histories.setdefault(rank, History(self._history_limit_bytes))

    def append(self, rank: Rank, step: Step, records: bytes) -> None:
        """Sets the call records of `step`; those of later steps are forgotten."""
        with self._lock:
            self._history(rank).append(step, records)

    def get(self, rank: Rank, first: Step, last: Step) -> list[bytes]:
        """The records of first..last. Raises: HistoryPruned."""
        with self._lock:
            return self._history(rank).get(first, last)

    def history_range(self, rank: Rank) -> tuple[Step, Step]:
        """First and last step whose records are held (NO_STEP twice if none)."""
        with self._lock:
            history = self._history(rank)
            return history.first, history.last

    def close(self) -> None:
        """Frees all slots."""
        self.drop_prepared()
        for rank in {*self._own, *self._mirrored}:
            self.release(rank)


def _free(pairs: list[SlotPair]) -> None:
    """Closes slots nobody uses any more; large ones, which take about 0.1 s per GiB, on a thread of their own."""
    if sum(arena_bytes(pair.header_bytes, pair.payload_bytes) for pair in pairs) <= SMALL_BYTES:
        _close(pairs)
    else:
        threading.Thread(target=_close, args=(pairs,), name="deadpool-free", daemon=True).start()


def _close(pairs: list[SlotPair]) -> None:
    for pair in pairs:
        pair.close()
