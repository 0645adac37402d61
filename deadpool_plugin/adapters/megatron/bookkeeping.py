"""Megatron-core's notes of the step under way, beside model and optimizer: tracked losses and gradient buckets.

Every forward adds to trackers of the process; the script's logging reduces and clears them, so a redone forward would
count twice. A tracker that a version lacks is no error.
Source: megatron/core/transformer/moe/moe_utils.py (core_v0.14.0 to 0.17.1), moe_logging.py (0.18.0 and later),
multi_token_prediction.py, experimental_attention_variant/dsa.py; core/rerun_state_machine.py, core/distributed/
param_and_grad_buffer.py (0.16.1); training/training.py (core_v0.18.0 to main).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from ...worker.adapter import Scalars
from ...worker.calls import Call
from ...worker.module_state import SIMPLE

Entry = dict[str, Any]
"""The entries of one tracker: tensors of sums, the groups they are reduced over, flags."""
CORE = "megatron.core.transformer"
REDUCTIONS = (  # module, class, function
    (f"{CORE}.moe.moe_utils", "", "reduce_aux_losses_tracker_across_ranks"),
    (f"{CORE}.moe.moe_logging", "MoEMetricsTracker", "_sync_metrics"),
    (f"{CORE}.multi_token_prediction", "MTPLossLoggingHelper", "reduce_loss_in_tracker"),
    (f"{CORE}.multi_token_prediction", "MTPLossLoggingHelper", "reduce_metrics_in_tracker"),
    (f"{CORE}.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper", "reduce_loss_in_tracker"),
)
LOOP = "megatron.training.training"
CONSUME = "consume_seqlen_stats_in_iteration"
LENGTHS = ("_seqlen_stats_in_iteration", "_seqlen_stats_active")
"""Globals there: lengths of packed sequences, added up by forwards, reduced and cleared after the cut."""
MACHINE = "megatron.core.rerun_state_machine"
MAXIMA = ("large_value_counts", "max_values")
"""Attributes of the rerun state machine: the largest values of a loss so far decide which ones it does not expect."""


def reductions() -> list[tuple[Any, str]]:
    """Return owner and name of every function that reduces tracked losses in this version."""
    found = []
    for module, owner, name in REDUCTIONS:
        with contextlib.suppress(ImportError):
            holder: Any = importlib.import_module(module)
            holder = getattr(holder, owner, None) if owner else holder
            if hasattr(holder, name):
                found.append((holder, name))
    return found


class Reduction(Call):
    """A function that reduces tracked losses. Followers get the reduced sums: they log and add up the same."""

    def outcome(self, value: Any) -> Scalars:
        return {name: entry for name, entry in noted().items() if name not in (LOOP, MACHINE)}

    def skipped(self, outcome: Scalars) -> None:
        put_back(outcome)


def noted() -> dict[str, Entry]:
    """Copy the entries of all trackers, and the rerun state machine's attributes: (is a group, its name or value)."""
    # The machine asserts in every forward that it is inside a step, which the script begins and ends between calls: a
    # forward redone from inside the optimizer's step would raise.
    names, found = c10d._world.pg_names, {}
    for name, entry in _live().items():
        if fields := {key: value for key, value in entry.items() if name != LOOP or key in LENGTHS}:
            found[name] = {
                key: (False, value)
                if type(value) in SIMPLE
                else (True, names[value])
                if isinstance(value, c10d.ProcessGroup)
                else (False, _copied(value))
                for key, value in fields.items()
            }
    return found


def plain(saved: dict[str, Entry]) -> Scalars:
    """Select from what `noted` returned what a newcomer needs of forwards that it did not run."""
    return {
        name: {key: value for key, value in entry.items() if name != MACHINE or key in MAXIMA}
        for name, entry in saved.items()
    }


def put_back(saved: dict[str, Entry]) -> None:
    """Make the trackers what `noted` returned, here or in another process of the rank."""
    live, groups = _live(), {name: group for group, name in c10d._world.pg_names.items()}
    for name in live.keys() - saved.keys() - {LOOP, MACHINE}:
        for value in live[name].values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    for name, fields in saved.items():
        if name not in live:
            metrics, make = _metrics()
            live[name] = _fields(metrics.setdefault(name, make()))
        for key, (is_group, value) in fields.items():
            mine = live[name].get(key)
            if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor) and mine.shape == value.shape:
                mine.copy_(value)
            else:
                live[name][key] = groups[value] if is_group else _copied(value)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if isinstance(value, dict) else value


def _live() -> dict[str, Entry]:
    """Return the entries of all trackers there are, to read and to write."""
    owners: dict[str, Any] = {o: getattr(sys.modules.get(module), o, None) for module, o, _ in REDUCTIONS if o}
    found: dict[str, Entry] = {name: owner.tracker for name, owner in owners.items() if hasattr(owner, "tracker")}
    found |= {name: _fields(entry) for name, entry in _metrics()[0].items()}
    machine = getattr(sys.modules.get(MACHINE), "_GLOBAL_RERUN_STATE_MACHINE", None)
    found |= {name: vars(owner) for name, owner in ((LOOP, sys.modules.get(LOOP)), (MACHINE, machine)) if owner}
    return found


def _metrics() -> tuple[dict[str, Any], Callable[[], Any]]:
    """Return the live table of what routers track by name, and the function that makes an entry."""
    if (module := sys.modules.get(f"{CORE}.moe.moe_logging")) is not None:
        return module.get_moe_metrics_tracker().metrics, lambda: module.MetricEntry(None)
    if (module := sys.modules.get(f"{CORE}.moe.moe_utils")) is not None:
        return module.get_moe_layer_wise_logging_tracker(), dict
    return {}, dict


def _fields(entry: Any) -> Entry:
    return entry if isinstance(entry, dict) else vars(entry)


# ---- gradient buckets: groups keep handles, a dispatched flag, and counts of gradients seen

_lives = 0  # how often bucket groups were reset


def bucket_groups(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def reset_gradient_buckets(chunks: Iterable[Any]) -> None:
    """Leave every bucket group of every model chunk as between two steps."""
    global _lives
    _lives += 1
    for group in [group for chunk in chunks for group in bucket_groups(chunk)]:
        group.grad_reduce_handle = None
        group.param_gather_handle = None
        group.param_gather_dispatched = False
        group.per_param_grad_ready_counts = {}
        group.is_last_microbatch = True
        group.grad_reduce_finished = False  # from 0.18 on
        # As in a fresh process: a newcomer knows no order of gradients yet, and all ranks must reduce in one order.
        group.is_first_batch = True
        group.golden_per_param_grad_ready_counts = {}


@contextlib.contextmanager
def no_sync(chunk: Any) -> Iterator[None]:
    """Stand in for `DistributedDataParallel.no_sync`, and close only what it opened since the last interruption."""
    # The schedules enter it by hand, so an interruption leaves it open. Upstream's `finally` then runs whenever the
    # generator is collected: inside a later step that gives wrong gradients (measured: three steps after a swap).
    life = _lives
    for group in bucket_groups(chunk):
        group.is_last_microbatch = False
    try:
        yield
    finally:
        if life == _lives:
            for group in bucket_groups(chunk):
                group.is_last_microbatch = True
