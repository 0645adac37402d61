"""Attention: megatron-core's own refuses context parallelism, which only TransformerEngine's has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def apply() -> None:
    attention_with_context_parallel()


def attention_with_context_parallel() -> None:
    """`DotProductAttention` (transformer/dot_product_attention.py:58) asserts a context-parallel size of 1. Here it
    gathers keys and values of the group and masks by global position, as TransformerEngine's "all_gather" does."""
    import megatron.core.transformer.dot_product_attention as module

    attention = module.DotProductAttention
    original_init, original_forward = attention.__init__, attention.forward

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        size, config.context_parallel_size = config.context_parallel_size, 1
        try:
            original_init(self, config, *args, **kwargs)
        finally:
            config.context_parallel_size = size

    def forward(self: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core import parallel_state

        if self.config.context_parallel_size == 1:
            return original_forward(self, query, key, value, mask, *args, **kwargs)
        group = parallel_state.get_context_parallel_group()
        gather: Any = AllGather
        key, value = gather.apply(key, group), gather.apply(value, group)
        mask = causal_mask(query.shape[0], group.rank(), group.size())
        return original_forward(self, query, key, value, mask, *args, **kwargs)

    attention.__init__, attention.forward = init, forward


def causal_mask(length: int, rank: int, size: int) -> torch.Tensor:
    """[1, 1, length, size * length] bool, True where `rank`'s queries must not look: gathered keys of later tokens."""
    keys = torch.cat([positions(length, other, size) for other in range(size)])
    return (keys[None, :] > positions(length, rank, size)[:, None])[None, None]


def positions(length: int, rank: int, size: int) -> torch.Tensor:
    """Global positions of a rank's tokens: the sequence is dealt out in 2 * size chunks, from both ends."""
    half = length // 2
    first, last = rank * half, (2 * size - 1 - rank) * half
    return torch.cat([torch.arange(first, first + half), torch.arange(last, last + half)])


class AllGather(torch.autograd.Function):
    """Concatenation along the sequence over a group; backward adds up and scatters."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        whole = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        part = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(part, grad.contiguous(), group=ctx.group)
        return part, None
