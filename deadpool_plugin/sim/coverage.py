"""Which (state, event) pairs of the controller a campaign has seen.

Rules of this file: a state is what decides how an event is taken: how far the node is, and its part; an event is the
kind of input or message.
"""

from __future__ import annotations

from collections import Counter

from ..core import io
from ..core.controller import Controller


class Coverage:
    """Counts of pairs."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[str, str]] = Counter()

    def saw(self, state: str, event: io.Input) -> None:
        name = type(event.message).__name__ if isinstance(event, io.Received) else type(event).__name__
        self.pairs[state, name] += 1

    def state(self, controller: Controller) -> str:
        """The state's name, such as `fenced proposing`."""
        context = controller._ctx
        if context.ended:
            return "ended"
        if not context.formed:
            return "joining" if controller._joining is not None else "unformed"
        phase = "training" if context.training else "starting"
        if context.swapping:
            phase = "waiting" if context.waiting else "fenced"
        if controller._swaps.proposer.proposal is not None:
            return f"{phase} proposing"
        if controller._watching is not None and controller._watching[1] == context.node:
            return f"{phase} leading"
        return f"{phase} standing by" if context.node in context.world.spares else phase
