"""A failing scenario made smaller while it fails in the same way.

Rules of this file: greedy and bounded: every simpler neighbour is tried in a fixed order, the first that still breaks
the same invariant is kept, until none does. The seed stays, so the result is run again like any other scenario.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from .run import Outcome, run
from .schedule import Scenario

ATTEMPTS_MAX = 400
PLAIN: dict[str, Any] = {
    "slots": 1, "racks": 0, "copies": 1, "restarts_max": 3, "wait_for_hosts": False, "witness": False,
    "latency_s": 0.002, "compute_s": 0.1, "drift": 0.0, "restarts_window_s": 3600.0,
}  # fmt: skip


def shrunk(scenario: Scenario, attempt: Callable[[Scenario], Outcome] = run) -> Scenario:
    """The smallest failing neighbour of neighbours of `scenario`, which must fail."""
    finding = attempt(scenario).finding
    if finding is None:
        raise ValueError(f"seed {scenario.seed} does not fail")
    attempts = 0
    candidates = smaller(scenario)
    while attempts < ATTEMPTS_MAX:
        candidate = next(candidates, None)
        if candidate is None:
            break
        attempts += 1
        found = attempt(candidate).finding
        if found is not None and found.invariant == finding.invariant:
            scenario, candidates = candidate, smaller(candidate)
    return scenario


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Every scenario that is one step simpler, the largest steps first."""
    for number in range(len(scenario.faults)):
        yield _with(scenario, faults=scenario.faults[:number] + scenario.faults[number + 1 :])
    for active in (scenario.active // 2, scenario.active - 1):
        if active >= 1:
            yield _with(scenario, active=active)
    if scenario.spares > 0:
        yield _with(scenario, spares=scenario.spares - 1)
    if scenario.shards != scenario.ranks:
        yield _with(scenario, shards=scenario.ranks)
    for field, plain in PLAIN.items():
        if getattr(scenario, field) != plain:
            yield _with(scenario, **{field: plain})
    if scenario.steps > 4:
        yield _with(scenario, steps=scenario.steps // 2)
    for number, fault in enumerate(scenario.faults):
        simpler = msgspec.structs.replace(fault, at_step=fault.at_step // 2, delay_s=0.0, nth=1, count=1)
        if simpler != fault:
            yield _with(scenario, faults=(*scenario.faults[:number], simpler, *scenario.faults[number + 1 :]))


def _with(scenario: Scenario, **changed: Any) -> Scenario:
    new = msgspec.structs.replace(scenario, **changed)
    return msgspec.structs.replace(new, shards=min(new.shards, new.ranks))
