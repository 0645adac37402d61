"""Plain values of DeepSpeed's and torch's small objects with state: engines' counters, schedules, loss scalers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...worker.adapter import Scalars

_PLAIN = (bool, int, float, str, type(None))


def some(owner: Any, names: Sequence[str]) -> Scalars:
    """Those attributes `names` that `owner` has."""
    return {name: vars(owner)[name] for name in names if name in vars(owner)}


def plain_state(owner: Any) -> Scalars:
    """The plain values of a schedule or scaler, and of those it consists of; its call-backs are not state."""
    state: Scalars = {}
    for name, value in vars(owner).items() if owner is not None else ():
        if isinstance(value, _PLAIN):
            state[name] = value
        elif isinstance(value, (list, tuple)) and all(isinstance(item, _PLAIN) for item in value):
            state[name] = type(value)(value)
        elif isinstance(value, (list, tuple)) and all(hasattr(item, "step") for item in value):
            state[name] = {"parts": [plain_state(item) for item in value]}
    return state


def load_plain_state(owner: Any, state: Scalars) -> None:
    """Put back what `plain_state` gave, in place."""
    for name, value in state.items():
        if isinstance(value, dict):
            for item, part in zip(getattr(owner, name), value["parts"], strict=True):
                load_plain_state(item, part)
        else:
            setattr(owner, name, type(value)(value) if isinstance(value, (list, tuple)) else value)
