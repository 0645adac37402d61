"""Functions of Megatron's that become calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ...errors import WHOLE_STEP, Unsupported
from ...worker.adapter import CallHandler, CallKind, Followed


def wrap(
    owner: Any,
    name: str,
    kind: CallKind,
    *,
    handler: CallHandler,
    within: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    told: Callable[..., Followed] | None = None,
) -> None:
    """Replace `owner.name` by a function that hands the original, which runs `within` that, to `handler`, as the call
    `told` makes of it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        with within():
            return original(*args, **kwargs)

    function = told(run) if told is not None else run

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return handler(name, kind, function, args, kwargs)

    setattr(owner, name, call)


def refuse_outside(owner: Any, name: str, is_outside: Callable[[], bool], remedy: str) -> None:
    """`owner.name` does what no redo would do again where it is called outside of every call."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if is_outside():
            raise Unsupported(
                f"the script has called {owner.__name__}.{name} itself, which a swap would leave out of what is redone",
                "it within a training call",
                f"{remedy}, or {WHOLE_STEP}",
            )
        return original(*args, **kwargs)

    setattr(owner, name, function)
