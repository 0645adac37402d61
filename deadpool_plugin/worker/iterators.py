"""Data iterators that can be rewound by a few steps.

Rules of this file: the user's iterator is never rebuilt on a survivor; what it gave out is kept while a redo
could ask for it again, its large tensors by reference (Megatron-LM fills and slices the dict it got). A newcomer's
iterator is moved to the same position by the counts in the call records (skipping.py).
An iterator may draw random numbers (a loader does at each new epoch, for its order perhaps): a redo must draw as many
although it reads nothing, and a newcomer must draw the same.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from ..errors import GenerationChanged, Unsupported
from . import proof, rng
from .copies import COPIED_BYTES_MAX, Kept
from .skipping import prove, skip

POINTER = "wrap what it reads from: deadpool_plugin.data.resumable(...)"


class Item(NamedTuple):
    """The item of one pull, its digest, and the random states before and after it if it drew from them."""

    kept: Kept
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    digest: int

    def check(self) -> None:
        """Raises: Unsupported if it is not what it was."""
        if (shape := self.kept.changed()) is not None:
            raise Unsupported(
                f"a tensor of {shape} in a batch that a training call had read was changed in place",
                f"tensors above {COPIED_BYTES_MAX} bytes that a loader gives to stay as they are until two steps later",
                "make new tensors for each batch, and change copies of them",
            )


class RewindIterator:
    """Stands in for the user's iterator; keeps the items since `forget_before`.

    `position` counts the items handed out since this object exists.
    """

    reading: ClassVar[int] = 0
    """How many of them read from their sources right now: what is read below them is theirs to rewind."""

    def __init__(self, inner: Iterator[Any]) -> None:
        self.inner = inner
        self.position = 0
        self._kept: deque[Item] = deque()
        self._first_kept = 0
        self._cut_off = False
        """A swap has ended it in the middle of a pull: a generator says from then on that it has no more items."""

    def __iter__(self) -> RewindIterator:
        return self

    def __next__(self) -> Any:
        index = self.position - self._first_kept
        if index == len(self._kept):
            value = self._pull()
        else:
            item = self._kept[index]
            item.check()
            value = item.kept.again()
            if item.after is not None:
                rng.restore_host(item.after)
        self.position += 1
        return value

    def _pull(self) -> Any:
        if self._cut_off:
            raise Unsupported(
                f"a {type(self.inner).__name__} communicates while a training call reads from it, and a swap has cut "
                "that off",
                "iterators that give items without asking other ranks",
                "read the batch before the call, and hand that over",
            )
        before = rng.capture_host()
        try:
            with reading():
                value = next(self.inner)
        except GenerationChanged:
            self._cut_off = True
            raise
        after = rng.capture_host()
        drew = not rng.equal(before, after)
        read = proof.digest(value)
        self._kept.append(Item(Kept(value), before if drew else None, after if drew else None, read))
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def rewind(self, position: int) -> None:
        assert self._first_kept <= position <= self._first_kept + len(self._kept), "rewound past what is kept"
        self.position = position

    def pulled_since(self, position: int) -> list[Any]:
        """Return how many items; of each that was drawn for, its number and the random states before; and a digest of
        all."""
        items = list(self._kept)[position - self._first_kept : self.position - self._first_kept]
        drawn = [[number, item.before] for number, item in enumerate(items) if item.before is not None]
        return [len(items), drawn, proof.combined([item.digest for item in items])]

    def skip(self, count: int, draws: Sequence[Sequence[Any]] = (), digest: int = 0) -> int | None:
        """Move the user's iterator, in a follower, by what the rank itself pulled, as from `pulled_since`.

        Args: digest: that of the rank's own items; 0 if nobody will compare them.
        Returns: the digest of what was read here, None if it was passed over: see `prove`.
        """
        with reading():
            return skip(self.inner, count, draws, read_first=digest != 0)

    def prove(self, count: int) -> int | None:
        """Return the digest of `count` items by which a follower's iterator was moved, passing over them."""
        with reading():
            return prove(self.inner, count)

    def check(self, first: int, end: int) -> None:
        """Raises: Unsupported if an item from `first` up to `end` was changed since: a redo reads them again."""
        for item in itertools.islice(self._kept, first - self._first_kept, end - self._first_kept):
            item.check()

    def forget_before(self, position: int) -> None:
        while self._first_kept < position:
            self._kept.popleft()
            self._first_kept += 1


class RewoundByItself:
    """Marks iterators that may be given to a call as they are."""


@contextlib.contextmanager
def reading() -> Iterator[None]:
    RewindIterator.reading += 1
    try:
        yield
    finally:
        RewindIterator.reading -= 1


class IteratorTable:
    """The rewindable stand-in of every iterator seen in the arguments of recent calls."""

    def __init__(self) -> None:
        self._table: dict[int, RewindIterator] = {}

    def wrap(self, value: Any) -> tuple[Any, list[RewindIterator]]:
        """Return `value` (an iterator, a list of them, or None) with stand-ins, and the stand-ins in order."""
        if isinstance(value, (list, tuple)):
            wrapped = [self.wrap(item) for item in value]
            every = {id(one): one for _, found in wrapped for one in found}  # the same one may be given twice
            return type(value)(item for item, _ in wrapped), list(every.values())
        if isinstance(value, RewindIterator):
            return value, [value]
        if value is None or isinstance(value, RewoundByItself):
            return value, []
        if not hasattr(type(value), "__next__"):  # Megatron's RerunDataIterator has no __iter__
            raise Unsupported(
                f"a training call was given a {type(value).__name__} to read data from",
                "an iterator, a list of iterators, or None",
                f"pass iter(...) of it, or {POINTER}",
            )
        stand_in = self._table.get(id(value))
        if stand_in is None or stand_in.inner is not value:
            stand_in = self._table[id(value)] = RewindIterator(value)
        return stand_in, [stand_in]

    def keep_only(self, used: list[tuple[RewindIterator, int]]) -> None:
        """Forget all but `used`: every (stand-in, position) that a logged call starts from."""
        first: dict[RewindIterator, int] = {}
        for stand_in, position in used:
            first[stand_in] = min(position, first.get(stand_in, position))
        self._table = {key: one for key, one in self._table.items() if one in first}
        for stand_in, position in first.items():
            stand_in.forget_before(position)
