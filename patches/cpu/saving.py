"""Saving with megatron-core's dist_checkpointing in runs that are compared: nothing here is needed to save.

Rules of this file: for the scripts and tests that look at what was saved; not part of `patches.cpu.apply`.
"""

from __future__ import annotations

import functools
import multiprocessing
import queue
from typing import Any

import torch


class Results:
    """What Megatron's writers report through, as a pipe of forked processes.

    Megatron's own is served by a process that is spawned, imports the script again and takes seconds to start.
    """

    def __init__(self) -> None:
        self.pipe: Any = multiprocessing.get_context("fork").SimpleQueue()
        self.put = self.pipe.put

    def get_nowait(self) -> Any:
        if self.pipe.empty():
            raise queue.Empty
        return self.pipe.get()


def results_by_pipe() -> None:
    """In every process of a run, before it saves."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = Results()


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
