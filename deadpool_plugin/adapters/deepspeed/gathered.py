"""Parameters that a script gathers itself with ZeRO 3: entering and leaving `GatheredParameters` are calls.

Rules of this file: what the body of the `with` reads is there again after a swap inside it, and what it changes is in
a redo what it was the first time. Followers are told small parameters; larger ones are full of NaN there: enough for a
save, which a follower skips, and never taken for numbers. In training only, and outside the engine's calls.
Source: DeepSpeed 0.19.8, runtime/zero/partition_parameters.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...worker.adapter import CallKind, Followed
from ...worker.codec import TENSOR_LIMIT_BYTES
from .calls import Calls


def install(calls: Calls) -> None:
    """Wrap entering and leaving. Once, before the engine is built."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    for name, kind in (("__enter__", Enter), ("__exit__", Exit)):
        _wrap(calls, GatheredParameters, name, kind)


def _wrap(calls: Calls, owner: Any, name: str, kind: Callable[..., Followed]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(context: Any, *args: Any) -> Any:
        if calls.busy or not calls.is_training or not context.enabled:
            return original(context, *args)
        call = kind(calls, functools.partial(original, context), context, *args)
        return calls.handler(f"GatheredParameters.{name}", CallKind.PLAIN, call, (), {})

    setattr(owner, name, method)


class Enter(Followed):
    """All of the context's parameters are gathered."""

    def __init__(self, calls: Calls, function: Callable[[], Any], context: Any) -> None:
        self._calls, self._function, self._parameters = calls, function, context.params
        self.held: list[torch.Tensor] = []
        """Parameters as the script has them while it is inside, with its changes in place."""
        context.deadpool_enter = self

    def __call__(self) -> None:
        with self._calls.inside():
            self._function()
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
            fill = float("nan") if parameter.dtype.is_floating_point else 0
            value = torch.full(parameter.ds_shape, fill, **form) if outcome is None else outcome[number].to(**form)
            parameter.data, parameter.ds_status = value, ZeroParamStatus.AVAILABLE


class Exit(Followed):
    """They are partitioned again, where the context has a `modifier_rank` with what the body has made of them there."""

    def __init__(self, calls: Calls, function: Callable[..., Any], context: Any, *exc: Any) -> None:
        self._calls, self._function, self._exc, self._parameters = calls, function, exc, context.params
        self._enter: Enter | None = vars(context).pop("deadpool_enter", None)
        parts = [] if context.src_rank is None else [parameter.ds_tensor for parameter in self._parameters]
        self._parts = [(part, part.clone()) for part in parts]
        self._is_done = False

    def __call__(self) -> None:
        exc, self._exc = self._exc, (None, None, None)
        with self._calls.inside():
            self._function(*exc)
        if self._is_done:
            for part, made in self._parts:  # the body is not done again
                part.copy_(made)

    def outcome(self, value: Any) -> Any:
        self._is_done = True
        self._parts = [(part, part.clone()) for part, before in self._parts if not torch.equal(part, before)]
        if self._enter is not None:
            self._enter.held = []

    def skipped(self, outcome: Any) -> None:
        from deepspeed.runtime.zero.partition_parameters import free_param

        for parameter in self._parameters:
            free_param(parameter)
