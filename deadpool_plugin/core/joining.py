"""A host becomes a member of a running job: its part, until a decided plan has it in its world.

Rules of this file: the host asks every member, each heartbeat, until it is in or there is no hope left. A member
remembers who asks as long as the connection lasts; only the coordinator acts on it, and the host is nobody's voter.
"""

from __future__ import annotations

from .context import Context
from .messages import AnyMessage, Decided, Goodbye, JoinRequest, Status, Verdict
from .types import NodeId


class JoinAttempt:
    """The requests of one host."""

    def __init__(self, context: Context, members: tuple[NodeId, ...], rack: str) -> None:
        self._ctx, self._rack = context, rack
        self._members = list(members)
        self._verdict: Verdict | None = None  # how the job has ended, says a member that left before it heard of us
        self.first_asked_at = context.now  # the plan that takes this host in was decided later
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
        if node in self._members:
            self._members.remove(node)
        if not self._members and self._verdict is not None:  # while others are there it may be that of a part cut off
            self._ctx.conclude(self._verdict)
        elif not self._members:
            self._ctx.fence(f"no member of the job can be reached any more ({reason})")

    def hear(self, sender: NodeId, message: AnyMessage) -> bool:
        """Hear a member. Returns: whether that was all there is to do about `message` now."""
        ctx = self._ctx
        match message:
            case Verdict():
                ctx.conclude(message)
            case Goodbye():
                self._verdict = message.verdict or self._verdict
                self.link_lost(sender, "it has left")
            case Status():
                ctx.be_patient()  # the job lives and knows of this host: a long swap may be under way
            case Decided(plan) if ctx.node not in plan.world.members:
                ctx.fence(f"taken in, and counted as lost again by generation {plan.world.generation}")
            case _:
                return False
        return True
