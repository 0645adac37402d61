"""Calls of a rank's script to the framework, and their log since the oldest step that a swap may go back to.

Rules of this file: a call is kept with all it needs to be done again with the same result: function and arguments,
entry state (RNG, framework flags, scalars), and positions of data iterators. Segment s holds the calls after the cut of
step s; its last is the update that makes step s + 1. No rank is more than two snapshots ahead of another (the gate).
"""

from __future__ import annotations

import enum
import functools
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import WHOLE_STEP, Unsupported
from . import codec
from .iterators import IteratorTable, RewindIterator
from .patching import Function

CHECKED_STEPS = 2  # at the cuts of so many steps after a call its inputs are looked at, and before they are forgotten
CALLS_MAX = 50_000  # between two cuts; a call costs some 5 KB without its inputs, which are kept too
RECORDS_BYTES_MAX = 256 << 20  # between two snapshots: they travel together (transport/unix.py limits that to 1 GiB)
RANDOM_STATES = "random states"  # the record of what the script itself drew after a call, before the next (`rng.drawn`)


class CallKind(enum.Enum):
    """The meaning of a call to the protocol."""

    PLAIN = "plain"
    FORWARD = "forward"  # runs the model; the first one of these is where start-up ends and training begins
    UPDATE = "update"  # the optimizer step: the shard changes inside it, and its return is the cut of a step
    STEP = "step"  # runs the model and updates it; inside it the adapter hands over the update, as a call of that kind
    LIGHT = "light"
    """Clears gradients or steps a schedule: it communicates with nobody, runs no model and draws nothing. No states are
    captured for it: the call before it leaves what it reads, and the next call's entry has what it leaves."""
    FACT = "fact"
    """Asks what a spare would find otherwise (whether a file is there, parameters are alike), at any time: a spare is
    told what the rank itself was, plain data. `name` is the question."""
    SAVE = "save"  # writes a checkpoint (a `saving.SaveCall`): waits for the commit, and followers skip it


RUNS_MODEL = frozenset({CallKind.FORWARD, CallKind.STEP})


