"""The configuration's part for the protocol (its time-outs, the user's decisions about losses) and for this host."""

from __future__ import annotations

import math

from ..config import Config
from ..core.policy import Policy, Timing
from ..mirror.memory import check_memory


def timing_of(config: Config) -> Timing:
    return Timing(
        heartbeat_interval_s=config.heartbeat_interval_s,
        silent_after_s=config.silent_after_s,
        phase_timeout_s=config.phase_timeout_s,
        decision_timeout_s=config.decision_timeout_s,
        start_timeout_s=config.start_timeout_s,
        stall_timeout_s=math.inf if config.stall_timeout_s is None else config.stall_timeout_s,
    )


def policy_of(config: Config) -> Policy:
    return Policy(
        copies=config.copies,
        restarts_max=config.restarts_max,
        wait_for_hosts=config.on_no_spare == "wait",
        witness=config.witness is not None,
        restarts_window_s=config.restarts_window_s,
    )


def check_headroom(config: Config) -> None:
    """Check before anything starts that this host has the memory that `memory_headroom_gib` keeps free.

    What the snapshots need on top of it is not known before the ranks have built their models.

    Raises: MemoryShortage.
    """
    check_memory(0, config.memory_headroom_bytes)
