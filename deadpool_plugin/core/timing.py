"""Waits of the protocol, and how long each is. All in seconds of the caller's monotonic clock.

Rules of this file: one frozen value, derived by the caller from the configuration's one knob. May import nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """The time limits of one job, the same on every node."""

    heartbeat_interval_s: float = 0.5
    """Every member says something to the coordinator, and it to every member, at least this often."""
    silent_after_s: float = 10.0
    """A member not heard of for this long is lost."""
    phase_timeout_s: float = 20.0
    """A node that has not answered a phase of a swap by then is lost, and the phase is repeated without it."""
    decision_timeout_s: float = 300.0
    """A node that has waited so long for a decision about the next generation, or to be taken in, leaves."""
    start_timeout_s: float = 1800.0
    """After the start and after each swap all ranks must be in training within this time; else the job stops. It
    begins anew with each rank that gets there, and whenever a newcomer on its way through past steps gets on."""
    stall_timeout_s: float = 1800.0
    """In training: if for so long no step is committed and no process says that it gets on, all are interrupted and go
    on in a new generation; at a second time without a step in between the job stops. Infinite: never."""

    @property
    def lease_s(self) -> float:
        """Seconds from the sending of its newest certain report until a node's workers stand still (contact.py).

        Shorter than `silent_after_s`, after which it may be replaced, by more than what clocks that run four percent
        fast and slow and a tick (a quarter of a heartbeat interval) can make up for: 0.9 / 0.96 + 1 / 80 < 1 / 1.04.
        """
        return 0.9 * self.silent_after_s
