"""Clean-up of Megatron-core's gradient machinery after an interrupted forward, backward or update.

Source: megatron/core/distributed/param_and_grad_buffer.py (0.16.1): bucket groups keep communication handles,
a dispatched flag, counts of gradients seen, and `is_last_microbatch`, which `no_sync()` clears and only its
`finally` sets again. The schedules enter `no_sync()` by hand, so an interruption leaves it open, and its `finally`
runs whenever the generator is collected: inside a later step that gives wrong gradients (measured: three steps after
a swap). Hence `NoSync`, which closes only what it opened in the same life of the bucket groups.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

_lives = 0
"""How often the bucket groups were reset after an interruption."""


def reset_gradient_buckets(chunks: Iterable[Any]) -> None:
    """Every bucket group of every model chunk as between two steps."""
    global _lives
    _lives += 1
    for chunk in chunks:
        for group in bucket_groups(chunk):
            group.grad_reduce_handle = None
            group.param_gather_handle = None
            group.param_gather_dispatched = False
            group.per_param_grad_ready_counts = {}
            group.is_last_microbatch = True
            group.grad_reduce_finished = False  # from 0.18 on
            # As in a fresh process: a newcomer knows no order of gradients yet, and all ranks must reduce in one order.
            group.is_first_batch = True
            group.golden_per_param_grad_ready_counts = {}


def forget_listings() -> None:
    """Forget which files cached logits on remote storage have (megatron/training, from core_v0.19.0 on): rank 0 tells
    the others in a broadcast at the first look, and a newcomer looks for the first time."""
    module = sys.modules.get("megatron.training.distillation.utils_logits")
    if module is not None:
        vars(module).get("_STORAGE_GLOB_CACHE", {}).clear()


def bucket_groups(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def no_sync(chunk: Any) -> NoSync:
    """Stand in for `DistributedDataParallel.no_sync`."""
    return NoSync(chunk)


class NoSync:
    """Gradients of these microbatches are not reduced yet; closes only what it opened since the last interruption."""

    def __init__(self, chunk: Any) -> None:
        self._chunk, self._life = chunk, _lives

    def __enter__(self) -> None:
        self._life = _lives
        self._set_last_microbatch(False)

    def __exit__(self, *error: object) -> None:
        if self._life == _lives:
            self._set_last_microbatch(True)

    def _set_last_microbatch(self, value: bool) -> None:
        for group in bucket_groups(self._chunk):
            group.is_last_microbatch = value


def set_forward_hooks(chunk: Any, enabled: bool) -> None:
    """Set whether forwards wait for gathered parameters: scripts switch that off around evaluation and saving."""
    if not chunk.use_forward_hook or enabled == bool(chunk.remove_forward_pre_hook_handles):
        return
    if enabled:
        chunk.enable_forward_pre_hook()
    else:
        chunk.disable_forward_pre_hook(param_sync=False)