class Call:
    """One call: `function` with what it is given. Followers are told its value, unless a subclass says otherwise."""

    name: str
    kind = CallKind.PLAIN
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}

    def __init__(
        self,
        name: str,
        kind: CallKind,
        function: Function,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.name, self.kind, self.function, self.args, self.kwargs = name, kind, function, args, kwargs or {}

    def __call__(self) -> Any:
        """Execute it, as often as needed."""
        return self.function(*self.args, **self.kwargs)

    @property
    def makes_step(self) -> bool:
        return self.kind is CallKind.UPDATE or self.kind is CallKind.STEP

    @property
    def is_read(self) -> bool:
        """Whether its effects are read, whatever its value: gradients, buffers by the script, state by a snapshot."""
        return self.makes_step or self.kind is CallKind.FORWARD

    @property
    def evaluates(self) -> bool:
        """Whether it runs the model, and no update comes of it."""
        return self.kind is CallKind.FORWARD and (not torch.is_grad_enabled() or bool(self.kwargs.get("forward_only")))

    def check(self) -> None:
        """Raises: Unsupported if what it was given is not what it was, so that it cannot be executed again."""

    def told(self, value: Any) -> Any:
        """Collect, after each execution, all that the host reads of it: for its record, its loss, the snapshot after
        it. The device's tensors in it come to the host in the call's one wait."""
        return value

    def outcome(self, value: Any) -> Any:
        """Make the record of `value`, right after the call: plain data and tensors."""
        return value

    def failed(self, error: BaseException) -> Any:
        """Make the record of `error`, which it has raised, if the script may go on then; else None."""
        return None

    def skipped(self, outcome: Any) -> Any:
        """Return, in a follower, the value for the script, made from what was recorded; executes nothing."""
        return outcome

    def loss(self, value: Any, on_host: Callable[[Any], Any]) -> float | None:
        """Find the loss, for people to look at. `on_host` gives what was told, on the host."""
        return None


CallHandler = Callable[[Call], Any]  # the runtime's function around every call; returns the value for the script


@dataclass
class LoggedCall:
    """A call that can be done again."""

    call: Call
    segment: int
    restore_entry: Callable[[], None] | None  # puts the state before it back; None: as it is
    iterators: list[tuple[RewindIterator, int]] = field(default_factory=list)  # it may read from, and where they stood
    ends: list[int] = field(default_factory=list)  # where they stood when it was done

    def rewind(self) -> None:
        if self.restore_entry is not None:
            self.restore_entry()
        for iterator, position in self.iterators:
            iterator.rewind(position)

    def check(self) -> None:
        """Raises: Unsupported if what it was given, or has read, is not what it was."""
        self.call.check()
        for (iterator, start), end in zip(self.iterators, self.ends, strict=True):
            iterator.check(start, end)


class CallLog:
    """Calls in the order the script made them, and the records of their results by segment."""

    def __init__(self, first: int = 0) -> None:
        self.iterators = IteratorTable()
        self.step = self.oldest = first  # steps made, and the oldest one that can be gone back to
        self._calls: list[LoggedCall] = []
        self._given: list[LoggedCall] = []  # those of them that were given what the script could change
        self._records = defaultdict[int, list[bytes]](list)
        self._whole: dict[int, bytes] = {}  # those of segments that are over, each as one blob
        self._bytes = 0  # of records since the newest snapshot
        self._drew_at = 0  # of these the one before which the script has drawn, if it has

    def add(self, logged: LoggedCall, outcome: Any, read: int = 0) -> codec.TooLarge | None:
        """Keep a call, and encode its record at once, before the script may change anything in it.

        Args: outcome: what a rank that skips this call must find; read: digest of what the script had read for it.
        Returns: what of the outcome such a rank cannot find, if anything.
        """
        self._calls.append(logged)
        if logged.iterators or type(logged.call).check is not Call.check:
            self._given.append(logged)
        records = self._records[self.step]
        if len(records) >= CALLS_MAX:
            raise Unsupported(
                f"the script made {len(records)} training calls since step {self.step}, all of which must be kept",
                f"at most {CALLS_MAX} between two optimizer steps",
                f"evaluate less at a time, or {WHOLE_STEP}",
            )
        logged.ends = [iterator.position for iterator, _ in logged.iterators]
        pulls = [iterator.pulled_since(position) for iterator, position in logged.iterators]
        lacking = codec.too_large(outcome)  # nothing of it is kept then
        if outcome is None and not pulls and not read:
            record = _encoded_nothing(logged.call.name)
        else:
            record = codec.encode([logged.call.name, lacking or outcome, pulls, read])
        if not self._keep(len(records), record):
            lacking = codec.TooLarge(f"results of more than {RECORDS_BYTES_MAX >> 20} MiB since the newest snapshot")
            records.append(codec.encode([logged.call.name, lacking, [], 0]))
        if logged.restore_entry is not None:
            self._drew_at = len(records)
        return lacking

    def drew(self, states: dict[str, Any]) -> None:
        """Record what the script has drawn since states were captured: who follows draws from these `states`, too."""
        self._keep(self._drew_at, codec.encode([RANDOM_STATES, states, [], 0]))

    def _keep(self, place: int, record: bytes) -> bool:
        self._bytes += len(record)  # nothing fits after one that did not: nobody may follow past it
        if fits := self._bytes <= RECORDS_BYTES_MAX:
            self._records[self.step].insert(place, record)
        return fits

    def after_cut(self, step: int) -> list[LoggedCall]:
        return [logged for logged in self._calls if logged.segment >= step]

    def records(self, segment: int) -> bytes:
        """Return those of one segment that is over as one blob: a list of `[name, outcome, pulls, read]`."""
        if segment not in self._whole:
            self._whole[segment] = codec.joined(self._records.pop(segment, []))
        return self._whole[segment]

    def prune(self, step: int, oldest: int, snapshot: int | None = None) -> None:
        """Forget what no swap asks for after the cut of `step`: none goes back behind `oldest`.

        Args: snapshot: the newest one, which takes the records before it along; None: that of `step`.
        Raises: Unsupported if the rest is not what it was.
        """
        oldest = max(self.oldest, oldest)
        for logged in self._given:  # the last look at what was not looked at lately
            if logged.segment < oldest and not self._is_looked_at(logged.segment):
                logged.check()
        self.step, self.oldest = step, oldest
        unsent = range(step if snapshot is None else max(snapshot, oldest), step)
        self._bytes, self._drew_at = sum(len(self.records(segment)) for segment in unsent), 0
        self._calls = self.after_cut(oldest)
        self._whole = {segment: blob for segment, blob in self._whole.items() if segment >= oldest}
        self._given = [logged for logged in self._given if logged.segment >= oldest]
        self.iterators.keep_only([start for logged in self._given for start in logged.iterators])
        for logged in self._given:  # so at the first cuts of a job, not in its first swap
            if self._is_looked_at(logged.segment):
                logged.check()

    def _is_looked_at(self, segment: int) -> bool:
        """Return whether calls of `segment` were looked at in the newest cut: not all that are kept, if many are."""
        return segment >= self.step - CHECKED_STEPS or segment == self.oldest


@functools.lru_cache(256)
def _encoded_nothing(name: str) -> bytes:
    return codec.encode([name, None, [], 0])


def forget(error: BaseException | None) -> None:
    """Let go of everything an interruption holds: frames (with their generators' `finally`), and its causes."""
    # A suspended generator that was collected later undid its flags in a later step.
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
