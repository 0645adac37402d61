"""What a part under test has beside it, and does not use in that test."""

from __future__ import annotations

from typing import Any


class StandIn:
    """Has the methods of `kind`, which do nothing, and no others: one that is renamed is missed. Attributes are set."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        getattr(self._kind, name)
        return lambda *arguments, **fields: None
