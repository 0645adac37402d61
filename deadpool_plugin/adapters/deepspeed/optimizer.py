"""The optimizer under an engine: Adam's state, parameters that no update changes, gradients that outlive a step.

Source: DeepSpeed 0.18.0 to 0.19.8, ops/adam/fused_adam.py and cpu_adam.py `step`, runtime/zero/stage3.py
`partition_grads`, stage_1_and_2.py `copy_grads_in_partition`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from ...errors import Divergence, Unsupported
from ..common import MOMENTS, REMEDY, AdamState, before

SUPPORTED = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
MAKERS = ("torch", "deepspeed", "apex")
"""Others give the same names to optimizers that keep another state (8 bits of it)."""


def check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Raises: Unsupported for an optimizer that is not in SUPPORTED."""
    kind = type(optimizer)
    if kind.__name__ not in SUPPORTED or kind.__module__.partition(".")[0] not in MAKERS:
        raise Unsupported(
            f"the optimizer is {kind.__module__}.{kind.__name__}",
            f"one of {', '.join(SUPPORTED)} of {', '.join(MAKERS)}",
            f"use one of them, {REMEDY}",
        )


class Adam(AdamState):
    """An engine's basic optimizer. Raises: Unsupported, naming it, the option or parameter that is not protected."""

    def __init__(self, optimizer: Any, masters: Sequence[torch.Tensor], schedule: Any = None) -> None:
        check_kind(optimizer)
        self._name = type(optimizer).__name__
        self.is_in_cpp = self._name in ("FusedAdam", "DeepSpeedCPUAdam") and masters[0].device.type == "cpu"
        if getattr(schedule, "cycle_momentum", False) and self.is_in_cpp:
            raise Unsupported(
                f"{type(schedule).__name__} changes the betas of {self._name}, whose powers then depend on all of them",
                "betas that stay the same",
                "cycle the learning rate only, or use torch's AdamW",
            )
        super().__init__(optimizer, masters, "leave master weights, gradients and optimizer states in fp32")
        self._steps_before = self._count()  # with a checkpoint the job begins at another one than 0

    def _count(self) -> int:
        return int(max(step or 0 for step in self.steps()))

    def take_back(self) -> None:
        """Put our groups and moments back, with the values of those that a loaded checkpoint has put in their place."""
        for mine, theirs in zip(self.groups, self.optimizer.param_groups, strict=True):
            if mine is not theirs:
                mine.update(theirs)
        self.optimizer.param_groups = self.groups
        places = [(state, name) for state in self.states() for name in MOMENTS]
        for (state, name), moment in zip(places, self.moments, strict=True):
            if state[name] is not moment:
                moment.copy_(state[name])
                state[name] = moment

    def load_steps(self, steps: Sequence[float | None]) -> None:
        super().load_steps(steps)
        if not self.is_in_cpp:
            return
        # DeepSpeed's C++ Adam keeps the powers of the betas as running products, which differ from powers in their last
        # bits: a power at the job's first step, products from there (csrc/includes/cpu_adam.h, `IncrementStep`). Only
        # steps get it there: these update nothing. All groups share the products.
        nothing = [torch.zeros(1) for _ in range(4)]
        for step in range(self._steps_before + 1, self._count() + 1):
            for group in self.groups:
                options = group["lr"], *group["betas"], group["eps"]
                decay, corrects = group["weight_decay"], group["bias_correction"]
                if self._name == "FusedAdam":
                    self.optimizer.multi_tensor_adam(
                        2048 * 32, self.optimizer._dummy_overflow_buf, [[one] for one in nothing], *options, step,
                        self.optimizer.adam_w_mode, corrects, decay,
                    )  # fmt: skip
                else:
                    self.optimizer.ds_opt_adam.adam_update(
                        self.optimizer.opt_id, step, *options, decay, corrects, *nothing
                    )


