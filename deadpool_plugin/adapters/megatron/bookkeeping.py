"""What Megatron-core keeps about the step under way, outside model and optimizer, as it was at a call's entry.

The rerun state machine asserts in every forward that it is inside a step, which the script begins and ends between
calls: a forward redone from inside the optimizer's step would raise. A timer that an interruption leaves running
cannot be started again.
Source: megatron/core/rerun_state_machine.py `validate_result`, megatron/core/timers.py `Timer.start` (0.16.1).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

MAXIMA = ("large_value_counts", "max_values")
"""Of the rerun state machine: what it has to know of earlier steps."""


def noted(timers: Sequence[Any]) -> Callable[[], None]:
    """Note it now; the result puts it back. `timers` may grow meanwhile: a new one was not running now."""
    machine = _machine()
    attributes = _copied(vars(machine)) if machine is not None else {}
    running = {timer for timer in timers if timer._started}

    def put_back() -> None:
        if machine is not None:
            vars(machine).update(_copied(attributes))
        for timer in timers:
            timer._started = timer in running

    return put_back


def maxima() -> dict[str, dict[str, Any]]:
    """The largest values of a loss so far, which decide what is unexpectedly large: plain data."""
    machine = _machine()
    return {name: dict(getattr(machine, name)) for name in MAXIMA if machine is not None}


def load_maxima(saved: dict[str, dict[str, Any]]) -> None:
    for name, values in saved.items():
        setattr(_machine(), name, dict(values))


def _machine() -> Any:
    return getattr(sys.modules.get("megatron.core.rerun_state_machine"), "_GLOBAL_RERUN_STATE_MACHINE", None)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Its counts and maxima are changed in place by every forward."""
    return {name: value.copy() if isinstance(value, dict) else value for name, value in attributes.items()}
