"""Data iterators that can be rewound by a few steps, and moved forward by what another process of the rank pulled.

Rules of this file: the user's iterator is never rebuilt on a survivor. What it gave out is kept while a redo could ask
for it again, its large tensors by reference (Megatron-LM fills and slices the dict it got). An iterator may draw random
numbers (a loader does at each new epoch): a redo must draw as many although it reads nothing, and a newcomer the same.
A process that takes a rank over in step 50,000 must not read 50,000 batches first, but only what surely draws nothing
is skipped: a data set may have generators of its own, and worker processes may draw where nobody sees it.
Source: torch/utils/data/dataloader.py, alike from 2.9 to 2.15 (which hands workers the data set in a list).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from torch.utils.data import default_collate, default_convert
from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from ..errors import Divergence, GenerationChanged, Unsupported
from . import proof, rng
from .copies import COPIED_BYTES_MAX, Kept

POINTER = "wrap what it reads from: deadpool_plugin.data.resumable(...)"
Numbered = Sequence[Sequence[Any]]  # pairs: the number of an item, and what is known of it
WRAPPERS: dict[type, tuple[str, str]] = {}
"""Iterators of exactly these types hand out what the one in their first attribute gives, and need not be asked
themselves. While the second attribute is true they repeat what they have given, and are not moved."""
DRAWS_NOTHING: list[Callable[[Any], bool]] = []
"""Each tells whether reading an item of a data set surely draws no random numbers but from the item's index."""


@contextlib.contextmanager
def reading() -> Iterator[None]:
    RewindIterator.readers += 1
    try:
        yield
    finally:
        RewindIterator.readers -= 1


class Item(NamedTuple):
    kept: Kept  # what one pull gave
    drew: tuple[dict[str, Any], dict[str, Any]] | None  # the random states before and after it, if it drew
    digest: int


