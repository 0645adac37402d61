"""The loaders that `deadpool_plugin.data.resumable` returns in a training process, and the registry of all of them.

Rules of this file: to the script a `Resumable` is its loader; a pass is as good as the loader's own iterator. Every
tape is part of every call, whoever reads from it: so a call is redone with the data it had although it was not given
them as an argument.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from ..errors import Unsupported, invariant
from .iterators import POINTER, RewindIterator, RewoundByItself
from .patching import PatchSet
from .tape import Tape

TAPES_MAX = 64
"""In one process. Each is named in every call's record."""


class Pass(RewoundByItself):
    """One pass over a loader."""

    def __init__(self, loader: Resumable, tape: Tape) -> None:
        self._loader, self._tape = loader, tape
        loader.latest_pass = self
        tape.begin()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._loader.latest_pass is not self:
            raise Unsupported(
                f"two passes over one resumable {type(self._loader.source).__name__} at the same time",
                "one after the other",
                "wrap a loader of its own for each",
            )
        return self._tape.pull()


class Resumable:
    """A loader whose position survives swaps; attributes are the loader's own."""

    def __init__(self, source: Any, tape: Tape) -> None:
        self.source, self._tape = source, tape
        self.latest_pass: Pass | None = None

    def __iter__(self) -> Pass:
        return Pass(self, self._tape)

    def __len__(self) -> int:
        return len(self.source)

    def __bool__(self) -> bool:  # else Python asks for a length, which not every loader has
        return bool(self.source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


class Tapes:
    """All tapes of this process, in the order in which the script made them: a replacement makes the same."""

    installed: ClassVar[Tapes | None] = None

    def __init__(self) -> None:
        self._tapes: list[Tape] = []

    def __iter__(self) -> Iterator[Tape]:
        return iter(self._tapes)

    def wrap(self, source: Any) -> Resumable:
        """Raises: Unsupported for what cannot be read from, or for too many."""
        if isinstance(source, Resumable):
            return source
        if not hasattr(type(source), "__iter__"):
            raise Unsupported(
                f"something of type {type(source).__name__} was to be made resumable", "an iterable", "give a loader"
            )
        if len(self._tapes) == TAPES_MAX:
            raise Unsupported(
                f"the script makes loader number {TAPES_MAX + 1} resumable",
                f"at most {TAPES_MAX}",
                "wrap each loader once, before the training loop",
            )
        self._tapes.append(Tape(source))
        return Resumable(source, self._tapes[-1])

    def forget(self) -> None:
        """Forget what was kept: a follower rewinds nothing."""
        for tape in self:
            tape.forget()

    def states(self) -> list[bytes | None]:
        """Return what a snapshot has of them."""
        return [tape.state() for tape in self]

    def load(self, states: Sequence[bytes | None]) -> None:
        """Go on, in a newcomer, where the snapshot was taken."""
        invariant(len(states) == len(self._tapes), "the snapshot tells of other loaders than this script has made")
        for tape, state in zip(self._tapes, states, strict=True):
            tape.load(state)

    def install(self, inside: Callable[[], bool], note: Callable[[Any], None] = lambda batch: None) -> None:
        """Let scripts find us from now on, and refuse what a call reads past us.

        Args: inside: whether one is under way; note: told the batches that the script reads from a DataLoader itself.
        """
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        def following(original: Callable[[Any], Any], iterator: Any) -> Any:
            is_script = threading.current_thread() is threading.main_thread() and not RewindIterator.reading
            if is_script and inside():
                raise Unsupported(
                    "a training call reads from a DataLoader that it was not given: a swap could not rewind it",
                    "data that the call is given (`data_iterator`), or a resumable loader",
                    POINTER,
                )
            batch = original(iterator)
            if is_script:
                note(batch)
            return batch

        Tapes.installed = self
        PatchSet().wrap(following, _BaseDataLoaderIter, "__next__")
