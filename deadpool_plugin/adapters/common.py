"""The parts that both adapters share: wrapped functions, options refused by name, the state of Adam."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import Unsupported
from ..worker.adapter import Scalars
from ..worker.patching import around

Function = Callable[..., Any]
REMEDY = "or run this job without deadpool_plugin"
MOMENTS = ("exp_avg", "exp_avg_sq")
PLAIN = (bool, int, float, str, type(None), tuple, list)


class Nesting:
    """The calls, or step functions of the script's, that run within each other."""

    _depth = 0

    @property
    def busy(self) -> bool:
        """Return whether a call is under way: what the framework asks of itself is no call."""
        return self._depth > 0

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def in_place_of(owner: Any, name: str) -> Callable[[Function], None]:
    """Put the decorated function in the place of `owner.name`. Its first argument is the original."""
    return lambda function: setattr(owner, name, around(getattr(owner, name), function))


def after_init(cls: type, act: Callable[[Any], None]) -> None:
    """Call `act` with each instance of `cls` once it is initialised."""

    @in_place_of(cls, "__init__")
    def init(original: Function, instance: Any, *args: Any, **kwargs: Any) -> None:
        original(instance, *args, **kwargs)
        act(instance)


@dataclass(frozen=True)
class Option:
    """An option of a framework's that a swap cannot restore.

    `path`: attributes, methods without arguments and keys that lead to its value in a configuration or an engine.
    `harmless`: the values that are not refused. `called`: its name in messages, if it is not the path.
    """

    path: str
    reason: str
    remedy: str = "leave it out"
    harmless: tuple[Any, ...] = (None, False)
    called: str = ""

    @property
    def name(self) -> str:
        return self.called or self.path

    def value(self, owner: Any) -> Any:
        """Return the option's value in `owner`; None if this version lacks it."""
        for name in self.path.split("."):
            owner = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
            if callable(owner):
                owner = owner()
        return owner


def options(paths: str, reason: str, remedy: str = "leave it out", called: str = "") -> list[Option]:
    """Make an option of each of `paths`."""
    return [Option(path, reason, remedy, called=called) for path in paths.split()]


def refuse(owner: Any, options: Sequence[Option]) -> None:
    """Raises: Unsupported, naming the option that is not harmless, why, and what to do instead."""
    for option in options:
        value = option.value(owner)
        if value not in option.harmless:
            harmless = " or ".join(map(repr, option.harmless))
            raise Unsupported(
                f"{option.name} = {value!r} {option.reason}", f"it to be {harmless}", f"{option.remedy}, {REMEDY}"
            )


# ---- the torch optimizer under a framework's own


def refuse_third_moment(groups: Sequence[dict[str, Any]]) -> None:
    if any(group.get("amsgrad") for group in groups):
        raise Unsupported(
            "Adam with amsgrad=True keeps a third moment that is not mirrored",
            "amsgrad=False",
            f"leave it out, {REMEDY}",
        )


def group_scalars(groups: Sequence[dict[str, Any]]) -> list[Scalars]:
    """Collect learning rates, betas and the like of all groups. Raises: Unsupported for other than plain data."""
    for key, value in (item for group in groups for item in group.items()):
        if key != "params" and not isinstance(value, PLAIN):
            raise Unsupported(
                f"parameter group entry {key!r} is {type(value).__name__}", "plain data", f"leave it out, {REMEDY}"
            )
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def load_group_scalars(groups: Sequence[dict[str, Any]], saved: Sequence[Scalars]) -> None:
    for group, values in zip(groups, saved, strict=True):
        for key in [key for key in group if key != "params" and key not in values]:
            del group[key]  # came later: a fused Adam makes its "step" in the first update
        for key, value in values.items():
            mine = group.get(key)
            if not isinstance(mine, tuple):
                group[key] = value
            elif mine != tuple(value):  # equal betas stay one object in all groups, which torch.save writes once
                group[key] = tuple(value)


def load_steps(states: Iterable[dict[str, Any]], steps: Sequence[float | None]) -> None:
    """Set the updates that Adam has counted in each state. None: it counts in the parameter group."""
    for state, step in zip(states, steps, strict=True):
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].fill_(step)
        elif step is not None:
            state["step"] = int(step)
