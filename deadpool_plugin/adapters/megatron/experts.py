"""Megatron-core's process-wide tracker of auxiliary losses of mixtures of experts, as plain data.

Every forward adds to it, the script's logging reduces and clears it, so a redone forward would count twice.
Source: megatron/core/transformer/moe/moe_utils.py (0.16.1), `save_to_aux_losses_tracker`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from ...worker.adapter import Scalars

GROUPS = ("reduce_group", "avg_group")


def tracked_losses() -> Scalars:
    """Name of a loss -> its sums by layer, and the names of the groups it is reduced over."""
    found = {}
    for name, entry in _tracker().items():
        values = entry["values"]
        found[name] = {
            **{key: None if group is None else c10d._world.pg_names[group] for key, group in _groups(entry).items()},
            "reduce_group_has_dp": entry.get("reduce_group_has_dp", False),
            "values": values.tolist(),
            "device": str(values.device),
        }
    return found


def load_tracked_losses(saved: Scalars) -> None:
    tracker, groups = _tracker(), {name: group for group, name in c10d._world.pg_names.items()}
    for name in [name for name in tracker if name not in saved]:
        tracker[name]["values"].zero_()
    for name, entry in saved.items():
        mine = tracker.setdefault(name, {})
        values = torch.tensor(entry["values"], dtype=torch.float32)
        if "values" in mine:
            mine["values"].copy_(values)
        else:
            mine["values"] = values.to(entry["device"])
        mine["reduce_group_has_dp"] = entry["reduce_group_has_dp"]
        mine.update({key: None if entry[key] is None else groups[entry[key]] for key in GROUPS})


def _groups(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: entry.get(key) for key in GROUPS}


def _tracker() -> dict[str, dict[str, Any]]:
    module = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    return module.get_moe_layer_wise_logging_tracker() if module is not None else {}
