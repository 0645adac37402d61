"""A host becomes a member of a running job.

Rules of this file: the host asks every member, each heartbeat, until a decided plan has it in its world or there is no
hope left; a member remembers who asks as long as the connection lasts. Only the coordinator acts on it (swaps.py), and
until then the host is nobody's voter. A node id is never used again: who was a member once is no candidate.
May import everything of core but the controller's other parts.
"""

from __future__ import annotations

from .context import Context
from .messages import AnyMessage, Decided, Goodbye, JoinRequest, Status, Verdict
from .types import NodeId, World


class Candidates:
    """A member's part: `context.candidates`."""

    def __init__(self, context: Context) -> None:
        self._ctx = context
        self._former: set[NodeId] = set()

    def ask(self, node: NodeId, rack: str) -> None:
        """Hear a host that asks, a member that has not heard yet that it is one, or one that was one."""
        ctx = self._ctx
        if ctx.decided is not None and (node in ctx.world.members or node in self._former):
            ctx.send(node, ctx.decided)
        elif node not in ctx.world.members:
            ctx.clear(node)
            ctx.candidates[node] = rack

    def forget(self, node: NodeId) -> None:
        self._ctx.candidates.pop(node, None)

    def begin_generation(self, before: World) -> None:
        ctx = self._ctx
        self._former |= set(before.members) - set(ctx.world.members)
        for node in (ctx.candidates.keys() & ctx.world.positions.keys()) | self._former:
            self.forget(node)


class JoinAttempt:
    """The host's part, from its first request to the plan that has it."""

    def __init__(self, context: Context, members: tuple[NodeId, ...], rack: str) -> None:
        self._ctx, self._rack = context, rack
        self._members = list(members)
        self._verdict: Verdict | None = None
        """How the job has ended, says a member that had left before it heard the request."""
        self.first_asked_at = self._asked_at = context.now
        """The plan that takes this host in was decided after it asked first; a later request proves nothing."""
        context.be_patient()
        self._ask()

    def _ask(self) -> None:
        self._asked_at = self._ctx.now
        for node in self._members:
            self._ctx.send(node, JoinRequest(self._rack))

    def tick(self) -> None:
        ctx = self._ctx
        waited_s = ctx.now - ctx.patient_since
        if waited_s >= ctx.timing.decision_timeout_s:
            ctx.fence(f"the job has not taken this host in within {waited_s:.0f} s")
        elif ctx.now - self._asked_at >= ctx.timing.heartbeat_interval_s:
            self._ask()

    def link_lost(self, node: NodeId, reason: str) -> None:
        """Go on without it: that member may be the one loss this host is needed for; the others decide."""
        ctx = self._ctx
        if node in self._members:
            self._members.remove(node)
        if not self._members and self._verdict is not None:  # while others are there it may be that of a part cut off
            ctx.conclude(self._verdict)
        elif not self._members:
            ctx.fence(f"no member of the job can be reached any more ({reason})")

    def hear(self, sender: NodeId, message: AnyMessage) -> bool:
        """Hear a member. Returns: whether that was all there is to do about `message` now."""
        ctx = self._ctx
        if isinstance(message, Verdict):
            ctx.conclude(message)
        elif isinstance(message, Goodbye):
            self._verdict = message.verdict or self._verdict
            self.link_lost(sender, "it has left")
        elif isinstance(message, Status):
            ctx.be_patient()  # the job lives and knows of this host: a long swap may be under way
        elif isinstance(message, Decided) and ctx.node not in message.plan.world.members:
            ctx.fence(f"taken in, and counted as lost again by generation {message.plan.world.generation}")
        else:
            return False
        return True
