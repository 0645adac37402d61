"""The place of tensors: every CUDA device becomes the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint")


def apply() -> None:
    current_device()
    factories()
    moves()
    type_names()


def current_device() -> None:
    """Buffers of DDP, the distributed optimizer and point-to-point receives name `torch.cuda.current_device()`."""
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment, return-value]


def factories() -> None:
    """Schedules, clipping, the grad scaler and the causal mask create tensors with the literal `device="cuda"`;
    a pinned tensor needs CUDA too."""
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def moves() -> None:
    """`broadcast_data` and the optimizers call `.cuda()` on tensors, model set-up on modules."""
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]


def type_names() -> None:
    """The optimizers sort parameters by `param.type() == "torch.cuda.FloatTensor"` and refuse all other names."""
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_as_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str) and self.device.type == "cpu":
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = type_as_on_cuda  # type: ignore[assignment, method-assign]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)