class Frozen:
    """Parameters that no update changes (the base of a LoRA): never copied, compared with a newcomer's by a digest."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self.digest, self._forms = _digest(parameters), [_form(parameter) for parameter in parameters]

    def compare(self, digest: str) -> None:
        """Raises: Divergence if the rank itself has others."""
        if digest != self.digest:
            raise Divergence(
                f"this process made frozen parameters of digest {self.digest}",
                f"{digest}, as the rank itself has them: they are not mirrored",
                "load or make them alike on every rank: from the same file, or with the same seed",
            )

    def check_unchanged(self) -> None:
        """Raises: Unsupported. Sees all changes but those in place of `parameter.data`, which nothing counts."""
        for parameter, form in zip(self._parameters, self._forms, strict=True):
            if _form(parameter) != form:
                raise Unsupported(
                    f"a parameter of {list(parameter.shape)} that the optimizer does not update was changed",
                    "such parameters to stay as they are: they are not mirrored",
                    "make it a buffer of the model that its forward changes",
                )

    def check_loaded(self) -> None:
        """Raises: Unsupported if a checkpoint that was loaded had others."""
        if _digest(self._parameters) != self.digest:
            raise Unsupported(
                "engine.load_checkpoint changed frozen parameters in mid-training",
                "a checkpoint of this job: they are not mirrored",
                "load it before the first forward",
            )
        self._forms = [_form(parameter) for parameter in self._parameters]


def _form(parameter: torch.Tensor) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


@torch.no_grad()
def _digest(parameters: Sequence[torch.Tensor]) -> str:
    found = xxhash.xxh3_128()
    for parameter in parameters:
        found.update(f"{parameter.dtype} {list(parameter.shape)}".encode())
        found.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


class LastingGradients:
    """Parameters that have had gradients, as far as this rank keeps them.

    With ZeRO 3, and with an offloaded optimizer, gradient memory outlives a step. A step's first backward writes over
    it, later ones add to it. A parameter without a gradient would be updated with the old one, which no snapshot holds.
    One that never had a gradient has zeros there on every process. Other engines' gradients end with the step.
    """

    def __init__(self, engine: Any) -> None:
        self._optimizer = optimizer = engine.optimizer
        self._trained: dict[Any, str] = {}
        self._ever: set[Any] = set()
        self._now: dict[Any, bool] = {}
        """Whether it was in the step's first backward, of those with gradients in this step."""
        stage = engine.zero_optimization_stage()
        if stage != 3 and not (stage > 0 and getattr(optimizer, "cpu_offload", False)):
            return
        named = engine.module.named_parameters()
        self._trained = {one: name for name, one in named if one.requires_grad and _has_part(one)}

        def note(written: Any, *_: Any, **__: Any) -> None:
            for parameter in written if isinstance(written, list) else [written]:
                if parameter in self._trained:
                    self._now.setdefault(parameter, optimizer.micro_step_id <= 0)

        before(optimizer, "partition_grads" if stage == 3 else "copy_grads_in_partition", note)

    def check(self) -> None:
        """Raises: Unsupported, before an update that would use gradients of an earlier step."""
        missed = {parameter for parameter in self._ever if not self._now.get(parameter)}
        # An offloaded optimizer copies gradients in the last backward only, and notes the norms of those it has.
        if not missed and (norms := getattr(self._optimizer, "norm_for_param_grads", None)) is not None:
            missed = {one for one in self._ever if self._optimizer.get_param_id(one) not in norms}
        if missed:
            first = next(name for parameter, name in self._trained.items() if parameter in missed)
            raise Unsupported(
                f"{len(missed)} parameters (first: {first}) had gradients in an earlier step "
                "and get none in every backward of this one; DeepSpeed would use the old ones, which are not mirrored",
                "with ZeRO 3, or an offloaded optimizer, parameters that take part in every backward or in none",
                "let the loss depend on all of them (add 0.0 * output.sum() of what is left out), or use ZeRO 1 or 2 "
                "without offload",
            )
        self._ever |= self._now.keys()
        self._now = {}

    def without(self) -> list[int]:
        """List the parameters that never had a gradient by number: names of all would fill a snapshot's header."""
        return [number for number, parameter in enumerate(self._trained) if parameter not in self._ever]

    def load(self, without: Sequence[int]) -> None:
        never = set(without)
        self._ever, self._now = {one for number, one in enumerate(self._trained) if number not in never}, {}


def _has_part(parameter: Any) -> bool:
    if not hasattr(parameter, "ds_numel"):
        return True
    # With ZeRO 3 the last ranks have no part of the smallest parameters.
    return bool(dist.get_rank(parameter.ds_process_group) * parameter.partition_numel() < parameter.ds_numel)
