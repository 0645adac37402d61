"""What an interrupted forward, backward or update leaves behind in Megatron-core's gradient machinery.

Source: megatron/core/distributed/param_and_grad_buffer.py (0.16.1): bucket groups keep communication handles,
a dispatched flag, counts of gradients seen, and `is_last_microbatch`, which `no_sync()` clears and only its
`finally` sets again. The caller has cleared the frames of the interruption before (else that `finally` would run
inside a later step: wrong gradients three steps after a swap, measured).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def reset_gradient_buckets(chunks: Iterable[Any]) -> None:
    """Every bucket group of every model chunk as between two steps."""
    for chunk in chunks:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            group.grad_reduce_handle = None
            group.param_gather_handle = None
            group.param_gather_dispatched = False
            group.per_param_grad_ready_counts = {}
            group.is_last_microbatch = True
            # As in a fresh process: a newcomer knows no order of gradients yet, and all ranks must reduce in one order.
            group.is_first_batch = True
            group.golden_per_param_grad_ready_counts = {}