class RewindIterator:
    """Stand-in of the user's iterator, which keeps the items since `forget_before` by position (how many came before).

    `readers`: how many of these read from their sources now; what is read below them is theirs to rewind.
    """

    readers: ClassVar[int] = 0

    def __init__(self, inner: Any) -> None:
        self.inner, self.position = inner, 0
        self._kept: dict[int, Item] = {}
        self._cut_off = False  # by a swap, in the middle of a pull: a generator says then that it has no more items

    def __iter__(self) -> RewindIterator:
        return self

    def __next__(self) -> Any:
        item = self._kept.get(self.position)
        if item is None:
            value = self._pull()
        else:
            self.check(self.position, self.position + 1)
            value = item.kept.again()
            if item.drew is not None:
                rng.restore_host(item.drew[1])
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
                value = self._read()
        except GenerationChanged:
            self._cut_off = True
            raise
        after = rng.capture_host()
        drew = None if rng.equal(before, after) else (before, after)
        self._kept[self.position] = Item(Kept(value), drew, proof.digest(value))
        return value

    def _read(self) -> Any:
        return next(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def rewind(self, position: int) -> None:
        assert position == self.position or {position - 1, position} & self._kept.keys(), "rewound past what is kept"
        self.position = position

    def _items(self, first: int, end: int) -> list[Item]:
        return [self._kept[position] for position in range(first, end)]

    def pulled_since(self, position: int) -> list[Any]:
        """Return how many items; of those that drew, what they drew (`rng.drawn`); the digest of all."""
        items = self._items(position, self.position)
        drawn = [[number, rng.drawn(*item.drew)] for number, item in enumerate(items) if item.drew is not None]
        return [len(items), drawn, proof.combined([item.digest for item in items])]

    @reading()
    def skip(self, count: int, draws: Numbered = (), digest: int = 0) -> int | None:
        """Move the user's iterator, in a follower, by what `pulled_since` gave in the rank itself.

        Of a DataLoader only the sampler is asked where an adapter knows the data set; if it has worker processes, not
        before somebody reads on. Anything else pays the price of reading; so do the first items that have a `digest`.

        Returns: the digest of what was read here; None if it was passed over.
        """
        reader = self.inner
        while type(reader) in WRAPPERS:
            attribute, repeats = WRAPPERS[type(reader)]
            if getattr(reader, repeats):
                return None
            reader = getattr(reader, attribute)
        known = (  # a batch depends on its indices alone
            type(reader) in _READERS
            and not (digest and reader._num_yielded == 0)
            and reader._dataset_kind == _DatasetKind.Map
            and reader._collate_fn in (default_collate, default_convert)
            and any(draws_nothing(reader._dataset) for draws_nothing in DRAWS_NOTHING)
        )
        single = known and type(reader) is _SingleProcessDataLoaderIter
        if known and not single and not draws:
            reader._behind = count + (reader._behind if type(reader) is _Behind else 0)
            reader.__class__ = _Behind
            return None
        before = {number: states for number, states in draws}
        indices, digests = deque[Any](maxlen=proof.ITEMS_MAX), []
        for number in range(count):
            if number in before:
                rng.restore_host(before[number])
            if single:  # as if it had been read
                indices.append(reader._next_index())
                reader._num_yielded += 1
            else:
                digests.append(proof.digest(next(self.inner)))
        if single:
            reader.passed_over = indices
            return None
        return proof.combined(digests)

    def check(self, first: int, end: int) -> None:
        """Raises: Unsupported if an item from `first` up to `end` was changed since: a redo reads them again."""
        for item in self._items(first, end):
            if (shape := item.kept.changed()) is not None:
                raise Unsupported(
                    f"a tensor of {shape} in a batch that a training call had read was changed in place",
                    f"tensors above {COPIED_BYTES_MAX} bytes that a loader gives to stay as they are until two "
                    "snapshots later",
                    "make new tensors for each batch, and change copies of them; if a loader has two such buffers or "
                    "more in turn, mirror_every: 1 will do",
                )

    def forget_before(self, position: int) -> None:
        self._kept = {place: item for place, item in self._kept.items() if place >= position}


class RewoundByItself:
    """Iterators that may be given to a call as they are."""


class IteratorTable:
    """The rewindable stand-in of every iterator seen in the arguments of recent calls."""

    def __init__(self) -> None:
        self._table: dict[int, RewindIterator] = {}

    def wrap(self, value: Any) -> tuple[Any, list[RewindIterator]]:
        """Return `value` (an iterator, a list of them, or None) with stand-ins, and the stand-ins in order."""
        if isinstance(value, (list, tuple)):
            wrapped = [self.wrap(item) for item in value]
            stand_ins = dict.fromkeys(one for _, found in wrapped for one in found)  # the same one may be given twice
            return type(value)(item for item, _ in wrapped), list(stand_ins)
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
        """Forget all but `used`: every (stand-in, position) that a logged call starts from, in the order of calls."""
        first = dict(reversed(used))  # of one stand-in the position at the earliest call
        self._table = {key: one for key, one in self._table.items() if one in first}
        for stand_in, position in first.items():
            stand_in.forget_before(position)


@reading()
def prove(iterator: Iterator[Any], count: int) -> int | None:
    """Read the last `count` items that `skip` has passed over, in this process. Returns: their digest; else None."""
    reader: Any = iterator
    while type(reader) in WRAPPERS:
        reader = getattr(reader, WRAPPERS[type(reader)][0])
    if type(reader) is _Behind:
        return proof.combined(reader.catch_up(count))
    if type(reader) is not _SingleProcessDataLoaderIter or not hasattr(reader, "passed_over"):
        return None
    return proof.combined([proof.digest(reader._dataset_fetcher.fetch(index)) for index in reader.passed_over])


class _Behind(_MultiProcessingDataLoaderIter):
    """An iterator that is yet to be moved forward: once, by all it has missed, when somebody reads on.

    Its worker processes were asked for some batches as soon as it was made; those have to be taken from them, and step
    by step each of them would be followed by another one.
    """

    _behind: int

    def __next__(self) -> Any:
        self.catch_up(0)
        return next(self)

    def catch_up(self, look_at: int) -> list[int]:
        """Move forward by all that was missed. Returns: the digests of the last `look_at` items of it."""
        self.__class__ = _MultiProcessingDataLoaderIter  # type: ignore[assignment]
        count, asked_for = self._behind, self._send_idx - self._rcvd_idx
        indices, digests = deque[Any](maxlen=min(look_at, proof.ITEMS_MAX)), []
        try:
            for _ in range(count - asked_for):
                indices.append(self._next_index())  # type: ignore[no-untyped-call]
                self._num_yielded += 1
            for number in range(min(count, asked_for)):
                item = next(self)
                if number >= count - look_at:
                    digests.append(proof.digest(item))
        except StopIteration:
            raise Divergence(
                f"a DataLoader over a {type(self._dataset).__name__} ended before {count} batches",
                "as many batches as the process before this one read",
                "give every process of the job the same data",
            ) from None
        given = self._dataset_kind, self._dataset, self._auto_collation, self._collate_fn, self._drop_last
        fetcher = _DatasetKind.create_fetcher(*given)
        return [*digests, *(proof.digest(fetcher.fetch(index)) for index in indices)]

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.__class__ = _MultiProcessingDataLoaderIter  # type: ignore[assignment]
        self._reset(loader, first_iter)  # it begins anew (`persistent_workers`): nothing is missed of that


_READERS = (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter, _Behind)
"""Exactly these: a library's own class of them may do more."""
