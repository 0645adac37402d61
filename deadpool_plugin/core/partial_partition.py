"""Two members that do not hear each other, while the coordinator hears both: one of them has to go if that lasts.

README.md says when ("A partial partition", "A broken training connection"). Who complains does so again for as long as
it cannot mirror, fetch or connect.

Rules of this file: the coordinator judges; a spare is asked to leave, or who does not hear the most others, which stops
its workers before it is replaced.
"""

from __future__ import annotations

from .context import Context
from .events import Note
from .messages import NodeFailed
from .processes import AGAIN_WITHIN_STEPS
from .types import Generation, NodeId, Step


class PartialPartition:
    """The complaints that the coordinator does not share: who does not hear whom. They outlast generations: a newcomer
    that cannot fetch what it is to restore ends each of them."""

    def __init__(self, context: Context) -> None:
        self._ctx = context
        # By pairs, the first of which does not hear the second: the committed step then, and since when it is repeated
        # without a newer one.
        self._complaints: dict[tuple[NodeId, NodeId], tuple[Step, float]] = {}
        self._asked_in: Generation | None = None  # in which generation somebody was last asked to leave
        self._told: set[tuple[Generation, frozenset[NodeId]]] = set()  # the pairs that people were told of
        self._broken: tuple[frozenset[NodeId], Step] | None = None  # whose connection broke last, at which step

    def hear(self, sender: NodeId, node: NodeId) -> None:
        """Note that `sender` does not hear `node`, which we do."""
        ctx, pair = self._ctx, (sender, node)
        if not ctx.leads or ctx.swapping or self._asked_in == ctx.world.generation:
            return
        told = (ctx.world.generation, frozenset(pair))
        if told not in self._told:
            self._told.add(told)
            text = f"nodes {sender} and {node} cannot reach each other; one of them is asked to leave if no step is"
            ctx.emit(Note(f"{text} committed for {ctx.timing.silent_after_s:g} s and the time of a step"))
        committed, since = self._complaints.get(pair, (None, ctx.now))
        if committed != ctx.newest_committed:
            self._complaints[pair] = (ctx.newest_committed, ctx.now)
        elif ctx.now - since >= ctx.timing.silent_after_s + ctx.step_s:
            reason = f"nodes {sender} and {node} cannot reach each other, and no step is committed any more"
            self._ask(max(node, sender, key=self._how_dispensable), reason)  # of equals the one complained of

    def broke(self, sender: NodeId, node: NodeId) -> bool:
        """Note that a training connection of `sender` to `node` broke (to itself: its other end is not known).

        Returns: whether a node leaves for it; else all go on in place, as they are.
        """
        ctx, before = self._ctx, self._broken
        if not ctx.leads or self._asked_in == ctx.world.generation:
            return ctx.leads
        node = node if node in ctx.world.members else sender
        ends = frozenset((sender, node))
        self._broken = (ends, ctx.newest_committed)
        if before is None or ctx.newest_committed - before[1] > AGAIN_WITHIN_STEPS:
            return False
        common = ends & before[0]
        if ctx.newest_committed > before[1] and not (common and ctx.world.spares):
            return False  # it gets on, and nobody could take the place of who is at fault, or it is not known
        goes = max(filter((common or ends).__contains__, (node, sender)), key=self._how_dispensable)
        self._ask(goes, f"training connections of node {goes} broke again after step {before[1]} was committed")
        return True

    def _ask(self, goes: NodeId, reason: str) -> None:
        ctx = self._ctx
        ctx.emit(Note(f"node {goes} is asked to leave: {reason}"))
        ctx.send(goes, NodeFailed(ctx.world.generation, goes, reason))
        self._asked_in = ctx.world.generation
        self._complaints.clear()  # without that node the others may reach each other: they complain anew if not

    def _how_dispensable(self, node: NodeId) -> tuple[bool, int]:
        """Return whether it runs no rank, and how many others it does not hear, or do not hear it, since the newest
        committed step."""
        now, others = self._ctx.newest_committed, self._complaints.items()
        broken = {frozenset(pair) for pair, (committed, _) in others if committed == now and node in pair}
        return node in self._ctx.world.spares, len(broken)
