"""Moving a newcomer's data iterators by what the rank itself pulled, without reading where that can be.

A process that takes a rank over in step 50,000 must not read 50,000 batches first. What is not read must not be
missed. Items a rank drew random numbers for come with their random states (`draws`). But a data set may have generators
of its own, and worker processes may draw where nobody sees it: only what is surely known to draw nothing is skipped.

Rules of this file: afterwards the iterator gives next what the rank's own gives next. Thread: the main one's.
Source: torch/utils/data/dataloader.py, alike from 2.9 to 2.15 (which hands workers the data set in a list).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import default_collate, default_convert
from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from ..errors import Divergence
from . import proof, rng

WRAPPERS: dict[type, tuple[str, str]] = {}
"""Iterators of exactly these types hand out what the one in their first attribute gives, and need not be asked
themselves. While the second attribute ("": none) is true they repeat what they have given, and are not moved."""
DRAWS_NOTHING: list[Callable[[Any], bool]] = []
"""Each tells whether reading an item of a data set surely draws no random numbers but from the item's index."""


def skip(
    iterator: Iterator[Any], count: int, draws: Sequence[Sequence[Any]] = (), read_first: bool = False
) -> int | None:
    """Move `iterator` forward by `count` items.

    Of a DataLoader only the sampler is asked if an adapter knows its data set (which must be a map-style one) and it
    collates as torch does; with worker processes not before somebody reads on. Anything else pays the price of reading.

    Args:
        draws: (number of an item, the random states before it) of each one that was drawn for.
        read_first: read what an iterator gives first, so that it can be compared.

    Returns: the digest of the items, None if they were passed over.
    """
    reader: Any = iterator
    while type(reader) in WRAPPERS:
        attribute, unless = WRAPPERS[type(reader)]
        if unless and getattr(reader, unless):
            return None
        reader = getattr(reader, attribute)
    known = type(reader) in _READERS and _is_known(reader) and not (read_first and reader._num_yielded == 0)
    single = known and type(reader) is _SingleProcessDataLoaderIter
    if known and not single and not draws:
        _Behind.fall(reader, count)
        return None
    before = {number: states for number, states in draws}
    indices, digests = deque[Any](maxlen=proof.ITEMS_MAX), []
    for number in range(count):
        if number in before:
            rng.restore_host(before[number])
        if single:
            indices.append(_pass_over(reader))
        else:
            digests.append(proof.digest(next(iterator)))
    if single:
        reader.passed_over = indices
        return None
    return proof.combined(digests)


def prove(iterator: Iterator[Any], count: int) -> int | None:
    """The digest of the last `count` items that `skip` has passed over, without moving `iterator`; None of others.

    They are read in this process, also if the loader has others: they depend on their indices alone.
    """
    reader: Any = iterator
    while type(reader) in WRAPPERS:
        reader = getattr(reader, WRAPPERS[type(reader)][0])
    if type(reader) is _Behind:
        return proof.combined(reader.catch_up(count))
    if type(reader) is not _SingleProcessDataLoaderIter or not hasattr(reader, "passed_over"):
        return None
    return proof.combined([proof.digest(reader._dataset_fetcher.fetch(index)) for index in reader.passed_over])


def _is_known(reader: Any) -> bool:
    """Return whether a batch surely depends on its indices alone."""
    plain = reader._dataset_kind == _DatasetKind.Map and reader._collate_fn in (default_collate, default_convert)
    return plain and any(knows(reader._dataset) for knows in DRAWS_NOTHING)


def _pass_over(reader: Any) -> Any:
    """Go on as if a batch had been read that no worker process has been asked for yet. Returns: its indices."""
    index = reader._next_index()
    reader._num_yielded += 1
    return index


class _Behind(_MultiProcessingDataLoaderIter):
    """An iterator that is yet to be moved forward: once, by all it has missed, when somebody reads on.

    Its worker processes were asked for some batches as soon as it was made; those have to be taken from them, and step
    by step each of them would be followed by another one.
    """

    _behind: int

    @classmethod
    def fall(cls, reader: Any, count: int) -> None:
        """Let `reader` be (further) behind; it is of this class from now on."""
        reader._behind = count + (reader._behind if type(reader) is cls else 0)
        reader.__class__ = cls

    def _stand_up(self) -> int:
        self.__class__ = _MultiProcessingDataLoaderIter  # type: ignore[assignment]
        return self._behind

    def __next__(self) -> Any:
        self.catch_up(0)
        return next(self)

    def catch_up(self, look_at: int) -> list[int]:
        """Move forward by all that was missed. Returns: the digests of the last `look_at` items of it."""
        count = self._stand_up()
        asked_for = self._send_idx - self._rcvd_idx
        indices, digests = deque[Any](maxlen=min(look_at, proof.ITEMS_MAX)), []
        try:
            for _ in range(count - asked_for):
                indices.append(_pass_over(self))
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
        create: Any = _DatasetKind.create_fetcher
        fetcher = create(self._dataset_kind, self._dataset, self._auto_collation, self._collate_fn, self._drop_last)
        return [*digests, *(proof.digest(fetcher.fetch(index)) for index in indices)]

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """It begins anew (`persistent_workers`): nothing is missed of that."""
        self._stand_up()
        self._reset(loader, first_iter)


_READERS = (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter, _Behind)
"""Exactly these: a library's own class of them may do more."""
