"""Adam's state beside its parameters: made before the first step as Adam itself would make it, and its counts of steps.

Source: torch/optim/adam.py `_init_group`; deepspeed/ops/adam/fused_adam.py and cpu_adam.py `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import Unsupported
from ..base_optimizer import MOMENTS, refuse_third_moment
from ..options import REMEDY

SUPPORTED = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
MAKERS = ("torch", "deepspeed", "apex")
"""Others give the same names to optimizers that keep another state (8 bits of it)."""


def check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that is not in SUPPORTED. Raises: Unsupported."""
    kind = type(optimizer)
    if kind.__name__ not in SUPPORTED or kind.__module__.partition(".")[0] not in MAKERS:
        raise Unsupported(
            f"the optimizer is {kind.__module__}.{kind.__name__}",
            f"one of {', '.join(SUPPORTED)} of {', '.join(MAKERS)}",
            f"use one of them, {REMEDY}",
        )


def check(optimizer: torch.optim.Optimizer, masters: Sequence[torch.Tensor], schedule: Any = None) -> None:
    """Raises: Unsupported, naming the optimizer, option or parameter that cannot be protected."""
    check_kind(optimizer)
    refuse_third_moment(optimizer.param_groups)
    if getattr(schedule, "cycle_momentum", False) and is_in_cpp(optimizer, masters):
        name = type(optimizer).__name__
        raise Unsupported(
            f"{type(schedule).__name__} changes the betas of {name}, whose powers then depend on all of them",
            "betas that stay the same",
            "cycle the learning rate only, or use torch's AdamW",
        )
    for master in masters:
        if master.dtype != torch.float32:
            raise Unsupported(
                f"the optimizer updates parameters in {master.dtype}",
                "fp32 masters",
                "leave master weights, gradients and optimizer states in fp32",
            )


def complete(optimizer: torch.optim.Optimizer, masters: Sequence[torch.Tensor]) -> None:
    """Give every master the state it has before its first update, unless it has one."""
    counts_in_tensors = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for master in masters:
        state = optimizer.state[master]
        if "exp_avg" not in state:
            device = master.device if on_device else torch.device("cpu")
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device=device) if counts_in_tensors else 0
            for name in MOMENTS:
                state[name] = torch.zeros_like(master.data, memory_format=torch.preserve_format)


def moments(optimizer: torch.optim.Optimizer, masters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [optimizer.state[master][name] for master in masters for name in MOMENTS]


def replace_moments(
    optimizer: torch.optim.Optimizer, masters: Sequence[torch.Tensor], ours: Sequence[torch.Tensor]
) -> None:
    """Put `ours`, in the order of `moments`, into the optimizer, with the values of what is there now."""
    places = [(optimizer.state[master], name) for master in masters for name in MOMENTS]
    for (state, name), mine in zip(places, ours, strict=True):
        if state[name] is not mine:
            mine.copy_(state[name])
            state[name] = mine


def steps(optimizer: torch.optim.Optimizer, masters: Sequence[torch.Tensor]) -> list[float]:
    return [float(optimizer.state[master]["step"]) for master in masters]


def load_steps(optimizer: Any, masters: Sequence[torch.Tensor], saved: Sequence[float], before: int) -> None:
    """`before`: the steps that had been made when this job began, from a checkpoint."""
    for master, step in zip(masters, saved, strict=True):
        state = optimizer.state[master]
        if isinstance(state["step"], torch.Tensor):
            state["step"].fill_(step)
        else:
            state["step"] = int(step)
    if is_in_cpp(optimizer, masters):
        _count_again(optimizer, before, int(max(saved)))


def is_in_cpp(optimizer: Any, masters: Sequence[torch.Tensor]) -> bool:
    """Return whether the update is DeepSpeed's C++ on the CPU."""
    return type(optimizer).__name__ in ("FusedAdam", "DeepSpeedCPUAdam") and masters[0].device.type == "cpu"


def _count_again(optimizer: Any, before: int, steps: int) -> None:
    """DeepSpeed's C++ Adam keeps the powers of the betas as running products, which differ from powers in their last
    bits (csrc/includes/cpu_adam.h, `IncrementStep`: a power at the job's first step, products from there). Only steps
    get it there: these are of nothing.
    """
    nothing = [torch.zeros(1) for _ in range(4)]
    for step in range(before + 1, steps + 1):
        for group in optimizer.param_groups:  # they share the products
            _update(optimizer, group, step, nothing)


def _update(optimizer: Any, group: dict[str, Any], step: int, tensors: list[torch.Tensor]) -> None:
    options = group["lr"], *group["betas"], group["eps"]
    if type(optimizer).__name__ == "FusedAdam":
        optimizer.multi_tensor_adam(
            2048 * 32, optimizer._dummy_overflow_buf, [[one] for one in tensors], *options, step,
            optimizer.adam_w_mode, group["bias_correction"], group["weight_decay"],
        )  # fmt: skip
    else:
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id, step, *options, group["weight_decay"], group["bias_correction"], *tensors
        )
