"""Mixtures of experts: a name that only TransformerEngine binds, and counts that are numbers only on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist


def apply() -> None:
    router_without_transformer_engine()
    split_sizes_as_numbers()


def router_without_transformer_engine() -> None:
    """`RouterGatingLinearFunction` (transformer/moe/moe_utils.py:1192) asks whether `te_general_gemm` is None, but
    without TransformerEngine 0.16.1 does not bind the name at all."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def split_sizes_as_numbers() -> None:
    """`maybe_move_tensor_to_cpu` (transformer/moe/moe_utils.py:1078) turns the token counts per rank into numpy arrays
    only if they are on a GPU; all_to_all takes numbers, not tensors."""
    original = dist.all_to_all_single

    @functools.wraps(original)
    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return original(output, input, numbers(output_split_sizes), numbers(input_split_sizes), *args, **kwargs)

    dist.all_to_all_single = all_to_all_single


def numbers(sizes: Any) -> Any:
    """Leave what is no tensor as it is."""
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
