"""Data iterators that can be rewound by a few steps, and moved forward without reading.

Rules of this file: the user's iterator is never rebuilt on a survivor; what it gave out is kept while a redo
could ask for it again. A newcomer's iterator is moved to the same position by the counts in the call records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from ..errors import Unsupported


class RewindIterator:
    """Stands in for the user's iterator; keeps the items since `forget_before`.

    `position` counts the items handed out since this object exists.
    """

    def __init__(self, inner: Iterator[Any]) -> None:
        self.inner = inner
        self.position = 0
        self._kept: deque[Any] = deque()
        self._first_kept = 0

    def __iter__(self) -> RewindIterator:
        return self

    def __next__(self) -> Any:
        index = self.position - self._first_kept
        if index == len(self._kept):
            self._kept.append(next(self.inner))
        item = self._kept[index]
        self.position += 1
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def rewind(self, position: int) -> None:
        assert self._first_kept <= position <= self._first_kept + len(self._kept), "rewound past what is kept"
        self.position = position

    def forget_before(self, position: int) -> None:
        while self._first_kept < position:
            self._kept.popleft()
            self._first_kept += 1


def skip(iterator: Iterator[Any], count: int) -> None:
    """Move `iterator` forward by `count` items.

    A single-process DataLoader iterator over a map-style data set only draws from its sampler (nothing is read:
    torch/utils/data/dataloader.py `_next_index`); anything else pays the price of reading.
    """
    from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

    loader: Any = iterator if type(iterator) is _SingleProcessDataLoaderIter else None
    for _ in range(count):
        if loader is not None and loader._dataset_kind == _DatasetKind.Map:
            loader._next_index()
            loader._num_yielded += 1
        else:
            next(iterator)


class IteratorTable:
    """The rewindable stand-in of every iterator seen in the arguments of recent calls."""

    def __init__(self) -> None:
        self._table: dict[int, RewindIterator] = {}

    def wrap(self, value: Any) -> tuple[Any, list[RewindIterator]]:
        """`value` (an iterator, a list of them, or None) with stand-ins, and the stand-ins in order."""
        if isinstance(value, (list, tuple)):
            wrapped = [self.wrap(item) for item in value]
            every = {id(one): one for _, found in wrapped for one in found}  # the same one may be given twice
            return type(value)(item for item, _ in wrapped), list(every.values())
        if isinstance(value, RewindIterator):
            return value, [value]
        if value is None:
            return value, []
        if not hasattr(type(value), "__next__"):  # Megatron's RerunDataIterator has no __iter__
            raise Unsupported(
                f"a training call was given a {type(value).__name__} to read data from",
                "an iterator, a list of iterators, or None",
                "pass iter(...) of it",
            )
        stand_in = self._table.get(id(value))
        if stand_in is None or stand_in.inner is not value:
            stand_in = self._table[id(value)] = RewindIterator(value)
        return stand_in, [stand_in]

    def keep_only(self, used: list[tuple[RewindIterator, int]]) -> None:
        """`used`: every (stand-in, position) a logged call starts from; forget everything before and beside."""
        first: dict[int, int] = {}
        for stand_in, position in used:
            first[id(stand_in)] = min(position, first.get(id(stand_in), position))
        self._table = {key: one for key, one in self._table.items() if id(one) in first}
        for one in self._table.values():
            one.forget_before(first[id(one)])
