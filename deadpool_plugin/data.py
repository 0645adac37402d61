"""Loaders that go on after a swap exactly where they were: on survivors, and on the host that takes over.

    from deadpool_plugin.data import resumable
    loader = resumable(StatefulDataLoader(dataset, batch_size=8, num_workers=4))

Rules of this file: no torch here; without the plugin a loader is given back as it came.
Most scripts need none of this: iterators that Megatron's schedules or a pipeline's `train_batch` are given are rewound
anyway, and a loop that hands its batches to `engine(batch)` reads them outside the calls. It is needed where

- a training call reads from a loader it was not given: a closure, a global, a function under `@deadpool_plugin.step`
  (with a torch DataLoader that is refused at the first step, with other iterables it cannot be seen);
- a loader can be told where to go on, and reading it again would give other data, or take too long.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

Source = TypeVar("Source", bound=Iterable[object])


def resumable(source: Source) -> Source:
    """Return `source` with a position that survives swaps; `source` itself where the plugin is not active.

    Each pass (`iter(...)`, a `for` loop) is one over `source`. Batches and random numbers are those it would give
    without the plugin. Call it once for each loader, before training, and around the outermost iterable
    (`resumable(RepeatingLoader(loader))`); `len` and attributes are the loader's own.

    What it costs:
        Survivors never read anything twice. Batches of the last two steps and the current one are kept, by reference:
        do not change them in place, and let the loader make new ones.
        A source with `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader and nodes, your own) tells its
        state after every step; it is part of the step's snapshot, must be plain data and tensors, and fit into
        `header_kib`. As in torchdata, the pass begun after `load_state_dict` goes on from there. A newcomer sets it and
        reads nothing of what training calls had read; batches that the script itself asks for it reads with the others.
        Any other iterable must give the same items each time the script is run. Whoever takes over, or follows to be
        able to, reads all of it from the beginning, because a data set may draw from generators of its own; except a
        DataLoader over those of Megatron-core's data sets that surely draw nothing.

    Raises:
        deadpool_plugin.errors.Unsupported: for what is no iterable; two passes at a time; more than 64 loaders; in the
        first step, if its `state_dict` is not plain data.

    Thread: the script's main thread reads from it.
    """
    module = sys.modules.get("deadpool_plugin.worker.resumable")
    tapes = module and module.Tapes.installed
    return source if tapes is None else tapes.wrap(source)
