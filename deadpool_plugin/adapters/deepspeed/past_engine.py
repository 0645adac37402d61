"""A model that a script calls past its engine: `engine.module(batch)`, or the model it gave to `deepspeed.initialize`.

Rules of this file: with ZeRO 3 such a call communicates (parameters are gathered for it), so it is one as
`engine.forward` is. With other stages it is the script's own affair: a process that follows does it, too. A part of
the model on its own, with ZeRO 3, is refused: nobody could say what of its communication must be done again.
Source: Hugging Face's Trainer evaluates so. DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py; torch's
Module._wrapped_call_impl asks `_compiled_call_impl` first, hooks and all, and leaves it out of copies and pickles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import WHOLE_STEP, Unsupported

if TYPE_CHECKING:
    from .calls import Calls


class ModelCall:
    """Stand-in for an engine's model when that is called."""

    def __init__(self, calls: Calls, engine: Any, inner: Callable[..., Any]) -> None:
        self._calls, self._engine, self._inner = calls, engine, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._calls.busy:
            return self._inner(*args, **kwargs)
        return self._calls.forward(self._call, self._engine, *args, **kwargs)

    def _call(self, engine: Any, *args: Any, **kwargs: Any) -> Any:
        return self._inner(*args, **kwargs)


def watch(calls: Calls, engine: Any) -> None:
    """Calls of the model of `engine` are its calls from here on. To be done again after the model was compiled."""
    model = engine.module
    inner = vars(model).get("_compiled_call_impl") or model._call_impl
    if engine.zero_optimization_stage() == 3 and not isinstance(inner, ModelCall):
        model._compiled_call_impl = ModelCall(calls, engine, inner)


def refuse_parts(calls: Calls) -> None:
    """Once training has begun, gather parameters for nothing but calls."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    owner: Any = PartitionedParameterCoordinator
    original = owner.fetch_sub_module

    @functools.wraps(original)
    def fetch_sub_module(coordinator: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if calls.is_training and not calls.busy:
            raise Unsupported(
                f"a part of the engine's model ({type(module).__name__}) was called by itself, with ZeRO 3",
                "the whole model to be called: engine(...), or engine.module(...)",
                f"let the model's forward choose what it computes, or {WHOLE_STEP}",
            )
        return original(coordinator, module, *args, **kwargs)

    owner.fetch_sub_module = fetch_sub_module
