"""The loaders that `deadpool_plugin.data.resumable` returns in a training process, and the registry of all of them.

Rules of this file: to the script a `Resumable` is its loader; a pass is as good as the loader's own iterator. All
passes over one source are a single sequence of events (the beginning of a pass, its items and its end), so that a redo
may cross from one epoch into the next. Every tape of them is part of every call: data that it was not given as an
argument are the same in a redo. A survivor's source is never touched by a rewind. A newcomer's is set to the state that
the rank's own had at the restore step, where sources tell their state; others are read again up to that place.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..errors import Divergence, Unsupported, invariant
from . import codec, proof, rng
from .iterators import POINTER, Numbered, RewindIterator, RewoundByItself, reading
from .patching import PatchSet

TAPES_MAX = 64  # in one process: each is named in every call's record
BEGUN, ENDED = object(), object()  # events beside items


class Tape(RewindIterator):
    """Events of the script's loader, from the first on. Thread: the script's main thread."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.is_stateful = all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))
        self.latest_pass: Pass | None = None
        self._begins = False  # the source's next event shall be BEGUN
        self._pass: Iterator[Any] | None = None
        self._is_nested: bool | None = None
        self._states: dict[int, bytes | None] = {}  # the source's, by position
        self._owed = 0  # events that a follower has skipped and the source has not seen, and by their numbers:
        self._draws: dict[int, dict[str, Any]] = {}  # the random states before those that were drawn for,
        self._passes: dict[int, bool] = {}  # and those that are no items: whether a pass begins

    def event(self, begins: bool) -> Any:
        """Return the script's next event: BEGUN if a pass `begins`, whatever became of the one before, or the next."""
        self._settle()
        if self.position not in self._kept:  # else it is a redo
            self._begins = begins
        nested = RewindIterator.readers > 0
        if self._is_nested not in (None, nested):
            raise Unsupported(
                f"a resumable {type(self.inner).__name__} is read both directly and through another iterator "
                "that a training call is given",
                "one way",
                "wrap the outermost iterable with deadpool_plugin.data.resumable, and only that",
            )
        self._is_nested = nested
        event = self._read() if nested else next(self)
        if (event is BEGUN) is not begins:
            done = "a pass was begun" if begins else "an item was asked for"
            was = "the beginning of a pass" if event is BEGUN else "the end of a pass" if event is ENDED else "an item"
            raise Divergence(
                f"a training call that was done again read other data than the first time: {done}, and there was {was}",
                "the same",
                f"what a call reads must not depend on the time or on what it did before; {POINTER}",
            )
        return event

    def _read(self) -> Any:
        if self._begins:
            self._begins, self._pass = False, iter(self.inner)
            return BEGUN
        event = ENDED if self._pass is None else next(self._pass, ENDED)
        if event is ENDED:
            self._pass = None
        return event

    # ---- records and followers

    def pulled_since(self, position: int) -> list[Any]:
        events = enumerate(item.kept.again() for item in self._items(position, self.position))
        passes = [[number, event is BEGUN] for number, event in events if event is BEGUN or event is ENDED]
        return [*super().pulled_since(position), passes]

    def skip(self, count: int, draws: Numbered = (), digest: int = 0, passes: Numbered = ()) -> int | None:
        # A source that tells its state is not read until the script asks: the state makes its items the rank's own.
        self.forget_before(self.position)
        if count == 0:
            return None
        self.position += count
        self._draws.update({self._owed + number: states for number, states in draws})
        self._passes.update({self._owed + number: begins for number, begins in passes})
        self._owed += count
        return None if self.is_stateful else self._settle(digest)

    def _settle(self, digest: int = 0) -> int | None:
        """Go over the events that a follower has skipped. Returns: their digest, None if some were passed over."""
        if self._owed == 0:
            return None
        digests: list[int | None] = []
        with rng.preserved(), reading():
            for number in range(self._owed):
                if number in self._draws:
                    rng.restore_host(self._draws[number])
                self._begins, differs = self._passes.get(number, False), ""
                if number not in self._passes:
                    try:
                        items = RewindIterator(iter(()) if self._pass is None else self._pass)
                        digests.append(items.skip(1, digest=digest))
                    except StopIteration:
                        differs = "ended earlier"
                elif (event := self._read()) is BEGUN or event is ENDED:
                    digests.append(proof.digest(event))
                else:
                    differs = "went on longer"
                if differs:
                    raise Divergence(
                        f"a pass over a resumable {type(self.inner).__name__} {differs} than the rank's own",
                        "the same items",
                        "resume from something that gives the same each time the script is run, or tells its state",
                    )
        self._owed, self._draws, self._passes = 0, {}, {}
        known = [one for one in digests if one is not None]
        return proof.combined(known) if len(known) == len(digests) else None

    def forget_before(self, position: int) -> None:
        super().forget_before(position)
        self._states = {place: state for place, state in self._states.items() if place >= position}

    # ---- snapshots

    def state(self) -> bytes | None:
        """Return the source's state at this cut; None where it has none to tell: between passes, for instance.

        Blocks: while the source makes it. Raises: Unsupported if it is no plain data.
        """
        if self.position not in self._states:
            invariant(self.position not in self._kept, "a redo has come to a cut that is new")
            tells = self.is_stateful and self._pass is not None and not self._is_nested and not self._owed
            self._states[self.position] = self._state_now() if tells else None
        return self._states[self.position]

    def _state_now(self) -> bytes:
        with rng.preserved():
            try:
                return codec.encode(self.inner.state_dict())
            except Unsupported as error:
                raise Unsupported(
                    f"the state_dict() of a {type(self.inner).__name__} cannot be kept: {error.found}",
                    "None, numbers, strings, bytes, tensors, and lists, tuples and dicts of them",
                    "give deadpool_plugin.data.resumable an iterable without state_dict: it is then read again",
                ) from error

    def load(self, state: bytes | None) -> None:
        """Set a newcomer's source to the `state` that the rank's own told at this cut. Blocks: for the source."""
        if state is None or (not self._owed and self._pass is not None and self._state_now() == state):
            return
        self._owed, self._draws, self._passes = 0, {}, {}
        self.forget_before(self.position)
        with rng.preserved():  # as in torchdata, the pass begun after `load_state_dict` goes on from the state
            self.inner.load_state_dict(codec.decode(state))
            self._pass = iter(self.inner)


