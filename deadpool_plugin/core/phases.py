"""The phases of one node, and every move between them.

Rules of this file: the table is the truth. A move that it lacks raises and is a bug of ours; each of its moves is made
by some test; the diagram in core/README.md is made of it. May import nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Phase(Enum):
    """Phase of a node. The value says it to people."""

    OUTSIDE = "has not met the others"
    JOINING = "asks a running job to take it in"
    STARTING = "the script begins"
    RESTORING = "a plan is carried out"
    TRAINING = "all ranks are in training"
    FENCED = "its processes are interrupted, the next world is undecided"
    WAITING = "the same, and a host must join before anything is decided"
    ENDED = "has left"


_LEAVES = "verdict, or out"
_FENCES = "asked to promise, or without contact"

MOVES: Mapping[Phase, Mapping[Phase, str]] = {
    Phase.OUTSIDE: {
        Phase.STARTING: "all have met",
        Phase.JOINING: "met a job that runs",
        Phase.ENDED: _LEAVES,
    },
    Phase.JOINING: {
        Phase.RESTORING: "decided",
        Phase.STARTING: "decided, before training",
        Phase.ENDED: _LEAVES,
    },
    Phase.STARTING: {
        Phase.TRAINING: "all ranks ready",
        Phase.FENCED: _FENCES,
        Phase.RESTORING: "decided unasked",
        Phase.ENDED: _LEAVES,
    },
    Phase.RESTORING: {
        Phase.TRAINING: "all ranks ready",
        Phase.FENCED: _FENCES,
        Phase.ENDED: _LEAVES,
    },
    Phase.TRAINING: {
        Phase.FENCED: _FENCES,
        Phase.RESTORING: "decided unasked",
        Phase.ENDED: _LEAVES,
    },
    Phase.FENCED: {
        Phase.RESTORING: "decided",
        Phase.STARTING: "decided, before training",
        Phase.WAITING: "no spare is left",
        Phase.ENDED: _LEAVES,
    },
    Phase.WAITING: {
        Phase.RESTORING: "decided",
        Phase.STARTING: "decided, before training",
        Phase.ENDED: _LEAVES,
    },
    Phase.ENDED: {},
}


class IllegalMove(Exception):
    """A bug of ours: a node left one phase for another that does not follow it."""


def moved(before: Phase, after: Phase) -> Phase:
    """`after`. Raises: IllegalMove if it does not follow `before`."""
    if after is not before and after not in MOVES[before]:
        raise IllegalMove(f"{before.name} -> {after.name}; from {before.name} lead {[to.name for to in MOVES[before]]}")
    return after


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.OUTSIDE.name}"]
    lines += [f"    {phase.name}: {phase.name} ({phase.value})" for phase in Phase]
    lines += [f"    {old.name} --> {new.name}: {why}" for old, moves in MOVES.items() for new, why in moves.items()]
    return "\n".join([*lines, f"    {Phase.ENDED.name} --> [*]"])
