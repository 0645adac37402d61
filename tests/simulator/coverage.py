"""Which (state, event) pairs of the controller a campaign has seen.

Rules of this file: a state is what decides how an event is taken: how far the node is, and its part; an event is the
kind of input or message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import get_args

from deadpool_plugin.core import api
from deadpool_plugin.core.controller import Controller, Phase
from deadpool_plugin.core.messages import AnyMessage

ALONE = (Phase.OUTSIDE, Phase.JOINING, Phase.ENDED)
"""In these a node has no part among the others."""


PARTS = ("proposing", "leading", "standing by", "member")
NAMES = {phase.name: [f"{phase.name} {part}" for part in PARTS] for phase in Phase}
STATES = tuple(
    state
    for phase in Phase
    if phase is not Phase.ENDED  # who has left is fed nothing
    for state in ([phase.name] if phase in ALONE else NAMES[phase.name])
)
EVENTS = tuple(sorted(kind.__name__ for kind in (*api.Input.__subclasses__(), *get_args(AnyMessage))))


def unseen(pairs: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """List the events that each state was not seen to meet; `pairs` are named as `named` names them."""
    return {
        state: tuple(event for event in EVENTS if event != "Received" and named(state, event) not in pairs)
        for state in STATES
    }


def named(state: str, event: str) -> str:
    return f"{state} | {event}"


class Coverage:
    """Counts of pairs. `pairs`: of states and the kinds of events."""

    def __init__(self) -> None:
        self.pairs: defaultdict[tuple[str, type], int] = defaultdict(int)

    def sees(self, controller: Controller, event: api.Input) -> None:
        """`controller` is about to take in `event`."""
        kind: type = type(event.message) if isinstance(event, api.Received) else type(event)
        self.pairs[state_of(controller), kind] += 1


def state_of(controller: Controller) -> str:
    """The phase and the node's part in it, such as `FENCED proposing`."""
    context, phase = controller._ctx, controller.phase
    if phase in ALONE:
        return phase.name
    proposing, leading, standing_by, member = NAMES[phase._name_]
    if controller._swaps.proposal is not None:
        return proposing
    if controller._watching is not None and controller._watching[1] == context.node:
        return leading
    return standing_by if context.node in context.world.spares else member
