"""How a function of Megatron's becomes a call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...worker.adapter import CallHandler, CallKind, Followed


def wrap(
    owner: Any, name: str, kind: CallKind, *, handler: CallHandler, told: Callable[..., Followed] | None = None
) -> None:
    """Replace `owner.name` by a function that hands the original to `handler`, as the call `told` makes of it."""
    original = getattr(owner, name)
    function = told(original) if told is not None else original

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return handler(name, kind, function, args, kwargs)

    setattr(owner, name, call)
