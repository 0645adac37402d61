"""Plain values in attributes of a model's modules (a temperature, a count of calls): in every snapshot, if they change.

Rules of this file: only what differs from the values before the first forward is told, by the number of the module: a
newcomer keeps what is its host's own. A module that has come to keep other objects than it had then (the tables of a
rotary embedding) is left alone for good: its values say for what those were made, and a newcomer has none. What torch
and the framework keep on a module is theirs.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .adapter import Scalars

PLAIN = (bool, int, float, str, type(None))
OF_TORCH = frozenset(vars(torch.nn.Module())) | {"_compiled_call_impl"}

ByModule = dict[int, Scalars]
"""Values by the number of their module and their name."""


class _Noted:
    """One module as it was before the first forward."""

    def __init__(self, module: torch.nn.Module, is_theirs: Callable[[str], bool]) -> None:
        self.attributes, self._buffers, self._is_theirs = vars(module), module._buffers, is_theirs
        self.first = {name: value for name, value in self._own() if _is_plain(value)}
        self._objects, self._empty = self._others(self.first), self._count_empty()
        self.is_left_alone = False
        self.look = operator.itemgetter("_modules", "_buffers", *self.first)
        self.looked, self.size = self.look(self.attributes), len(self.attributes)

    def _own(self) -> list[tuple[str, Any]]:
        return [
            (name, value)
            for name, value in self.attributes.items()
            if name not in OF_TORCH and not self._is_theirs(name)
        ]

    def _others(self, values: Scalars) -> dict[str, tuple[Any, int]]:
        """All else that it keeps, and how much is in it."""
        return {
            name: (value, len(value) if isinstance(value, (dict, list, set)) else 0)
            for name, value in self._own()
            if name not in values
        }

    def _count_empty(self) -> int:
        return sum(buffer is None for buffer in self._buffers.values())

    def changed(self) -> Scalars:
        """Its values that are not what they were, and those it had none of."""
        if self.is_left_alone:
            return {}
        values = {name: value for name, value in self._own() if _is_value(value, name in self.first)}
        found = {name: _kept(value) for name, value in values.items() if not self._is_first(name, value)}
        if not found and self.first.keys() <= values.keys():
            self.size = len(self.attributes)  # what came is theirs
            return {}
        others = self._others(values)
        self.is_left_alone = (
            self._count_empty() != self._empty
            or others.keys() != self._objects.keys()
            or any(others[name][0] is not was or others[name][1] != size for name, (was, size) in self._objects.items())
        )
        return {} if self.is_left_alone else found

    def _is_first(self, name: str, value: Any) -> bool:
        return name in self.first and type(value) is type(self.first[name]) and value == self.first[name]

    def load(self, values: Scalars) -> None:
        for name in self.changed().keys() - self.first.keys() - values.keys():
            del self.attributes[name]
        if not self.is_left_alone:
            self.attributes.update(self.first | values)


class Values:
    """Those of `modules`, which are numbered from here on. `is_theirs` knows the attributes of the framework's own."""

    def __init__(self, modules: Iterable[torch.nn.Module], is_theirs: Callable[[str], bool] = lambda _: False) -> None:
        self._noted = [_Noted(module, is_theirs) for module in modules]
        self._newest: ByModule = {}

    def changed(self) -> ByModule:
        """The same object as long as nothing changes: many calls keep it."""
        found = {}
        for number in self._suspects():
            if values := self._noted[number].changed():
                found[number] = values
        if found != self._newest:
            self._newest = found
        return self._newest

    def _suspects(self) -> Iterable[int]:
        try:
            return [
                number
                for number, one in enumerate(self._noted)
                if not one.is_left_alone and (len(one.attributes) != one.size or one.look(one.attributes) != one.looked)
            ]
        except (KeyError, RuntimeError, ValueError):  # one is gone, or is an array now
            return range(len(self._noted))

    def load(self, values: ByModule) -> None:
        """Let them be what `changed` gave."""
        for number in self.changed().keys() | values.keys():
            self._noted[number].load(values.get(number, {}))


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) and not isinstance(value, enum.Enum)


def is_plain(value: Any) -> bool:
    """Tell whether `value` is a plain one, or a dictionary of nothing else."""
    if isinstance(value, dict):
        return all(_is_plain(one) for item in value.items() for one in item)
    return _is_plain(value)


def _is_value(value: Any, was_plain: bool) -> bool:
    """A number may become a tensor of one, as libraries let the longest sequence so far."""
    return _is_plain(value) or (was_plain and isinstance(value, torch.Tensor) and value.numel() == 1)


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
