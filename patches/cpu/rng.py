"""Randomness: the CUDA generator becomes the CPU generator.

On a GPU host the two are separate: whatever draws from the CPU generator in one rank only (a DataLoader without a
generator of its own does, at every `iter`) would here shift the dropout masks of that rank.
"""

from __future__ import annotations

from typing import Any

import torch


def apply() -> None:
    torch_generators()
    megatron_tracker()


def torch_generators() -> None:
    """Megatron's RNG tracker seeds and reads the device's generator through `torch.cuda`."""

    def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)  # not that function itself: torch's compiler wants to know one from the other

    modules: list[Any] = [torch.cuda, torch.cuda.random]
    for module in modules:
        module.get_rng_state, module.set_rng_state, module.manual_seed = get_rng_state, set_rng_state, manual_seed


def megatron_tracker() -> None:
    """The tracker's own accessors index `torch.cuda.default_generators`, which is empty without a GPU."""
    import megatron.core.tensor_parallel.random as tracker

    tracker._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    tracker._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
