"""How long the protocol waits for what. All in seconds of the caller's monotonic clock.

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
    """Who has not answered a phase of a swap by then is lost, and the phase is repeated without it."""
    start_timeout_s: float = 300.0
    """All ranks must be in training within this time, after the start and after each swap; else the job stops."""
