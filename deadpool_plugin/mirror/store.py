"""The store of this node: its own ranks' slots, other ranks' mirrors, recordings and histories, behind one fence.

Rules of this file: the agent's event loop and the bulk threads share it; every public method may be called from any
thread. A holding is listed only while its slot is sealed, verified and unchanged. There is one writer at a time per
mirrored rank. Nothing of an older generation is written any more (NO_STALE_WRITE), and nothing of a newer one before
this node has rolled back to where that one begins; whoever writes checks it under the lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from os import uname

import xxhash

from ..core.types import NO_STEP, Generation, Holding, Rank, Step
from ..errors import DeadpoolError, StaleGeneration, TransportError
from .arena import GoingOn, SlotMaker, SlotPair, Snapshot, Sums, free, goes_on
from .records import KEPT_MIN, CallHistory, NotHeld

WRITER_TIMEOUT_S = 10.0


class NotEntered(DeadpoolError):
    """Another node mirrors in a generation that has not begun here; it is to try again."""


class CorruptSnapshot(DeadpoolError):
    """A payload in this node's memory is not what was written there."""


class SnapshotStore:
    """See the module. `history_limit_bytes`: per rank, of which the newest `history_kept` steps stay in any case.
    `headroom_bytes`: host memory that new slots must leave free."""

    def __init__(
        self, history_limit_bytes: int = 256 << 20, headroom_bytes: int = 0, history_kept: int = KEPT_MIN
    ) -> None:
        self.maker, self._history_limit = SlotMaker(headroom_bytes), (history_limit_bytes, history_kept)
        self.recordings: dict[Rank, bytes] = {}  # of the ranks' start-up collectives, for those who rehearse them
        self.histories: dict[Rank, CallHistory] = {}
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)
        self._generation: Generation = 0
        self._entered: Generation = 0
        self._on_fence: list[Callable[[Generation], None]] = []
        self._on_corrupt: list[Callable[[Rank, Step], None]] = []
        self._own: dict[Rank, SlotPair] = {}
        self._mirrored: dict[Rank, SlotPair] = {}
        self._prepared: dict[Rank, SlotPair] = {}
        self._holdings: dict[tuple[Rank, Step], Holding] = {}
        self._writers: dict[Rank, threading.Lock] = {}
        self._makers: dict[Rank, threading.Lock] = {}  # of own slots: two at a time would take their memory twice

    # ---- the generation fence

    @property
    def generation(self) -> Generation:
        """The oldest generation whose writes are accepted."""
        return self._generation

    def fence(self, generation: Generation) -> None:
        """Refuse writes of generations before `generation` from now on, and cut transfers of them."""
        with self._lock:
            if generation <= self._generation:
                return
            self._generation = generation
            self._moved.notify_all()
        for tell in list(self._on_fence):
            tell(generation)

    def on_fence(self, tell: Callable[[Generation], None]) -> None:
        self._on_fence.append(tell)

    def check_generation(self, generation: Generation) -> None:
        """Raises: StaleGeneration if `generation` is over."""
        if generation < self._generation:
            raise StaleGeneration(f"a write of generation {generation}", f"generation {self._generation} or newer")

    def enter(self, generation: Generation) -> None:
        """Let others mirror in `generation`; snapshots newer than its restore step were dropped before."""
        with self._lock:
            self._entered = max(self._entered, generation)
            self._moved.notify_all()

    def await_entry(self, generation: Generation, timeout_s: float) -> None:
        """Wait until others may mirror here in `generation`. Raises: StaleGeneration; NotEntered after `timeout_s`."""
        # They may have heard of the decision before this node.
        with self._lock:
            self._moved.wait_for(lambda: self._entered >= generation or self._generation > generation, timeout_s)
            self.check_generation(generation)
            if self._entered < generation:
                raise NotEntered(f"a write of generation {generation}", f"generation {self._entered}, as this node")

    def put_recording(self, rank: Rank, recording: bytes, generation: Generation) -> None:
        """Keep a recording that another node sends in `generation`. Raises: StaleGeneration if that is over."""
        with self._lock:
            self.check_generation(generation)
            self.recordings[rank] = recording

    # ---- what is held

    def own(self, rank: Rank) -> SlotPair | None:
        return self._own.get(rank)

    def owns(self, rank: Rank, step: Step) -> bool:
        """Return whether (rank, step) is held in own slots (and not, so far, as a mirror)."""
        return rank in self._own and (rank, step) in self._holdings

    def holds(self, rank: Rank) -> bool:
        """Return whether slots or a recording of `rank` take memory here."""
        return self._pair(rank) is not None or rank in self.recordings

    def ranks(self) -> list[Rank]:
        """List the ranks of which anything is here: few, however many ranks the job has."""
        with self._lock:
            recorded = {rank for rank, history in tuple(self.histories.items()) if history.last != NO_STEP}
            return sorted({*self._own, *self._mirrored, *self.recordings, *recorded})

    def recording(self, rank: Rank) -> bytes:
        """Raises: NotHeld."""
        if (recording := self.recordings.get(rank)) is None:
            raise NotHeld(f"no recording of rank {rank} is held here; held: {sorted(self.recordings)}")
        return recording

    def history(self, rank: Rank) -> CallHistory:
        if (history := self.histories.get(rank)) is None:
            history = self.histories.setdefault(rank, CallHistory(*self._history_limit))
        return history

    def _pair(self, rank: Rank) -> SlotPair | None:
        return self._own.get(rank) or self._mirrored.get(rank)

    def _sealed(self, rank: Rank, step: Step) -> Snapshot | None:
        pair = self._pair(rank)
        return pair.sealed(step) if pair is not None else None

    def announce(self, generation: Generation) -> None:
        """Let the processes of own slots see that `generation` begins, whatever else they hear."""
        with self._lock:
            for pair in self._own.values():
                pair.announce(generation)

    def paired(self, rank: Rank, step: Step) -> int:
        """Return the sum of the rank's collectives up to `step`, of its snapshot; 0 if that is not here."""
        with self._lock:
            snapshot = self._sealed(rank, step)
            return snapshot.header.paired if snapshot is not None else 0

    def holdings(self) -> tuple[Holding, ...]:
        """List what this node can serve; an own slot that its worker has begun to overwrite is left out."""
        with self._lock:
            return tuple(self._holdings[key] for key in sorted(self._holdings) if self._sealed(*key) is not None)

    def staged(self, rank: Rank, step: Step, generation: Generation, replicas: tuple[Rank, ...]) -> Holding:
        """List the sealed slot of an own rank. Raises: StaleGeneration; TransportError if it does not hold `step`."""
        with self._lock:
            self.check_generation(generation)
            snapshot = self._sealed(rank, step) if rank in self._own else None
            if snapshot is None:
                raise TransportError(f"rank {rank} says it staged step {step}, but its slot does not hold it")
            return self._hold(Holding(rank, step, True, replicas, snapshot.header.paired))

    def _hold(self, holding: Holding) -> Holding:
        self._forget(holding.rank, lambda step: self._sealed(holding.rank, step) is None)
        self._holdings[holding.rank, holding.step] = holding
        return holding

    def before(self, rank: Rank, step: Step) -> Step:
        """Return the newest step before `step` whose snapshot of `rank` is listed; NO_STEP if none is."""
        with self._lock:
            listed = [held for one, held in self._holdings if one == rank and held < step]
            return max((held for held in listed if self._sealed(rank, held) is not None), default=NO_STEP)

    def _forget(self, rank: Rank, which: Callable[[Step], bool]) -> None:
        for key in [key for key in self._holdings if key[0] == rank and which(key[1])]:
            del self._holdings[key]

    def drop_newer(self, rank: Rank, step: Step) -> None:
        """Roll back to `step`: forget later holdings and records; own slots are left to the worker."""
        with self._lock:
            self._forget(rank, lambda held: held > step)
            self.history(rank).truncate(step)

    def release(self, rank: Rank) -> None:
        """Free everything held for a rank that is neither run nor mirrored here any more."""
        with self._lock:
            self.recordings.pop(rank, None)
            self.histories.pop(rank, None)
            self._release_slots(rank)

    def _release_slots(self, rank: Rank) -> None:
        self._forget(rank, lambda step: True)
        free(self._own.pop(rank, None), self._mirrored.pop(rank, None))

    def readable(self, rank: Rank, step: Step, *, payload: bool) -> Snapshot:
        """Get snapshot (rank, step) to read it, its payload only if asked. Raises: NotHeld."""
        with self._lock:
            holding, snapshot = self._holdings.get((rank, step)), self._sealed(rank, step)
            if holding is None or snapshot is None or (payload and not holding.payload):
                what = "payload" if payload else "header"
                raise NotHeld(f"the {what} of rank {rank}, step {step} is not held here; held: {self.holdings()}")
            return snapshot if payload else snapshot._replace(payload=memoryview(b""))

    def on_corrupt(self, tell: Callable[[Rank, Step], None]) -> None:
        """Call `tell(rank, step)` for every snapshot found corrupt, which is no holding any more. Thread: any."""
        self._on_corrupt.append(tell)

    def check_read(self, read: Snapshot, sums: Sums) -> None:
        """Check that the payload of `read`, whose frames gave `sums`, is what was staged.

        The first checksums of a header are remembered. A corrupt snapshot is told of and no holding any more.
        Raises: NotHeld if it was overwritten meanwhile; CorruptSnapshot.
        """
        rank, step = read.header.rank, read.header.step
        now = read.pair.sealed(step)
        if now is None or now.digest != read.digest:
            raise NotHeld(f"the snapshot of rank {rank}, step {step} was overwritten while it was read")
        wrong: list[int] = []
        with self._lock:
            if sums:
                digest, before = read.pair.sums.get(read.slot, (0, ()))
                if digest != read.digest or not before:
                    read.pair.sums[read.slot] = (read.digest, sums)
                else:
                    wrong = [at for at, pair in enumerate(zip(before, sums, strict=True)) if pair[0] != pair[1]]
            if wrong:
                self._holdings.pop((rank, step), None)
        if wrong:
            for tell in self._on_corrupt:
                tell(rank, step)
            raise CorruptSnapshot(
                f"rank {rank}'s snapshot of step {step}, held on {uname().nodename}, has changed in memory: "
                f"{len(wrong)} of {len(sums)} frames fail their checksum, the first is frame {wrong[0]}",
                "the bytes that were staged",
                "it is not used; suspect that host's memory, or a process that writes where it must not",
            )

    # ---- own slots

    def has_slots(self, rank: Rank) -> bool:
        """Return whether slots of `rank` are here or being made: available memory is less by (some of) them already."""
        return self.maker.makes(rank) or any(rank in slots for slots in (self._own, self._mirrored, self._prepared))

    def create_own(self, rank: Rank, header_bytes: int, payload_bytes: int, going_on: GoingOn = goes_on) -> SlotPair:
        """Do `make_own` for a rank that runs on this node (its worker gets the descriptor). Replaces what was held."""
        pair = self.make_own(rank, header_bytes, payload_bytes, going_on)
        self._become_own(pair)
        return pair

    def make_own(self, rank: Rank, header_bytes: int, payload_bytes: int, going_on: GoingOn = goes_on) -> SlotPair:
        """Get slots, the caller's until it has them adopted or puts them back: prepared ones, or new ones.

        Raises: MemoryShortage, what `going_on` raises. Blocks: about 0.6 s per GiB; for those being prepared.
        """
        with self._makers.setdefault(rank, threading.Lock()):
            with self._lock:
                pair = self._prepared.pop(rank, None)
            if pair is not None:
                if (pair.header_bytes, pair.payload_bytes) == (header_bytes, payload_bytes):
                    return pair
                pair.close()
            return self.maker.make(rank, header_bytes, payload_bytes, going_on)

    def adopt_own(self, pair: SlotPair, step: Step, generation: Generation, replicas: tuple[Rank, ...]) -> Holding:
        """Make slots with `step` in them the own ones. Raises, changing nothing: StaleGeneration, TransportError."""
        with self._lock:  # at every moment they or the mirror they replace are held
            self.check_generation(generation)
            if (header := pair.open(step)) is None:
                raise TransportError(f"these slots of rank {pair.rank} do not hold step {step}")
            self._become_own(pair)
            return self._hold(Holding(pair.rank, step, True, replicas, header.paired))

    def _become_own(self, pair: SlotPair) -> None:
        with self._lock:
            self._release_slots(pair.rank)
            self._own[pair.rank] = pair

    def disown(self, rank: Rank) -> None:
        """Make the own slots of `rank`, which another node runs from now on, a mirror of it."""
        with self._lock:
            if (pair := self._own.pop(rank, None)) is not None:
                self._mirrored[rank] = pair

    def prepare_own(self, rank: Rank, header_bytes: int, payload_bytes: int) -> None:
        """Make empty slots for a rank this node may take over: first touch is slow. Raises, Blocks: as `make_own`."""
        with self._makers.setdefault(rank, threading.Lock()):
            self.put_back(self.maker.make(rank, header_bytes, payload_bytes))

    def put_back(self, pair: SlotPair) -> None:
        """Keep the caller's slots, which hold nothing, for the next `make_own`, unless their rank has some."""
        with self._lock:
            unused = pair if pair.rank in self._own else self._prepared.get(pair.rank)
            if unused is not pair:
                self._prepared[pair.rank] = pair
        free(unused)

    def drop_prepared(self, kept: Collection[Rank] = ()) -> None:
        with self._lock:
            free(*(self._prepared.pop(rank) for rank in list(self._prepared) if rank not in kept))

    # ---- mirrors (bulk server)

    @contextlib.contextmanager
    def writing(self, rank: Rank, timeout_s: float = WRITER_TIMEOUT_S) -> Iterator[None]:
        """Exclude other writers of the rank's mirror. Raises: TransportError if one does not end in time."""
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
        going_on: GoingOn = goes_on,
        before: Step = NO_STEP,
    ) -> SlotPair:
        """Get mirror slots of at least this size, one but `before`'s emptied for `step`; the caller is `writing`.

        Raises, Blocks: as `make_own`; StaleGeneration; TransportError for a rank of this node.
        """
        unused: SlotPair | None = None
        try:
            while True:
                with self._lock:
                    self.check_generation(generation)
                    if rank in self._own:
                        raise TransportError(f"rank {rank} runs on this node, which cannot be its mirror")
                    if unused is not None:
                        unused = self._replace_mirror(unused)
                    pair = self._mirrored.get(rank)
                    if pair is not None and pair.payload_bytes >= payload_bytes and pair.header_bytes >= header_bytes:
                        kept = before if (rank, before) in self._holdings else self.before(rank, step)
                        gone = {step, pair.invalidate(step, kept)}
                        self._forget(rank, gone.__contains__)
                        return pair
                unused = self.maker.make(rank, header_bytes, payload_bytes, going_on)
        finally:
            free(unused)

    def _replace_mirror(self, new: SlotPair) -> SlotPair | None:
        """Return what it replaces. Headers move into the larger slots; a payload is worth nothing there."""
        for (rank, step), holding in [item for item in self._holdings.items() if item[0][0] == new.rank]:
            snapshot = self._sealed(rank, step)
            if snapshot is None or holding.payload:
                del self._holdings[rank, step]
            else:
                new.seal_encoded(step, snapshot.encoded)
        old, self._mirrored[new.rank] = self._mirrored.get(new.rank), new
        return old

    def finish_mirror(
        self, pair: SlotPair, encoded: bytes, generation: Generation, holding: Holding, records: list[bytes], sums: Sums
    ) -> None:
        """Seal the slot, and append call records that end at its step. Raises: StaleGeneration, TransportError."""
        rank, step = holding.rank, holding.step
        with self._lock:
            self.check_generation(generation)
            if self._mirrored.get(rank) is not pair:
                raise TransportError(f"the mirror of rank {rank} was released while step {step} arrived")
            pair.seal_encoded(step, encoded)
            self._hold(holding)
            pair.sums[pair.slot_of(step)] = (xxhash.xxh3_64_intdigest(encoded), sums)
            self.history(rank).append(step, *records)

    def already_mirrored(self, rank: Rank, step: Step, digest: int, payload: bool) -> Holding | None:
        """Return the holding, if just this snapshot (by its header's digest) is mirrored here already."""
        with self._lock:
            holding, snapshot = self._holdings.get((rank, step)), self._sealed(rank, step)
            if rank not in self._mirrored or holding is None or (payload and not holding.payload):
                return None
            return holding if snapshot is not None and snapshot.digest == digest else None
