"""Functions of other modules replaced by ours, wherever a script may find them. Standard library only."""

from __future__ import annotations

import builtins
import functools
import gc
import glob
import importlib.abc
import io
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

Function = Callable[..., Any]
# Python 3.13's Path.glob has copies of its own.
_COPIES = [owner for name, owner in vars(glob).items() if isinstance(owner, type) and hasattr(owner, "scandir")]


def around(original: Function, ours: Function) -> Function:
    """Return a function like `original` that calls `ours(original, *args, **kwargs)`."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    return wrapper


class PatchSet:
    """Functions and methods that call ours, until `undo`."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, ours: Function, owner: Any, *names: str) -> None:
        """Call `ours(original, *args, **kwargs)` in the place of each function, and of the copies in Python's glob."""
        for name in names:
            original = getattr(owner, name)
            wrapper = around(original, ours)
            for one in (owner, *_COPIES):
                if getattr(one, name, None) is original:
                    setattr(one, name, staticmethod(wrapper) if one in _COPIES else wrapper)
                    self._done.append((one, name, original, wrapper))

    def wrap_open(self, ours: Function) -> None:
        self.wrap(ours, builtins, "open")
        self.wrap(ours, io, "open")

    def undo(self) -> None:
        for owner, name, original, wrapper in self._done:
            if getattr(owner, name) is wrapper:  # else somebody has wrapped ours, which does nothing from here on
                setattr(owner, name, staticmethod(original) if owner in _COPIES else original)
        self._done.clear()


def _names(module: object) -> dict[str, Any]:
    return getattr(module, "__dict__", None) or {}


class Aliases:
    """Where a module has a function of another one, as `from torch import save` makes it, in all modules of today.

    Looking at an object writes its reference count, which costs a forked process a copy of that page. So the process
    that forks looks at its modules once; its children look here, and at the modules that they have imported themselves.
    """

    def __init__(self) -> None:
        self._modules: dict[str, int] = {}  # how many names each had when it was looked at
        self._places: dict[int, list[tuple[dict[str, Any], str]]] = {}  # by the function's `id`

    def note(self) -> None:
        """Add what was imported since, before a fork. Garbage collections, which write, too, skip all of it."""
        for title, module in list(sys.modules.items()):
            names = _names(module)
            if self._modules.get(title) == len(names):
                continue
            self._modules[title] = len(names)
            for name, value in list(names.items()):
                if type(value) is FunctionType and (value.__module__, value.__name__) != (title, name):
                    self._places.setdefault(id(value), []).append((names, name))
        gc.freeze()

    def put(self, original: Any, wrapper: Any) -> bool:
        """Put `wrapper` in the place of `original` in those modules. Returns: whether it was a function of theirs."""
        if not isinstance(original, FunctionType) or original.__module__ not in self._modules:
            return False
        home, own_name = _names(sys.modules.get(original.__module__)), original.__name__
        if home.get(own_name) is not original:
            return False
        places = [(home, own_name), *self._places.pop(id(original), ())]
        for names, name in places:
            if names.get(name) is original:
                names[name] = wrapper
        self._places[id(wrapper)] = places
        return True


before_fork = Aliases()


def replace(wrappers: dict[Any, Any]) -> None:
    """Put each wrapper in the place of its original under whatever name a module has it, the script's own included."""
    if all([before_fork.put(original, wrapper) for original, wrapper in wrappers.items()]):
        # A garbage collection looks only at objects that were made since the fork.
        modules = [sys.modules["__main__"], *(one for one in gc.get_objects() if issubclass(type(one), ModuleType))]
    else:
        modules = list(sys.modules.values())
    found = {id(original): wrapper for original, wrapper in wrappers.items()}
    for module in modules:
        names = _names(module)
        for name in [name for name, value in list(names.items()) if id(value) in found]:
            names[name] = found[id(names[name])]


def when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with the module `name` right after it is imported; now, if it has been already."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _Finder(name, act))
    elif not _is_folder(getattr(sys.modules[name], "__spec__", None)):
        act(sys.modules[name])


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the finders behind it find one module, which is acted on once it is executed."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        # Also asked by who only wants to know whether there is such a module: the one that is imported comes later.
        if name != self._name or self not in sys.meta_path:
            return None
        behind: list[Any] = sys.meta_path[sys.meta_path.index(self) + 1 :]  # another of these may be in front of it
        found = (finder.find_spec(name, path, target) for finder in behind if hasattr(finder, "find_spec"))
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None and not _is_folder(spec):

            def exec_module(execute: Function, module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self._act(module)

            spec.loader.exec_module = around(spec.loader.exec_module, exec_module)
        return spec


def _is_folder(spec: ModuleSpec | None) -> bool:  # of that name, as the `wandb` that runs are kept in
    return spec is not None and spec.origin is None and spec.submodule_search_locations is not None
