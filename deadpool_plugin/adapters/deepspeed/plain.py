"""Plain values of DeepSpeed's and torch's small objects with state: engines' counters, schedules, loss scalers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import Unsupported
from ...worker.adapter import Scalars

_PLAIN = (bool, int, float, str, type(None))


def some(owner: Any, names: Sequence[str]) -> Scalars:
    """Those attributes `names` that `owner` has."""
    return {name: vars(owner)[name] for name in names if name in vars(owner)}


def plain_state(owner: Any) -> Scalars:
    """The plain values of a schedule or scaler, and by attribute those of the parts it consists of."""
    attributes = vars(owner) if owner is not None else {}
    return {
        "values": {name: _copied(value) for name, value in attributes.items() if _is_plain(value)},
        "parts": {name: [plain_state(part) for part in found] for name, found in _parts(attributes).items()},
    }


def load_plain_state(owner: Any, state: Scalars) -> None:
    """Put back what `plain_state` gave, in place."""
    for name, value in state["values"].items():
        live = vars(owner).get(name)
        if isinstance(live, dict):  # a Counter stays one
            live.clear()
            live.update(_copied(value))
        else:
            setattr(owner, name, _copied(value))
    parts = _parts(vars(owner)) if state["parts"] else {}
    for name, states in state["parts"].items():
        for part, its in zip(parts[name], states, strict=True):
            load_plain_state(part, its)


def check_schedule(schedule: Any) -> None:
    """Raises: Unsupported, naming what a schedule saves in checkpoints and `plain_state` does not have."""
    attributes = vars(schedule) if hasattr(schedule, "state_dict") else {}
    parts = _parts(attributes)
    for part in [part for found in parts.values() for part in found]:
        check_schedule(part)
    saved = schedule.state_dict() if attributes else {}
    for name in [name for name, value in attributes.items() if name in saved and not _is_plain(value)]:
        if name not in parts and saved[name] is not None:
            raise Unsupported(
                f"the schedule {type(schedule).__name__} has the state {name!r}, a {type(saved[name]).__name__}",
                "plain data, and schedules of these",
                "leave it out of its state_dict() if it never changes, or step a schedule of the script's own",
            )


def _parts(attributes: Scalars) -> dict[str, list[Any]]:
    """Return the parts of a schedule: other schedules, and functions that are objects with values of their own."""
    found = {}
    for name, value in attributes.items():
        parts = value if isinstance(value, (list, tuple)) else [value]
        if parts and all(map(_is_part, parts)):
            found[name] = list(parts)
    return found


def _is_part(value: Any) -> bool:
    if isinstance(value, (torch.nn.Module, type)) or hasattr(value, "param_groups") or not hasattr(value, "__dict__"):
        return False
    return callable(value) or (hasattr(value, "step") and hasattr(value, "state_dict"))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.keys())) and all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN) or (isinstance(value, (list, tuple)) and all(map(_is_plain, value)))


def _copied(value: Any) -> Any:
    """Plain data with containers of its own."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(map(_copied, value))
    return value
