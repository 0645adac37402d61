"""Reads of gradients, masters and optimizer state (`deepspeed.utils.safe_get_*`), made calls.

Rules of this file: a process that follows makes no gradients and no updates, so it is told what the rank itself got; in
a redo a rank takes part in the communication again. Scripts hold these functions since their first imports, so it is
the functions that change, not their names.
Source: DeepSpeed 0.19.8, utils/tensor_fragment.py.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from ...worker.adapter import CallKind, Followed
from .calls import Calls

NAMES = ("safe_get_full_grad", "safe_get_full_optimizer_state", "safe_get_full_fp32_param", "safe_get_local_grad",
         "safe_get_local_optimizer_state", "safe_get_local_fp32_param")  # fmt: skip


def install(calls: Calls) -> None:
    """Once, before the engine is built."""
    from deepspeed import utils

    for name in NAMES:
        _wrap(calls, getattr(utils, name))


def _wrap(calls: Calls, function: types.FunctionType) -> None:
    name = function.__name__
    original = types.FunctionType(function.__code__, function.__globals__, name, function.__defaults__)

    def read(*args: Any, **kwargs: Any) -> Any:
        if calls.busy or not calls.is_training:
            return original(*args, **kwargs)
        call = Read(calls, functools.partial(original, *args, **kwargs))
        return calls.handler(name, CallKind.PLAIN, call, (), {})

    ours = f"deadpool_{name}"
    function.__globals__[ours] = read
    function.__code__ = _through.__code__.replace(co_name=name, co_names=(ours,))


def _through(*args: Any, **kwargs: Any) -> Any:
    return deadpool_call(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821 (in the functions' own module)


class Read(Followed):
    """Its value is a tensor, or None."""

    def __init__(self, calls: Calls, function: Callable[[], Any]) -> None:
        self._calls, self._function = calls, function

    def __call__(self) -> Any:
        with self._calls.inside():
            return self._function()
