"""Hugging Face's accelerate with DeepSpeed where there is no GPU: it knows no backend there and would train alone."""

from __future__ import annotations

from typing import Any

import torch


def apply() -> None:
    """Before the first `PartialState`. state.py `_prepare_backend` looks for accelerators, and with DeepSpeed a CPU is
    none of them; its own way for CPUs is one without DeepSpeed."""
    if torch.cuda.is_available():
        return
    from accelerate.state import DistributedType, PartialState

    def prepare_backend(*_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_CPU

    PartialState._prepare_backend = prepare_backend
