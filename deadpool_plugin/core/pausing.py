"""A node without contact to a majority stops its workers before others may replace it, and lets them go on if none has.

Rules of this file: contact.py knows when contact is certain; a node that is a majority by itself never stands still.
May import api, context and suspicion.
"""

from __future__ import annotations

from .api import PauseWorkers, ResumeWorkers
from .context import Context
from .events import ContactLost, ContactRegained
from .suspicion import PAUSE_INTERVALS


class Pausing:
    """State of this node's workers: whether they stand still."""

    def __init__(self, context: Context) -> None:
        self._ctx = context
        self._paused_at = 0.0
        self._is_said = False

    def look(self, before: float) -> str:
        """Pause or resume, if it is time to.

        Args:
            before: when the input before this one was taken in.

        Returns: why this generation cannot go on any more, "" if it can.
        """
        ctx = self._ctx
        if ctx.ended or not ctx.has_trained:
            return ""
        if ctx.in_contact:
            if ctx.paused:
                self.resume()
                if self._is_said:
                    ctx.emit(ContactRegained(ctx.now - self._paused_at))
            return ""
        reason = self._no_contact(before)
        if ctx.paused:
            in_vain = ctx.now - self._paused_at >= 2 * ctx.timing.silent_after_s
            return reason if in_vain and not ctx.swapping else ""
        if ctx.world.ranks_of(ctx.node) and ctx.cut_off:
            ctx.paused, self._paused_at, self._is_said = True, ctx.now, ctx.contact_at > ctx.formed_at
            if self._is_said:  # who has asked long ago to join is not cut off: it has had no contact yet
                ctx.emit(ContactLost(reason))
            ctx.act(PauseWorkers())
        return ""

    def _no_contact(self, before: float) -> str:
        """Say who is not heard. A coordinator that has died is named here before anybody counts it as lost."""
        ctx, own = self._ctx, self._own_pause(before)
        span, who = f"for {ctx.now - ctx.contact_at:.1f} s", f"node {ctx.coordinator}, which coordinates,"
        if ctx.leads:
            return f"no majority of the nodes was heard {span}{own}"
        silent = ctx.now - ctx.watch.heard.get(ctx.coordinator, ctx.formed_at) >= ctx.timing.silent_after_s / 2
        return f"{who} {'was not heard' if own or silent else 'has heard no majority of the nodes'} {span}{own}"

    def resume(self) -> None:
        """The workers may go on, if they stand still."""
        if self._ctx.paused:
            self._ctx.paused = False
            self._ctx.act(ResumeWorkers())

    def _own_pause(self, before: float) -> str:
        """For people: whether it is this node that stood still."""
        gap_s = self._ctx.now - before
        paused = gap_s > PAUSE_INTERVALS * self._ctx.timing.heartbeat_interval_s
        return f" (this agent itself stood still for {gap_s:.1f} s)" if paused else ""
