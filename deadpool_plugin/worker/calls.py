"""The call log: what this rank's script asked of the framework since the oldest step a swap may go back to.

Rules of this file: a call is kept with all it needs to be done again with the same result: its function and
arguments, its entry state (RNG, framework flags, scalars) and the position of the data iterators among its
arguments. Segment s holds the calls after the cut of step s, its last is the update that makes step s + 1.
The log is two steps and the current one deep: no rank is further ahead of another (the gate).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import WHOLE_STEP, Unsupported
from . import codec
from .functions import Call
from .iterators import IteratorTable, RewindIterator

DEPTH = 2
CALLS_MAX = 50_000
"""Between two cuts. A call costs some 5 KB without its inputs, which are kept too."""
RECORDS_BYTES_MAX = 256 << 20
"""Between two cuts. Every host that keeps a copy keeps those of three steps in any case (mirror/records.py)."""
RANDOM_STATES = "random states"
"""Name of the record of the states after a call, kept only if the script itself drew from them before the next."""


@dataclass
class LoggedCall:
    """A call that can be done again. `restore_entry` puts the state before it back.

    `iterators`: those it may read from, and where they stood; `ends`: where they stood when it was done (what the
    script itself reads between calls is not read again).
    """

    call: Call
    segment: int
    restore_entry: Callable[[], None]
    iterators: list[tuple[RewindIterator, int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def check(self) -> None:
        """Raises: Unsupported if it cannot be done again as it was done."""
        self.call.check()
        for (iterator, start), end in zip(self.iterators, self.ends, strict=True):
            iterator.check(start, end)

    def rewind(self) -> None:
        self.restore_entry()
        for iterator, position in self.iterators:
            iterator.rewind(position)


class CallLog:
    """Calls in the order the script made them, and the records of their results by segment."""

    def __init__(self, first: int = 0) -> None:
        self.iterators = IteratorTable()
        self.step = self.oldest = first
        """Steps made, and the step after whose cut the oldest call kept here was made: nothing older can be gone back
        to."""
        self._calls: list[LoggedCall] = []
        self._records: dict[int, list[bytes]] = {}
        self._bytes: dict[int, int] = {}

    def add(self, call: LoggedCall, outcome: Any, read: int = 0) -> codec.TooLarge | None:
        """Keep `call`, and encode its record at once, before the script may change anything in it.

        Args: outcome: what a rank that skips this call must find (its value, or the tensors it wrote); read: digest of
            what the script had read for it (proof.py).
        Returns: what of the outcome such a rank cannot find, if anything.
        """
        call.ends = [iterator.position for iterator, _ in call.iterators]
        self._calls.append(call)
        records = self._records.setdefault(call.segment, [])
        if len(records) >= CALLS_MAX:
            raise Unsupported(
                f"the script made {len(records)} training calls since step {call.segment}, all of which must be kept",
                f"at most {CALLS_MAX} between two optimizer steps",
                f"evaluate less at a time, or {WHOLE_STEP}",
            )
        pulls = [iterator.pulled_since(position) for iterator, position in call.iterators]
        if self._keep(call.segment, codec.encode([call.call.name, outcome, pulls, read])):
            return codec.too_large(outcome)
        lacking = codec.TooLarge(f"results of more than {RECORDS_BYTES_MAX >> 20} MiB since the last step")
        records.append(codec.encode([call.call.name, lacking, [], 0]))
        return lacking

    def drew(self, at_exit: Any) -> None:
        """Record that the script drew random numbers since the last call: who follows draws from `at_exit` too."""
        self._keep(self.step, codec.encode([RANDOM_STATES, at_exit, [], 0]))

    def _keep(self, segment: int, record: bytes) -> bool:
        """Return whether `record` still fits. Nothing does after one that did not: nobody may follow past it."""
        size = self._bytes[segment] = self._bytes.get(segment, 0) + len(record)
        if size <= RECORDS_BYTES_MAX:
            self._records.setdefault(segment, []).append(record)
        return size <= RECORDS_BYTES_MAX

    def after_cut(self, step: int) -> list[LoggedCall]:
        return [call for call in self._calls if call.segment >= step]

    def records(self, segment: int) -> bytes:
        """The records of one segment as one blob: a list of encoded `[name, outcome, pulls, read]`."""
        return codec.encode(self._records.get(segment, []))

    def prune(self, step: int) -> None:
        """Forget what no swap can ask for after the cut of `step`, and check that the rest is what it was.

        Raises: Unsupported if it is not: at the first cuts of a job, not in its first swap.
        """
        self.step, oldest = step, max(self.oldest, step - DEPTH)
        self.oldest = oldest
        self._calls = [call for call in self._calls if call.segment >= oldest]
        for kept in (self._records, self._bytes):
            for segment in [segment for segment in kept if segment < oldest]:
                del kept[segment]
        self.iterators.keep_only([start for call in self._calls for start in call.iterators])
        for call in self._calls:
            call.check()


def forget(error: BaseException | None) -> None:
    """Let go of everything an interruption holds: frames (with their generators' `finally`), and its causes.

    Source: facts, "Silent corruption": a suspended generator collected later undid its flags in a later step.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
