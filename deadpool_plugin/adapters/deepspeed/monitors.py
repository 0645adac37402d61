"""DeepSpeed's monitors: what an engine writes in a call is written once, also where the call is redone.

A rank that is replaced goes on with the monitors of the one before: worker/trackers.py.
Source: DeepSpeed 0.19.8, monitor/monitor.py.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

from .calls import Calls

STEPS_MAX = 16
"""Newest steps of each name that are remembered. A redo goes back by two and the current one."""


def install(calls: Calls) -> None:
    from deepspeed.monitor.monitor import MonitorMaster

    owner: Any = MonitorMaster
    original = owner.write_events
    written: dict[str, deque[Any]] = {}

    def is_new(name: str, step: Any) -> bool:
        steps = written.setdefault(name, deque(maxlen=STEPS_MAX))
        if step in steps:
            return False
        steps.append(step)
        return True

    @functools.wraps(original)
    def write_events(master: Any, event_list: Any) -> None:
        """Write the events that a redo has not written before. What the script writes between calls is never redone."""
        if calls.busy:
            event_list = [event for event in event_list if is_new(event[0], event[2])]
        original(master, event_list)

    owner.write_events = write_events
