"""Layer norms: the fused ones need CUDA, the plain ones refuse sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch


def apply() -> None:
    norms_with_sequence_parallel()


def norms_with_sequence_parallel() -> None:
    """`WrappedTorchNorm` (transformer/torch_norm.py:32) asserts that sequence parallelism is off; all that is missing
    is the mark on the parameters by which `finalize_model_grads` knows to reduce their gradients over the TP group."""
    import megatron.core.transformer.torch_norm as torch_norm

    original = torch_norm.WrappedTorchNorm.__new__

    def create(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, hidden_size, eps, *args, **kwargs)
        norm = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
        module = norm(hidden_size, eps=eps)
        for parameter in module.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return module

    torch_norm.WrappedTorchNorm.__new__ = create
