"""Saving with megatron-core's dist_checkpointing in runs that are compared: nothing here is needed to save.

Rules of this file: for the scripts and tests that look at what was saved; not part of `patches.cpu.apply`.
"""

from __future__ import annotations

import functools
import multiprocessing
import queue
from types import SimpleNamespace
from typing import Any

import torch


class Results:
    """Pipe of forked processes through which Megatron's writers report.

    Megatron's own is served by a process that is spawned, imports the script again and takes seconds to start.
    """

    def __init__(self) -> None:
        self.pipe: Any = multiprocessing.get_context("fork").SimpleQueue()
        self.put = self.pipe.put

    def get_nowait(self) -> Any:
        if self.pipe.empty():
            raise queue.Empty
        return self.pipe.get()

    def __reduce__(self) -> tuple[Any, ...]:
        """To a persistent writer, which has inherited it."""
        return _results, ()


def _results() -> Any:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    return filesystem_async._results_queue


def results_by_pipe() -> None:
    """Patch every process of a run, before it saves."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = Results()


def persistent_writers() -> None:
    """Megatron's persistent writer is spawned, too, and asks for its GPU; it is given the very tensors that training
    goes on with, of which it takes a copy that is none where there is no GPU (`preload_tensors`)."""
    from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async

    forking = multiprocessing.get_context("fork")
    async_utils.mp = SimpleNamespace(get_context=lambda method=None: forking)
    original = filesystem_async.FileSystemWriterAsync.prepare_write_data

    @functools.wraps(original)
    def prepare_write_data(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.write_buckets = [
            (path, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for path, key, (data, tensors) in self.write_buckets
        ]

    filesystem_async.FileSystemWriterAsync.prepare_write_data = prepare_write_data


def same_padding() -> None:
    """Megatron saves the padding of its buckets as torch.empty left it: let that be the same in every run."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.sharded_state_dict

    @functools.wraps(original)
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            return original(self, *args, **kwargs)
        finally:
            torch.use_deterministic_algorithms(False)

    DistributedOptimizer.sharded_state_dict = sharded_state_dict
