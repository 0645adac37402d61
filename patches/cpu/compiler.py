"""torch.compile: what megatron-core hands to a compiler runs as it is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def apply() -> None:
    compile_nothing()
    stop_the_loaded_compiler()


def compile_nothing() -> None:
    """megatron/core/jit.py and fusions/: `jit_fuser` is torch.compile, at import time. On a CPU the fused functions
    would call a C++ compiler in every process at their first use; importing the compiler alone is 2.8 of the 4 CPU
    seconds that importing megatron-core takes."""
    torch.compile = as_written


def as_written(model: Callable[..., Any] | None = None, **options: Any) -> Any:
    """torch.compile's call and decorator forms, without compiling."""
    return model if model is not None else lambda function: function


def stop_the_loaded_compiler() -> None:
    """Let functions run as written that were wrapped already, where megatron-core was imported before."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.disable = True  # type: ignore[attr-defined]
