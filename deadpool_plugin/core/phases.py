"""The phases of one node, and every move between them.

Rules of this file: the table is the truth. A move that it lacks raises and is a bug of ours; each of its moves is made
by some test; the diagram in core/README.md shows it.
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


_LEAVES = {Phase.ENDED: "verdict, or out"}
_FENCES = {Phase.FENCED: "asked to promise, or without contact"}
_TRAINS = {Phase.TRAINING: "all ranks ready"}
_DECIDED = {Phase.RESTORING: "decided", Phase.STARTING: "decided, before training"}
_UNASKED = {Phase.RESTORING: "decided unasked"}

MOVES: Mapping[Phase, Mapping[Phase, str]] = {
    Phase.OUTSIDE: {Phase.STARTING: "all have met", Phase.JOINING: "met a job that runs", **_LEAVES},
    Phase.JOINING: _DECIDED | _LEAVES,
    Phase.STARTING: _TRAINS | _FENCES | _UNASKED | _LEAVES,
    Phase.RESTORING: _TRAINS | _FENCES | _LEAVES,
    Phase.TRAINING: _FENCES | _UNASKED | _LEAVES,
    Phase.FENCED: _DECIDED | {Phase.WAITING: "no spare is left"} | _LEAVES,
    Phase.WAITING: _DECIDED | _LEAVES,
    Phase.ENDED: {},
}


class IllegalMove(Exception):
    """A bug of ours: a node left one phase for another that does not follow it."""


def moved(before: Phase, after: Phase) -> Phase:
    """`after`. Raises: IllegalMove if it does not follow `before`."""
    if after is not before and after not in MOVES[before]:
        raise IllegalMove(f"{before.name} -> {after.name}; from {before.name} lead {[to.name for to in MOVES[before]]}")
    return after
