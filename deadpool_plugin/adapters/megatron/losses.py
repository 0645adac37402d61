"""Losses that Megatron-core adds up beside the one it trains on: of experts' routers, multi-token prediction, indexers.

Every forward adds to trackers of the process, the script's logging reduces and clears them, so a redone forward would
count twice. The reduction is a call whose followers get the reduced sums: what they log and add up next is right, too.
Rules of this file: a tracker that a version lacks is no error. An entry is what one loss has: tensors of sums, the
groups they are reduced over, flags.
Source: transformer/moe/moe_utils.py (core_v0.14.0 to 0.17.1), transformer/moe/moe_logging.py (0.18.0 and later),
transformer/multi_token_prediction.py, transformer/experimental_attention_variant/dsa.py.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from ...worker.adapter import Bare, Scalars

Entry = dict[str, Any]

CORE = "megatron.core.transformer"
REDUCTIONS = (
    (f"{CORE}.moe.moe_utils", "", "reduce_aux_losses_tracker_across_ranks"),
    (f"{CORE}.moe.moe_logging", "MoEMetricsTracker", "_sync_metrics"),
    (f"{CORE}.multi_token_prediction", "MTPLossLoggingHelper", "reduce_loss_in_tracker"),
    (f"{CORE}.multi_token_prediction", "MTPLossLoggingHelper", "reduce_metrics_in_tracker"),
    (f"{CORE}.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper", "reduce_loss_in_tracker"),
)
"""Module, class, function."""


def reductions() -> list[tuple[Any, str]]:
    """Owner and name of every function that reduces tracked losses in this version."""
    found = []
    for module, owner, name in REDUCTIONS:
        with contextlib.suppress(ImportError):
            holder: Any = importlib.import_module(module)
            holder = getattr(holder, owner, None) if owner else holder
            if hasattr(holder, name):
                found.append((holder, name))
    return found


class Reduction(Bare):
    """A function that reduces tracked losses."""

    def outcome(self, value: Any) -> Scalars:
        return plain(noted())

    def skipped(self, outcome: Scalars) -> None:
        load(outcome)


def noted() -> dict[str, Entry]:
    """A copy of what is tracked now."""
    return {
        name: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in entry.items()}
        for name, entry in _entries().items()
    }


def put_back(saved: dict[str, Entry]) -> None:
    """Make what is tracked what `saved` says."""
    for name, entry in _entries().items():
        for value in entry.values():
            if name not in saved and isinstance(value, torch.Tensor):
                value.zero_()
    for name, fields in saved.items():
        entry = _entry(name)
        for key, value in fields.items():
            mine = entry.get(key)
            if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor) and mine.shape == value.shape:
                mine.copy_(value)
            else:
                entry[key] = value.clone() if isinstance(value, torch.Tensor) else value


def plain(saved: dict[str, Entry]) -> Scalars:
    return {name: {key: _as_plain(value) for key, value in entry.items()} for name, entry in saved.items()}


def load(scalars: Scalars) -> None:
    """Put back what another process, or this one, had tracked: the result of `plain`."""
    groups = {name: group for group, name in c10d._world.pg_names.items()}

    def value_of(kind: str, value: Any, device: str) -> Any:
        if kind == "tensor":
            return torch.tensor(value, dtype=torch.float32, device=device)
        return groups[value] if kind == "group" else value

    put_back(
        {name: {key: value_of(*value) for key, value in entry.items()} for name, entry in scalars.items()},
    )


def _as_plain(value: Any) -> tuple[str, Any, str]:
    if isinstance(value, torch.Tensor):
        return "tensor", value.tolist(), value.device.type
    if isinstance(value, torch.distributed.ProcessGroup):
        return "group", c10d._world.pg_names[value], ""
    return "plain", value, ""


def _entries() -> dict[str, Entry]:
    """Everything tracked so far, live."""
    helpers = {name: tracker for name, tracker in _helpers().items() if tracker}
    return {**helpers, **{name: _fields(entry) for name, entry in _metrics()[0].items()}}


def _entry(name: str) -> Entry:
    """The live entry `name`, made if need be."""
    helpers = _helpers()
    if name in helpers:
        return helpers[name]
    metrics, make = _metrics()
    return _fields(metrics.setdefault(name, make()))


def _helpers() -> dict[str, Entry]:
    """Helper classes that track one loss each, which is their only entry."""
    owners: dict[str, Any] = {o: getattr(sys.modules.get(module), o, None) for module, o, _ in REDUCTIONS if o}
    return {name: owner.tracker for name, owner in owners.items() if hasattr(owner, "tracker")}


def _metrics() -> tuple[dict[str, Any], Callable[[], Any]]:
    """Return the live table of what routers track by name, and the function that makes an entry."""
    if (module := sys.modules.get(f"{CORE}.moe.moe_logging")) is not None:
        return module.get_moe_metrics_tracker().metrics, lambda: module.MetricEntry(None)
    if (module := sys.modules.get(f"{CORE}.moe.moe_utils")) is not None:
        return module.get_moe_layer_wise_logging_tracker(), dict
    return {}, dict


def _fields(entry: Any) -> Entry:
    return entry if isinstance(entry, dict) else vars(entry)
