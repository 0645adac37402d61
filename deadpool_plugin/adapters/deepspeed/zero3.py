"""Parameters that ZeRO 3 gathers for the script: with `GatheredParameters`, and where it calls the model itself.

A part of the model on its own is refused: nobody could say what of its communication must be done again.
Source: DeepSpeed 0.19.8, runtime/zero/partition_parameters.py, partitioned_param_coordinator.py, parameter_offload.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...errors import WHOLE_STEP, Unsupported
from ...worker.codec import TENSOR_LIMIT_BYTES
from ..common import REMEDY, Function, before, in_place_of
from .calls import EngineCall, EngineCalls, Forward


def install(calls: EngineCalls) -> None:
    """Wrap and refuse. Once, before the engine is built."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    def gathering(kind: type[EngineCall], name: str, original: Function, context: Any, *exc: Any) -> Any:
        if not calls.is_training or not context.enabled:
            return original(context, *exc)
        return calls.make(kind, f"GatheredParameters.{name}", original, context, *exc)

    for name, kind in (("__enter__", Enter), ("__exit__", Exit)):
        in_place_of(GatheredParameters, name)(functools.partial(gathering, kind, name))
    refuse_parts(calls)
    refuse_taking_hooks(calls)


def refuse_parts(calls: EngineCalls) -> None:
    """Refuse to gather parameters for anything but calls, once training has begun."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    def check(coordinator: Any, module: Any, *_: Any, **__: Any) -> None:
        if calls.is_training and not calls.busy:
            raise Unsupported(
                f"a part of the engine's model ({type(module).__name__}) was called by itself, with ZeRO 3",
                "the whole model to be called: engine(...), or engine.module(...)",
                f"let the model's forward choose what it computes, or {WHOLE_STEP}",
            )

    before(PartitionedParameterCoordinator, "fetch_sub_module", check)


def refuse_taking_hooks(calls: EngineCalls) -> None:
    """Refuse to take the hooks off for a while, as `unwrap_model_for_generation` of DeepSpeed and trl does."""
    # It asks for them first. A swap meanwhile would run the model without them, a later one believe in the old ones.
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    ending = list[bool]()  # by engine.destroy()
    before(DeepSpeedZeRoOffload, "_remove_module_hooks", lambda _: ending.append(True))

    def get(name: str, offload: Any) -> Any:
        if calls.is_training and not ending:
            raise Unsupported(
                "ZeRO 3's hooks were to be taken off the engine's model during training (unwrap_model_for_generation)",
                "them to stay",
                f"generate with the model as it is (generate(..., synced_gpus=True)), {REMEDY}",
            )
        return vars(offload)[name]

    def put(name: str, offload: Any, hooks: Any) -> None:
        vars(offload)[name] = hooks

    for name in ("forward_hooks", "backward_hooks"):
        setattr(DeepSpeedZeRoOffload, name, property(functools.partial(get, name), functools.partial(put, name)))


class Enter(EngineCall):
    """All of the context's parameters are gathered: again after a swap inside it, with the body's changes."""

    def bind(self, context: Any) -> None:
        super().bind(context)
        self._parameters = context.params
        self.held: list[torch.Tensor] = []
        """Parameters as the script has them while it is inside, with its changes in place."""
        context.deadpool_enter = self

    def __call__(self) -> None:
        super().__call__()
        for parameter, held in zip(self._parameters, self.held, strict=False):
            parameter.data = held

    def outcome(self, value: Any) -> Any:
        self.held = [parameter.data for parameter in self._parameters]
        size = sum(one.numel() * one.element_size() for one in self.held)
        return self.held if size <= TENSOR_LIMIT_BYTES else None

    def skipped(self, outcome: Any) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        for number, parameter in enumerate(self._parameters):
            form = {"dtype": parameter.dtype, "device": parameter.device}
            fill = float("nan") if parameter.dtype.is_floating_point else 0  # enough for a save, and no number
            value = torch.full(parameter.ds_shape, fill, **form) if outcome is None else outcome[number].to(**form)
            parameter.data, parameter.ds_status = value, ZeroParamStatus.AVAILABLE


class Exit(EngineCall):
    """The parameters are partitioned again, with the body's changes where the context has a `modifier_rank`."""

    def bind(self, context: Any, *exc: Any) -> None:
        super().bind(context)
        self._exc, self._parameters = exc, context.params
        self._enter: Enter | None = vars(context).pop("deadpool_enter", None)
        parts = [] if context.src_rank is None else [parameter.ds_tensor for parameter in self._parameters]
        self._before, self._made = [(part, part.clone()) for part in parts], list[tuple[torch.Tensor, torch.Tensor]]()

    def __call__(self) -> None:
        exc, self._exc = self._exc, (None, None, None)
        super().__call__(*exc)
        for part, made in self._made:  # the body is not done again
            part.copy_(made)

    def outcome(self, value: Any) -> Any:
        self._made = [(part, part.clone()) for part, before in self._before if not torch.equal(part, before)]
        self._before = []
        if self._enter is not None:
            self._enter.held = []

    def skipped(self, outcome: Any) -> None:
        from deepspeed.runtime.zero.partition_parameters import free_param

        for parameter in self._parameters:
            free_param(parameter)


def watch_model(calls: EngineCalls, engine: Any) -> None:
    """Make calls of an engine's model past the engine its calls, with ZeRO 3. Again after the model was compiled."""
    # With other stages a process that follows does it, too. Hugging Face's Trainer evaluates so. torch's
    # Module._wrapped_call_impl asks `_compiled_call_impl` first, hooks and all, and copies and pickles lack it.
    inner = vars(engine.module).get("_compiled_call_impl") or engine.module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return calls.make(Forward, "engine.forward", past_engine, engine, *args, **kwargs)

    def past_engine(_: Any, /, *args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    if engine.zero_optimization_stage() == 3 and not hasattr(inner, "deadpool_watches"):
        vars(call)["deadpool_watches"] = True
        engine.module._compiled_call_impl = call
