"""The nouns of a watched job: nodes, swaps, losses, lines for people.

Rules of this file: plain data. `Node` and `Swap` belong to `JobView`, which alone changes them; the rest is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..core.types import Generation, NodeId, Rank, Step
from ..events import ALIVE_S

SILENT_S = 5 * ALIVE_S
"""A job that has not ended says so, whatever it does or waits for: without a word for so long it is gone."""

SLOW_S = 5.0
SLOW_STEPS = 10
"""A job that trains and has done no step for so many seconds, and so many usual steps, is said to do none."""

State = Literal["joining", "active", "rehearsing", "spare", "lost", "fenced"]
Protection = Literal["not yet", "Mirrored", "Protected", "Unprotected"]
"""The last state of protection. Mirrored: state is safe, but no spare can take some node."""
History = Literal["ok", "filling", "full"]


@dataclass(frozen=True)
class Line:
    """A sentence for people, and the node that said it."""

    time: float
    node: NodeId
    text: str


@dataclass(frozen=True)
class Loss:
    step: Step
    value: float


@dataclass
class Swap:
    """One change of generation; `duration_s` is None until every rank is in training again."""

    generation: Generation
    began: float
    restore_step: Step
    lost: tuple[NodeId, ...]
    takers: dict[NodeId, NodeId]
    joined: tuple[NodeId, ...] = ()
    renewed: tuple[Rank, ...] = ()
    """The ranks that get new processes where they were."""
    duration_s: float | None = None
    first_step_s: float | None = None
    """Until the slowest rank so far had done its first step after the swap."""


@dataclass
class Node:
    host: str = ""
    joined: bool = False
    ranks: tuple[Rank, ...] = ()
    training: bool = False
    ready_for: tuple[Rank, ...] = ()
    cannot: bool = False
    removed: bool = False
    fenced: bool = False
    ended: bool = False
    generation: Generation = 0
    accusers: dict[NodeId, tuple[Generation, float]] = field(default_factory=dict)
    """The nodes that count this node as lost, in which generation and since when; it is decided only when a swap is."""


@dataclass(frozen=True)
class Row:
    """One node as the table shows it. `stands_in_for`: the ranks a spare has rehearsed."""

    node: NodeId
    host: str
    state: State
    ranks: tuple[Rank, ...]
    stands_in_for: tuple[Rank, ...]
    generation: Generation
    step: Step
    loss: Loss | None


def span(seconds: float) -> str:
    """A while, roughly: `40 s`, `12 min`, `2 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
