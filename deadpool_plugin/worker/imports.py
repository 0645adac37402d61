"""Something to do with a module as soon as a script imports it, if it ever does. Standard library only."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Act = Callable[[ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Stands in front of the other finders and lets them find; what they found is executed, then acted on."""

    def __init__(self, name: str, act: Act) -> None:
        self._name, self._act = name, act

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Also asked by who only wants to know whether there is such a module: the one that is imported comes later."""
        finders = list(sys.meta_path)
        if name != self._name or self not in finders:
            return None
        behind = finders[finders.index(self) + 1 :]  # another of these may be in front, and asks this one
        others: list[Any] = [other for other in behind if hasattr(other, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None and not _is_folder(spec):
            self._follow(spec)
        return spec

    def _follow(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._act(module)

        loader.exec_module = exec_module


def _is_folder(spec: ModuleSpec | None) -> bool:
    """Return whether what is imported is a mere folder of that name, such as the `wandb` that runs are kept in."""
    return spec is not None and spec.origin is None and spec.submodule_search_locations is not None


def when_imported(name: str, act: Act) -> None:
    """Call `act` with the module `name` right after it is imported; now, if it has been already. Never with a folder
    that happens to have its name."""
    if name in sys.modules:
        if not _is_folder(getattr(sys.modules[name], "__spec__", None)):
            act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, act))
