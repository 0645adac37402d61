"""Hugging Face's accelerate and Trainer with DeepSpeed where there is no GPU: they would train alone, and in fp32."""

from __future__ import annotations

from typing import Any

import torch


def apply() -> None:
    """Before the first `PartialState`. Two places need this on a machine without a GPU.

    accelerate/state.py `_prepare_backend` looks for accelerators, and with DeepSpeed a CPU is none of them; its own way
    for CPUs is one without DeepSpeed. transformers/training_args.py allows bf16 on CPUs in that way only.
    """
    if torch.cuda.is_available():
        return
    from accelerate.state import DistributedType, PartialState
    from transformers import training_args

    def prepare_backend(*_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_CPU

    PartialState._prepare_backend = prepare_backend
    training_args.is_torch_bf16_gpu_available = lambda: True
