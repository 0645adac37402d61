"""Counts of every agent of bench_control_plane.py, in memory that all of its processes share.

Rules of this file: a row a node, whole numbers only, one writer a row (its agent); the driver reads whenever it likes
and disturbs nobody. Times are nanoseconds of the machine's monotonic clock, the same in all processes.
"""

from __future__ import annotations

import mmap
from typing import get_args

from deadpool_plugin.core.messages import AnyMessage

NONE = -1
"""Value of a field before anything has happened; counts begin at 0."""
KINDS = tuple(kind.__name__ for kind in get_args(AnyMessage))
COUNTS = ("inputs", "protocol_ns", "received", "received_bytes", "troubles", *KINDS)
"""`protocol_ns`: CPU time of deciding and of handing over what was decided. By kind: messages sent."""
LATEST = (
    "generation", "committed", "noticed_ns", "decided_ns", "planned_ns", "planned_cpu_ns", "training_ns", "protected_ns"
)  # fmt: skip
"""`planned_cpu_ns`: CPU time of the agent's process when it learned of the newest plan."""
FIELDS = (*COUNTS, *LATEST)
_PLACE = {name: place for place, name in enumerate(FIELDS)}
_CELL_BYTES = 8


class Row:
    """One node's fields."""

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells

    def add(self, name: str, amount: int = 1) -> None:
        self._cells[_PLACE[name]] += amount

    def set(self, name: str, value: int) -> None:
        self._cells[_PLACE[name]] = value


class Board:
    """Rows for nodes 0 to `nodes` - 1. Make it before forking."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._cells = memoryview(mmap.mmap(-1, nodes * len(FIELDS) * _CELL_BYTES)).cast("q")
        for node in range(nodes):
            for name in LATEST:
                self.row(node).set(name, NONE)

    def row(self, node: int) -> Row:
        return Row(self._cells[node * len(FIELDS) : (node + 1) * len(FIELDS)])

    def column(self, name: str) -> list[int]:
        """The field of every node."""
        return self._cells[_PLACE[name] :: len(FIELDS)].tolist()

    def counts(self) -> dict[str, list[int]]:
        """Every count of every node, now."""
        return {name: self.column(name) for name in COUNTS}
