"""Which (state, event) pairs of the controller a campaign has seen.

Rules of this file: a state is what decides how an event is taken: how far the node is, and its part; an event is the
kind of input or message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..core import io
from ..core.controller import Controller
from ..core.messages import Message
from ..core.phases import Phase

ALONE = {Phase.OUTSIDE, Phase.JOINING, Phase.ENDED}
"""In these a node has no part among the others."""


PARTS = ("proposing", "leading", "standing by", "member")
STATES = tuple(
    state
    for phase in Phase
    if phase is not Phase.ENDED  # who has left is fed nothing
    for state in ([phase.name] if phase in ALONE else [f"{phase.name} {part}" for part in PARTS])
)
EVENTS = tuple(sorted(kind.__name__ for kind in (*io.Input.__subclasses__(), *Message.__subclasses__())))


def unseen(pairs: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """What each state was not seen to meet; `pairs` are named as `named` names them."""
    return {
        state: tuple(event for event in EVENTS if event != "Received" and named(state, event) not in pairs)
        for state in STATES
    }


def named(state: str, event: str) -> str:
    return f"{state} | {event}"


class Coverage:
    """Counts of pairs."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[str, str]] = Counter()

    def saw(self, state: str, event: io.Input) -> None:
        name = type(event.message).__name__ if isinstance(event, io.Received) else type(event).__name__
        self.pairs[state, name] += 1

    def state(self, controller: Controller) -> str:
        """The phase and the node's part in it, such as `FENCED proposing`."""
        context, phase = controller._ctx, controller.phase
        if phase in ALONE:
            return phase.name
        if controller._swaps.proposer.proposal is not None:
            return f"{phase.name} proposing"
        if controller._watching is not None and controller._watching[1] == context.node:
            return f"{phase.name} leading"
        return f"{phase.name} standing by" if context.node in context.world.spares else f"{phase.name} member"
