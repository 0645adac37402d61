"""Exceptions of saves as plain data, raised again in a process that follows.

Rules of this file: no pickle, no import. What is raised again has the text of the original and is of a class made here,
below the nearest one of the original's that the process knows: `except` catches it as it caught the original, and
nothing of that class is run to make it.
"""

from __future__ import annotations

import sys
from typing import Any, cast

RAISED = "raised"
TEXT_MAX = 4096


def encode(error: BaseException) -> dict[str, Any]:
    """The outcome of a call that raised `error`: plain data."""
    kinds = [f"{kind.__module__}:{kind.__qualname__}" for kind in type(error).__mro__]
    arguments: list[Any] = [_plain(error)]
    if isinstance(error, OSError) and isinstance(error.errno, int):
        arguments = [error.errno, _plain(error.strerror)]
    return {RAISED: [kinds, _plain(error), arguments]}


def decode(outcome: Any) -> BaseException | None:
    """Make the exception that `encode` was given; None if `outcome` is that of a call that returned."""
    if not isinstance(outcome, dict) or RAISED not in outcome:
        return None
    kinds, text, arguments = outcome[RAISED]
    name = kinds[0].rpartition(":")[2].rpartition(".")[2]
    return next(filter(None, (_made(kind, name, text, arguments) for kind in filter(None, map(_known, kinds)))))


def _made(kind: type[BaseException], name: str, text: str, arguments: list[Any]) -> BaseException | None:
    made: Any = type(name, (kind,), {"__module__": kind.__module__, "__str__": lambda self: text})
    builtin: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    try:
        return cast(BaseException, builtin.__new__(made, *arguments))
    except TypeError:  # a group of exceptions is not made of a text
        return None


def _known(kind: str) -> type[BaseException] | None:
    module, _, name = kind.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _plain(value: object) -> str:
    """Its text, as one that can be encoded (a file's name may not)."""
    return str(value)[:TEXT_MAX].encode(errors="backslashreplace").decode()
