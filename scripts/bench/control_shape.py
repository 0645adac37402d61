"""Size of a job of bench_control_plane.py, and the agents that share a process. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

FIRST, SECOND = 0, 1
"""The coordinator, and who coordinates after it."""


class Failed(Exception):
    """The job did not do what it should; the message says why and where its output is."""


@dataclass(frozen=True)
class Shape:
    """Numbers of a job: agents, those that share a process, ranks per node, and members that are lost one by one before
    the coordinator is. Whoever is lost or coordinates has a process of its own."""

    nodes: int
    per_process: int
    slots: int
    losses: int

    @property
    def name(self) -> str:
        shared = f":{self.per_process}" if self.per_process > 1 else ""
        return f"{self.nodes}{shared}" + (f"x{self.slots}" if self.slots > 1 else "")

    @property
    def spares(self) -> int:
        """One for each loss, and one that is left."""
        return self.losses + 2

    @cached_property
    def victims(self) -> tuple[int, ...]:
        """The members to lose, far from each other on the ring. Raises: Failed if there are too few nodes."""
        candidates = self.nodes - self.spares - 2
        if not 1 <= self.losses <= candidates // 2:
            raise Failed(f"{self.losses} losses and the coordinator's in {self.nodes} nodes: at least 1, or fewer")
        return tuple(2 + candidates * number // self.losses for number in range(self.losses))

    @cached_property
    def processes(self) -> list[tuple[int, ...]]:
        """The nodes of each agents' process."""
        alone = {FIRST, SECOND, *self.victims}
        others = [node for node in range(self.nodes) if node not in alone]
        shared = [tuple(others[at : at + self.per_process]) for at in range(0, len(others), self.per_process)]
        return sorted([(node,) for node in alone] + shared)