class Pass(RewoundByItself):
    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        tape.latest_pass = self
        tape.event(begins=True)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._tape.latest_pass is not self:
            raise Unsupported(
                f"two passes over one resumable {type(self._tape.inner).__name__} at the same time",
                "one after the other",
                "wrap a loader of its own for each",
            )
        event = self._tape.event(begins=False)
        if event is ENDED:
            raise StopIteration
        return event


class Resumable:
    """A loader whose position survives swaps; attributes are the loader's own."""

    def __init__(self, source: Any, tape: Tape) -> None:
        self.source, self._tape = source, tape

    def __iter__(self) -> Pass:
        return Pass(self._tape)

    def __len__(self) -> int:
        return len(self.source)

    def __bool__(self) -> bool:  # else Python asks for a length, which not every loader has
        return bool(self.source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


class Tapes(list[Tape]):
    """All tapes of this process, in the order in which the script made them: a replacement makes the same."""

    installed: ClassVar[Tapes | None] = None

    def __init__(self) -> None:
        super().__init__()
        # One for each batch that the script itself has read from other loaders since the last call.
        self._digests: deque[int] = deque(maxlen=proof.ITEMS_MAX)

    def note(self, batch: Any) -> None:
        self._digests.append(proof.digest(batch))

    def take_digest(self) -> int:
        if not self._digests:  # at most calls
            return 0
        digest = proof.combined(list(self._digests))
        self._digests.clear()
        return digest

    def wrap(self, source: Any) -> Resumable:
        """Raises: Unsupported for what cannot be read from, or for too many."""
        if isinstance(source, Resumable):
            return source
        if not hasattr(type(source), "__iter__"):
            raise Unsupported(
                f"something of type {type(source).__name__} was to be made resumable", "an iterable", "give a loader"
            )
        if len(self) == TAPES_MAX:
            raise Unsupported(
                f"the script makes loader number {TAPES_MAX + 1} resumable",
                f"at most {TAPES_MAX}",
                "wrap each loader once, before the training loop",
            )
        self.append(Tape(source))
        return Resumable(source, self[-1])

    def states(self) -> list[bytes | None]:
        return [tape.state() for tape in self]

    def load(self, states: Sequence[bytes | None]) -> None:
        invariant(len(states) == len(self), "the snapshot tells of other loaders than this script has made")
        for tape, state in zip(self, states, strict=True):
            tape.load(state)

    def install(self, inside: Callable[[], bool]) -> None:
        """Let scripts find us from now on, and refuse what a call reads past us. `inside`: whether one is under way."""

        def following(original: Callable[[Any], Any], iterator: Any) -> Any:
            is_script = threading.current_thread() is threading.main_thread() and not RewindIterator.readers
            if is_script and inside():
                raise Unsupported(
                    "a training call reads from a DataLoader that it was not given: a swap could not rewind it",
                    "data that the call is given (`data_iterator`), or a resumable loader",
                    POINTER,
                )
            batch = original(iterator)
            if is_script:
                self.note(batch)
            return batch

        Tapes.installed = self
        PatchSet().wrap(following, _BaseDataLoaderIter, "__next__")
