"""Remains of an interrupted call in a ZeRO optimizer, put back as they were before the first forward.

Rules of this file: DeepSpeed keeps what is under way (buckets, flags, counts, handles, traces of what is fetched when)
in plain attributes and containers of its optimizer and of the objects below it. All of these are noted once, when
nothing was under way yet, and put back in place: objects and containers stay the same, tensors are noted by
reference, their values are `EngineState`'s (of gradients that outlive a step nobody's: gradients.py). So survivors are
afterwards as a newcomer is, whatever the version keeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...worker.module_state import is_plain

CONTAINERS = (dict, list, set, deque)


class Rest:
    """The state of `root`, and of all objects of DeepSpeed's runtime below it, at the time of the call."""

    def __init__(self, root: Any) -> None:
        self._restores: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self._note(root)

    def restore(self) -> None:
        for restore in self._restores:
            restore()

    def _note(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, CONTAINERS):
            self._seen.add(id(value))
            self._note_container(value)
        elif _is_runtime_object(value):
            self._seen.add(id(value))
            self._note_object(value)

    def _note_object(self, value: Any) -> None:
        attributes = dict(vars(value))

        def restore() -> None:
            # An answer found out once, perhaps by a collective, and kept under a name that was not there: no newcomer
            # has it. What is not plain was allocated on the way, and every process makes it without the others.
            for name in [name for name, found in vars(value).items() if name not in attributes and is_plain(found)]:
                delattr(value, name)
            vars(value).update(attributes)

        self._restores.append(restore)
        for attribute in attributes.values():
            self._note(attribute)

    def _note_container(self, container: Any) -> None:
        items = container.copy()

        def restore() -> None:
            container.clear()
            container.extend(items) if isinstance(container, (list, deque)) else container.update(items)

        self._restores.append(restore)
        for item in items.values() if isinstance(items, dict) else items:
            self._note(item)


class Attributes:
    """The attributes `names` of each of `owners` that has them, and what is in them; no others."""

    def __init__(self, owners: Sequence[Any], names: Sequence[str]) -> None:
        self._noted = [(owner, {name: vars(owner)[name] for name in names if name in vars(owner)}) for owner in owners]
        self._rest = Rest([noted for _, noted in self._noted])

    def restore(self) -> None:
        self._rest.restore()
        for owner, noted in self._noted:
            vars(owner).update(noted)


def _is_runtime_object(value: Any) -> bool:
    """An object with state of DeepSpeed's own: no model, configuration, class or function."""
    if isinstance(value, (torch.nn.Module, torch.Tensor, type)) or not hasattr(value, "__dict__"):
        return False
    module = type(value).__module__
    return module.startswith("deepspeed.runtime.") and ".config" not in module and not _is_frozen(value)


def _is_frozen(value: Any) -> bool:
    parameters: Any = vars(type(value)).get("__dataclass_params__")
    return parameters is not None and bool(parameters.frozen)
