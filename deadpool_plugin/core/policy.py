"""The user's decisions about losses.

Rules of this file: one frozen value, the same on every node. May import nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """See the fields of the same names in the configuration."""

    copies: int = 1
    """On how many other nodes each snapshot must be before its step is committed."""
    restarts_max: int = 3
    """How often within the window the process of one rank is replaced on its own node; at one more loss the node counts
    as lost."""
    wait_for_hosts: bool = False
    """Without a spare: wait, holding everything, until a host joins (instead of ending the job)."""
    witness: bool = False
    """In a tie the half whose plan the witness keeps decides, instead of the half with the first active node."""
    restarts_window_s: float = 3600.0
    """Losses longer ago than this do not count."""
