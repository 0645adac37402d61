"""Gradient memory that outlives a step: a parameter that had a gradient in one step and has none in a later is refused.

Rules of this file: with ZeRO 3, and with an offloaded optimizer, DeepSpeed writes a step's gradients over those of the
step before. A parameter without one is then updated with what lies there, or adds to it, and no snapshot holds that.
One that never had a gradient has zeros there, on every process, and so is harmless.
Source: DeepSpeed 0.18.0 to 0.19.8, runtime/zero/stage3.py `partition_grads`, stage_1_and_2.py
`copy_grads_in_partition`; both write over what there is in a step's first backward, and add to it in later ones. What
is offloaded is copied in the last backward only, of which `norm_for_param_grads` tells.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...errors import Unsupported


def lasts(engine: Any) -> bool:
    """Return whether the engine keeps gradients so."""
    stage = engine.zero_optimization_stage()
    return stage == 3 or (stage > 0 and bool(getattr(engine.optimizer, "cpu_offload", False)))


class LastingGradients:
    """The model's parameters that have had gradients, as far as this rank keeps them."""

    def __init__(self, optimizer: Any, module: Any) -> None:
        named = module.named_parameters()
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad and _has_part(parameter)]
        self._optimizer, self._trained = optimizer, trained
        self._numbers = {id(parameter): number for number, (_, parameter) in enumerate(trained)}
        self._ever: set[int] = set()
        self._now: set[int] = set()
        """In this step."""
        self._at_once: set[int] = set()
        """In its first backward."""
        name = "partition_grads" if hasattr(optimizer, "partition_grads") else "copy_grads_in_partition"
        original = getattr(optimizer, name)

        @functools.wraps(original)
        def write(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            self._note(parameters if isinstance(parameters, list) else [parameters])
            return original(parameters, *args, **kwargs)

        setattr(optimizer, name, write)

    def _note(self, parameters: Sequence[Any]) -> None:
        numbers = {self._numbers[id(parameter)] for parameter in parameters if id(parameter) in self._numbers}
        self._now |= numbers
        if self._optimizer.micro_step_id <= 0:
            self._at_once |= numbers

    def check(self) -> None:
        """Before an update. Raises: Unsupported."""
        missed = self._ever - self._at_once
        if not missed and getattr(self._optimizer, "norm_for_param_grads", None) is not None:
            told = self._optimizer.norm_for_param_grads
            missed = {n for n in self._ever if self._optimizer.get_param_id(self._trained[n][1]) not in told}
        if missed:
            raise Unsupported(
                f"{len(missed)} parameters (first: {self._trained[min(missed)][0]}) had gradients in an earlier step "
                "and get none in every backward of this one; DeepSpeed would use the old ones, which are not mirrored",
                "with ZeRO 3, or an offloaded optimizer, parameters that take part in every backward or in none",
                "let the loss depend on all of them (add 0.0 * output.sum() of what is left out), or use ZeRO 1 or 2 "
                "without offload",
            )
        self._ever |= self._now
        self.forget()

    def forget(self) -> None:
        """A step begins."""
        self._now, self._at_once = set(), set()

    def without(self) -> list[int]:
        """For a snapshot: the parameters that never had one, by their numbers."""
        return [number for number in range(len(self._trained)) if number not in self._ever]

    def load(self, without: Sequence[int]) -> None:
        self._ever = set(range(len(self._trained))).difference(without)
        self.forget()


def _has_part(parameter: Any) -> bool:
    """Return whether this rank has a part of it. With ZeRO 3 the last ranks have none of the smallest."""
    if not hasattr(parameter, "ds_numel"):
        return True
    return bool(dist.get_rank(parameter.ds_process_group) * parameter.partition_numel() < parameter.ds_numel)
