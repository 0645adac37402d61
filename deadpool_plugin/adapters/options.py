"""Options of a framework's that a swap cannot bring back: what they are, and how they are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Unsupported

REMEDY = "or run this job without deadpool_plugin"


@dataclass(frozen=True)
class Option:
    """`path` in a configuration or an engine (attributes, methods without arguments, keys), refused unless it has one
    of `harmless`. `called`: what messages call it, if not by its path."""

    path: str
    reason: str
    remedy: str
    harmless: tuple[Any, ...] = (None, False)
    called: str = ""

    @property
    def name(self) -> str:
        return self.called or self.path

    def value(self, owner: Any) -> Any:
        """Return what `owner` has there; None if it lacks it."""
        for name in self.path.split("."):
            owner = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
            if callable(owner):
                owner = owner()
        return owner


def refuse(owner: Any, options: Sequence[Option]) -> None:
    """Raises: Unsupported, naming the option that is not harmless, why, and what to do instead."""
    for option in options:
        value = option.value(owner)
        if value not in option.harmless:
            harmless = " or ".join(map(repr, option.harmless))
            raise Unsupported(
                f"{option.name} = {value!r} {option.reason}", f"it to be {harmless}", f"{option.remedy}, {REMEDY}"
            )
