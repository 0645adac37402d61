"""Megatron-core's notes about the step under way, outside model and optimizer, put back as at a call's entry.

The rerun state machine asserts in every forward that it is inside a step, which the script begins and ends between
calls: a forward redone from inside the optimizer's step would raise. A timer that an interruption leaves running
cannot be started again. Lengths of packed sequences are added up by forwards, reduced and cleared after the cut.
Source: megatron/core/rerun_state_machine.py `validate_result`, megatron/core/timers.py `Timer.start` (0.16.1),
megatron/training/training.py `consume_seqlen_stats_in_iteration` (core_v0.18.0 to main).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

LOOP = "megatron.training.training"
CONSUME = "consume_seqlen_stats_in_iteration"
LENGTHS = ("_seqlen_stats_in_iteration", "_seqlen_stats_active")
"""Globals there."""
MAXIMA = ("large_value_counts", "max_values")
"""Attributes in which the rerun state machine keeps what it has to know of earlier steps."""


def noted(timers: Sequence[Any]) -> Callable[[], None]:
    """Note it now; the result puts it back. `timers` may grow meanwhile: a new one was not running now."""
    machine = _machine()
    attributes = _copied(vars(machine)) if machine is not None else {}
    running = {timer for timer in timers if timer._started}
    lengths = _lengths()

    def put_back() -> None:
        for name, value in lengths.items():
            setattr(sys.modules[LOOP], name, _own(value))
        if machine is not None:
            vars(machine).update(_copied(attributes))
        for timer in timers:
            timer._started = timer in running

    return put_back


def kept() -> dict[str, Any]:
    """Return, as plain data, what a newcomer has to know of forwards that it did not run: the largest values of a loss
    so far, which decide what is unexpectedly large, and lengths of sequences."""
    machine = _machine()
    lengths = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in _lengths().items()}
    return {
        "maxima": {name: dict(getattr(machine, name)) for name in MAXIMA if machine is not None},
        "lengths": lengths,
    }


def load(saved: dict[str, Any]) -> None:
    for name, values in saved["maxima"].items():
        setattr(_machine(), name, dict(values))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, value in saved["lengths"].items():
        is_sum = isinstance(value, list)
        setattr(sys.modules[LOOP], name, torch.tensor(value, dtype=torch.float64, device=device) if is_sum else value)


def _lengths() -> dict[str, Any]:
    loop = sys.modules.get(LOOP)
    return {name: _own(getattr(loop, name)) for name in LENGTHS if hasattr(loop, name)}


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _machine() -> Any:
    return getattr(sys.modules.get("megatron.core.rerun_state_machine"), "_GLOBAL_RERUN_STATE_MACHINE", None)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Its counts and maxima are changed in place by every forward."""
    return {name: value.copy() if isinstance(value, dict) else value for name, value in attributes.items()}
