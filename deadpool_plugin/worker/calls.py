"""The call log: what this rank's script asked of the framework since the oldest step a swap may go back to.

Rules of this file: a call is kept with all it needs to be done again with the same result: its function and
arguments, its entry state (RNG, framework flags, scalars) and the position of the data iterators among its
arguments. Segment s holds the calls after the cut of step s, its last is the update that makes step s + 1.
The log is two steps and the current one deep: no rank is further ahead of another (the gate).
"""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import WHOLE_STEP, Unsupported
from . import codec
from .adapter import Adapter
from .copies import Inputs
from .functions import Call, CallKind
from .iterators import POINTER, IteratorTable, RewindIterator, RewoundByItself

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

    def rewind(self) -> None:
        self.restore_entry()
        for iterator, position in self.iterators:
            iterator.rewind(position)


class CallLog:
    """Calls in the order the script made them, and the records of their results by segment."""

    def __init__(self, first: int = 0) -> None:
        self.iterators = IteratorTable()
        self.step = self.oldest = first  # steps made, and the oldest one that can be gone back to
        self._calls: list[LoggedCall] = []
        self._records: dict[int, list[bytes]] = {}
        self._bytes = 0  # of records since the last cut

    def add(self, logged: LoggedCall, outcome: Any, read: int = 0) -> codec.TooLarge | None:
        """Keep a call, and encode its record at once, before the script may change anything in it.

        Args: outcome: what a rank that skips this call must find (its value, or the tensors it wrote); read: digest of
            what the script had read for it (proof.py).
        Returns: what of the outcome such a rank cannot find, if anything.
        """
        logged.ends = [iterator.position for iterator, _ in logged.iterators]
        self._calls.append(logged)
        records = self._records.setdefault(self.step, [])
        if len(records) >= CALLS_MAX:
            raise Unsupported(
                f"the script made {len(records)} training calls since step {self.step}, all of which must be kept",
                f"at most {CALLS_MAX} between two optimizer steps",
                f"evaluate less at a time, or {WHOLE_STEP}",
            )
        pulls = [iterator.pulled_since(position) for iterator, position in logged.iterators]
        if self._keep([logged.call.name, outcome, pulls, read]):
            return codec.too_large(outcome)
        lacking = codec.TooLarge(f"results of more than {RECORDS_BYTES_MAX >> 20} MiB since the last step")
        records.append(codec.encode([logged.call.name, lacking, [], 0]))
        return lacking

    def drew(self, at_exit: Any) -> None:
        """Record that the script drew random numbers since the last call: who follows draws from `at_exit` too."""
        self._keep([RANDOM_STATES, at_exit, [], 0])

    def _keep(self, record: list[Any]) -> bool:
        """Return whether `record` still fits. Nothing does after one that did not: nobody may follow past it."""
        encoded = codec.encode(record)
        self._bytes += len(encoded)
        if self._bytes <= RECORDS_BYTES_MAX:
            self._records.setdefault(self.step, []).append(encoded)
        return self._bytes <= RECORDS_BYTES_MAX

    def after_cut(self, step: int) -> list[LoggedCall]:
        return [logged for logged in self._calls if logged.segment >= step]

    def records(self, segment: int) -> bytes:
        """The records of one segment as one blob: a list of encoded `[name, outcome, pulls, read]`."""
        return codec.encode(self._records.get(segment, []))

    def prune(self, step: int) -> None:
        """Forget what no swap can ask for after the cut of `step`, and check that the rest is what it was.

        Raises: Unsupported if it is not: at the first cuts of a job, not in its first swap.
        """
        self.step, self._bytes, self.oldest = step, 0, max(self.oldest, step - DEPTH)
        self._calls = self.after_cut(self.oldest)
        self._records = {segment: kept for segment, kept in self._records.items() if segment >= self.oldest}
        self.iterators.keep_only([start for logged in self._calls for start in logged.iterators])
        for logged in self._calls:
            logged.call.check()
            for (iterator, start), end in zip(logged.iterators, logged.ends, strict=True):
                iterator.check(start, end)


def forget(error: BaseException | None) -> None:
    """Let go of everything an interruption holds: frames (with their generators' `finally`), and its causes.

    Source: facts, "Silent corruption": a suspended generator collected later undid its flags in a later step.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class WholeStep(Call):
    """A script's own step function under `@deadpool_plugin.step`, as one call: kept, redone and followed as a whole.

    What the framework is asked inside it is no call of its own, but for the update, which waits for the snapshot before
    it. It must update once or more, or its work would be gone at the next cut. Followers are told what it returned, and
    of the framework what a script can see.
    """

    def __init__(
        self, adapter: Adapter, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__(f"step {function.__qualname__}", CallKind.STEP, function)
        self._adapter = adapter
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not isinstance(leaf, torch.nn.Parameter):
                raise Unsupported(
                    f"{self.name} was given a tensor of {list(leaf.shape)} that requires grad",
                    "data: a graph that begins outside the function cannot be redone",
                    "do everything that leads to the loss inside it",
                )
            # what gives something else each time it is asked, and nobody rewinds; files are written to
            if hasattr(type(leaf), "__next__") and not isinstance(leaf, (RewoundByItself, io.IOBase)):
                raise Unsupported(
                    f"{self.name} was given a {type(leaf).__name__} to read data from, which a redo would read on",
                    "the data themselves, or a resumable loader",
                    POINTER,
                )
        self._inputs = Inputs(args, kwargs, self.name)

    def __call__(self) -> Any:
        args, kwargs = self._inputs.take()
        with self._adapter.inside_step():
            return self.function(*args, **kwargs)

    def check(self) -> None:
        self._inputs.check()

    def outcome(self, value: Any) -> Any:
        return [value, self._adapter.state.visible()]

    told = outcome

    def skipped(self, outcome: Any) -> Any:
        value, visible = outcome
        self._adapter.state.show(visible)
        return value

    def loss(self, value: Any, on_host: Callable[[Any], Any]) -> float | None:
        """Find the loss in the function's result: a number, the first, or the one so called."""
        value = on_host(value)
        if isinstance(value, dict):
            value = value.get("loss")
        elif isinstance(value, (list, tuple)):
            value = value[0] if value else None
        if isinstance(value, torch.Tensor):
            return float(value) if value.numel() == 1 else None
        return float(value) if isinstance(value, (int, float)) else None
