"""The torch optimizer under a framework's own: Adam's moments beside each parameter, and plain values in its groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import Unsupported
from ..worker.adapter import Scalars
from .options import REMEDY

MOMENTS = ("exp_avg", "exp_avg_sq")
PLAIN = (bool, int, float, str, type(None), tuple, list)


def group_scalars(groups: Sequence[dict[str, Any]]) -> list[Scalars]:
    """Learning rates, betas and the like of every parameter group. Raises: Unsupported for what is no plain data."""
    return [_plain_items(group) for group in groups]


def load_group_scalars(groups: Sequence[dict[str, Any]], saved: Sequence[Scalars]) -> None:
    for group, values in zip(groups, saved, strict=True):
        for key in [key for key in group if key != "params" and key not in values]:
            del group[key]  # came later: a fused Adam makes its "step" in the first update
        group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in values.items()})


def _plain_items(group: dict[str, Any]) -> Scalars:
    items = {key: value for key, value in group.items() if key != "params"}
    for key, value in items.items():
        if not isinstance(value, PLAIN):
            raise Unsupported(
                f"parameter group entry {key!r} is {type(value).__name__}", "plain data", f"leave it out, {REMEDY}"
            )
    return items


def refuse_third_moment(groups: Sequence[dict[str, Any]]) -> None:
    """AMSGrad's. Raises: Unsupported."""
    if any(group.get("amsgrad") for group in groups):
        raise Unsupported(
            "Adam with amsgrad=True keeps a third moment that is not mirrored",
            "amsgrad=False",
            f"leave it out, {REMEDY}",
        )
