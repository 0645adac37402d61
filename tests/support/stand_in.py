"""Stand-ins for what a part under test has beside it, and does not use in that test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

T = TypeVar("T")


class StandIn:
    """Has the methods of `kind`, which do nothing, and no others: one that is renamed is missed. Attributes are set."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        getattr(self._kind, name)
        return lambda *arguments, **fields: None

    if TYPE_CHECKING:

        def __setattr__(self, name: str, value: object) -> None: ...


def stand_in(kind: type[T]) -> T:
    """Make a StandIn of which a test itself uses nothing but what `kind` has."""
    return cast("T", StandIn(kind))


def fake(**attributes: object) -> Any:
    """Make an object that has these attributes; it fits wherever a test puts it."""
    return SimpleNamespace(**attributes)
