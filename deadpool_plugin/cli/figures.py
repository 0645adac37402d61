"""A job as one JSON object, for programs that watch it: `deadpool watch OUTPUT_DIR --json`.

Rules of this file: names and units are for good, new ones may be added; what is not known is null. configs/README.md
lists them.
"""

from __future__ import annotations

from typing import Any, Literal

from ..core.types import Step
from .jobview import JobView
from .model import SILENT_S

Doing = Literal["unknown", "starting", "training", "swapping", "waiting", "ending", "silent", "ended"]


def figures(view: JobView, now: float) -> dict[str, Any]:
    """`now` is in epoch seconds."""
    unprotected = view.protection in ("Mirrored", "Unprotected")
    return {
        "time_s": now,
        "state": doing(view, now),
        "outcome": view.outcome or None,
        "exit_code": view.exit_code if view.over(now) else None,
        "silent_s": _since(view.heard_at or None, now),
        "generation": view.generation,
        "step": _number(view.step),
        "loss": view.loss.value if view.loss is not None else None,
        "committed_step": _number(view.committed),
        "committed_age_s": _since(view.committed_at or None, now),
        "spares_left": len(view.world.spares) if view.world is not None else None,
        "mirrored": view.protection in ("Mirrored", "Protected"),
        "uncovered": view.uncovered,
        "protected": view.protection == "Protected",
        "unprotected_s": _since(view.protection_at, now) if unprotected else None,
        "swaps": len(view.swaps),
        "swapping_s": _since(view.swapping_since, now),
        "last_swap_s": next((swap.duration_s for swap in reversed(view.swaps) if swap.duration_s is not None), None),
        "history": view.history,
        "members": [
            {
                "node": row.node,
                "host": row.host,
                "state": row.state,
                "ranks": row.ranks,
                "stands_in_for": row.stands_in_for,
                "generation": row.generation,
                "step": _number(row.step),
            }
            for row in view.rows()
        ],
    }


def doing(view: JobView, now: float) -> Doing:
    if view.outcome:
        return "ended" if view.over(now) else "ending"
    if not view.nodes:
        return "unknown"
    if now - view.heard_at >= SILENT_S:
        return "silent"
    if view.waiting:
        return "waiting"
    if view.swapping_since is not None:
        return "swapping"
    return "training" if view.training else "starting"


def _since(then: float | None, now: float) -> float | None:
    """Hosts' clocks differ: what has just happened may be said to come."""
    return None if then is None else max(0.0, now - then)


def _number(step: Step) -> int | None:
    return step if step >= 0 else None
