"""The records of a rank's calls on this node: the recording of its start-up, and the records of its steps.

Rules of this file: any thread; what another node sends is of a generation, and refused once that is over.
"""

from __future__ import annotations

from ..core.types import Generation, Rank, Step
from ..errors import DeadpoolError
from .fence import Fence
from .history import History

_NOTHING = History(0)


class NotHeld(DeadpoolError):
    """This node does not hold what somebody asked it for."""


class Records(Fence):
    """Recordings and histories by rank.

    Args:
        history_limit_bytes: per rank.
    """

    def __init__(self, history_limit_bytes: int) -> None:
        super().__init__()
        self._history_limit_bytes = history_limit_bytes
        self._recordings: dict[Rank, bytes] = {}
        self._histories: dict[Rank, History] = {}

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

    def _history(self, rank: Rank) -> History:
        if rank not in self._histories:
            self._histories[rank] = History(self._history_limit_bytes)
        return self._histories[rank]

    def put_history(self, rank: Rank, history: History) -> None:
        """Instead of the one that is held. It is this node's from now on."""
        with self._lock:
            self._histories[rank] = history

    def append(self, rank: Rank, step: Step, records: bytes) -> None:
        """Sets the call records of `step`; those of later steps are forgotten."""
        with self._lock:
            self._history(rank).append(step, records)

    def get(self, rank: Rank, first: Step, last: Step) -> list[bytes]:
        """The records of first..last. Raises: HistoryPruned."""
        with self._lock:
            return self._histories.get(rank, _NOTHING).get(first, last)

    def history_range(self, rank: Rank) -> tuple[Step, Step]:
        """First and last step whose records are held (NO_STEP twice if none)."""
        with self._lock:
            history = self._histories.get(rank, _NOTHING)
            return history.first, history.last

    def history_bytes(self, rank: Rank) -> int:
        """The size of the records that are held."""
        with self._lock:
            return self._histories.get(rank, _NOTHING).held_bytes

    def _truncate(self, rank: Rank, step: Step) -> None:
        """Forgets the records of later steps. The caller has the lock."""
        if rank in self._histories:
            self._histories[rank].truncate(step)

    def _forget_records(self, rank: Rank) -> None:
        """The caller has the lock."""
        self._recordings.pop(rank, None)
        self._histories.pop(rank, None)
