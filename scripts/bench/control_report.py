"""Figures and the table of bench_control_plane.py. Pure functions of what was measured; standard library only.

Rules of this file: a member's figure is the median over all members that lived, the coordinator's its own; a job's is
the median over its losses. Growth is the exponent of the best power law (1: linear), by least squares of logarithms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COORDINATOR, MEMBER = "coordinator", "member"
TARGETS = {
    "plan known to all": "<= 1 s at 512 agents",
    "a member's work": "the same at every size (exponent 0)",
    "the coordinator's work": "at most linear (exponent 1)",
    "memory of an agent": "<= 40 MB",
}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Condense one value per living node, the coordinator's first."""
    members = values[1:]
    return {
        COORDINATOR: values[0], MEMBER: statistics.median(members), "least": min(members), "most": max(members)
    }  # fmt: skip


def work(spent: Mapping[str, Any], kinds: Iterable[str]) -> dict[str, Any]:
    """Condense what nodes have spent: CPU time, inputs, messages sent (also by kind, where there were any)."""
    counts = spent["counts"]
    by_kind = {kind: counts[kind] for kind in kinds if any(counts[kind])}
    sent = [sum(column) for column in zip(*by_kind.values(), strict=True)] if by_kind else [0] * len(counts["inputs"])
    found: dict[str, Any] = {"wall_s": spent["wall_s"]} if "wall_s" in spent else {}
    found |= {"cpu_ms": spread([ns / 1e6 for ns in spent["cpu_ns"]]), "sent": spread(sent)}
    found |= {name: spread(counts[name]) for name in ("inputs", "received", "received_bytes")}
    found["protocol_ms"] = spread([ns / 1e6 for ns in counts["protocol_ns"]])
    found["sent_by_kind"] = {kind: spread(column) for kind, column in by_kind.items()}
    return found


def loss(measured: Mapping[str, Any], kinds: Iterable[str]) -> dict[str, Any]:
    """One loss, condensed. Seconds count from the kill."""
    seconds, kinds = measured["seconds"], tuple(kinds)
    found: dict[str, Any] = {
        "victim": measured["victim"],
        "noticed_first_s": min(seconds["noticed"]),
        "noticed_last_s": max(seconds["noticed"]),
        "known_first_s": min(seconds["planned"]),
        "known_s": max(seconds["planned"]),
    }
    found |= {f"{name}_s": seconds[name] for name in ("decided", "training", "protected")}
    return found | {name: work(measured[name], kinds) for name in ("to_plan", "to_protection")}


def figures(record: Mapping[str, Any]) -> dict[str, float]:
    """One size's row."""
    losses, idle, steps = record["losses"], record["idle"], record["steps"]
    of_members = [one for one in losses if one["victim"] == MEMBER]
    of_coordinator = [one for one in losses if one["victim"] == COORDINATOR]
    found: dict[str, float] = {
        "agents": record["shape"]["nodes"],
        "processes": record["processes"],
        "floor_s": statistics.median([*record["floor"]["wall_s"], *record["floor_after"]["wall_s"]]),
        "start_s": record["start"]["wall_s"],
        "step_s": steps["wall_s"] / steps["steps"],
        "alone_mib": record["memory"]["alone"][MEMBER],
        "coordinator_alone_mib": record["memory"]["alone"][COORDINATOR],
        "private_mib": record["memory"]["private"][MEMBER],
        "pss_mib": record["memory"]["pss"][MEMBER],
    }
    for name, chosen in (("member", of_members), ("coordinator", of_coordinator)):
        found[f"{name}_loss_s"] = statistics.median(one["known_s"] for one in chosen)
        found[f"{name}_loss_most_s"] = max(one["known_s"] for one in chosen)
    for who in (MEMBER, COORDINATOR):
        found[f"{who}_loss_cpu_ms"] = _median(of_members, "to_plan", "cpu_ms", who)
        found[f"{who}_swap_cpu_ms"] = _median(of_members, "to_protection", "cpu_ms", who)
        found[f"{who}_swap_protocol_ms"] = _median(of_members, "to_protection", "protocol_ms", who)
        found[f"{who}_swap_sent"] = _median(of_members, "to_protection", "sent", who)
        found[f"{who}_heartbeat_cpu_ms"] = idle["cpu_ms"][who] / idle["heartbeats"]
        found[f"{who}_heartbeat_protocol_ms"] = idle["protocol_ms"][who] / idle["heartbeats"]
        found[f"{who}_heartbeat_sent"] = idle["sent"][who] / idle["heartbeats"]
        found[f"{who}_step_cpu_ms"] = steps["cpu_ms"][who] / steps["steps"]
        found[f"{who}_step_sent"] = steps["sent"][who] / steps["steps"]
    return found


def _median(losses: Iterable[Mapping[str, Any]], phase: str, name: str, who: str) -> float:
    return statistics.median(float(one[phase][name][who]) for one in losses)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """The k of the power law that fits best; None without two sizes, or for values that are not positive."""
    if len(set(sizes)) < 2 or min(values) <= 0:
        return None
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope


def growth(rows: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """The exponent of every figure over the number of agents."""
    sizes = [row["agents"] for row in rows]
    return {name: exponent(sizes, [row[name] for row in rows]) for name in rows[0] if name != "agents"}


_LINES = (
    ("processes", "agents' processes", "{:.0f}"),
    ("member_loss_s", "**a member lost: the plan is known to all after**, median", "{:.3f} s"),
    ("member_loss_most_s", "... slowest", "{:.3f} s"),
    ("coordinator_loss_s", "**the coordinator lost: the same**", "{:.3f} s"),
    ("floor_s", "physical limit here: the same bytes over bare sockets", "{:.4f} s"),
    ("member_loss_cpu_ms", "CPU until the plan: a member", "{:.2f} ms"),
    ("coordinator_loss_cpu_ms", "... the coordinator", "{:.1f} ms"),
    ("member_swap_cpu_ms", "CPU until protected again: a member", "{:.1f} ms"),
    ("coordinator_swap_cpu_ms", "... the coordinator", "{:.0f} ms"),
    ("member_swap_sent", "messages until protected again: a member", "{:.1f}"),
    ("coordinator_swap_sent", "... the coordinator", "{:.0f}"),
    ("member_heartbeat_cpu_ms", "CPU per heartbeat interval, nothing happening: a member", "{:.2f} ms"),
    ("coordinator_heartbeat_cpu_ms", "... the coordinator", "{:.1f} ms"),
    ("member_heartbeat_sent", "messages per heartbeat interval: a member", "{:.2f}"),
    ("coordinator_heartbeat_sent", "... the coordinator", "{:.0f}"),
    ("step_s", "a step from staged to committed everywhere", "{:.3f} s"),
    ("member_step_cpu_ms", "CPU per step: a member", "{:.2f} ms"),
    ("coordinator_step_cpu_ms", "... the coordinator", "{:.1f} ms"),
    ("member_step_sent", "messages per step: a member", "{:.2f}"),
    ("coordinator_step_sent", "... the coordinator", "{:.0f}"),
    ("alone_mib", "**memory of an agent** (resident, shared pages in full)", "{:.1f} MiB"),
    ("coordinator_alone_mib", "... the coordinator's", "{:.1f} MiB"),
    ("private_mib", "... private pages only", "{:.1f} MiB"),
    ("pss_mib", "... proportional share (PSS)", "{:.1f} MiB"),
    ("start_s", "start, to step 0 protected", "{:.1f} s"),
)


def markdown(rows: Sequence[Mapping[str, float]], exponents: Mapping[str, float | None]) -> str:
    """The table: a column a size, and how the line grows; the targets beside."""
    names = [f"{row['agents']:.0f} agents" for row in rows]
    lines = ["| | " + " | ".join([*names, "grows with N to the power"]) + " |", "| --- " * (len(rows) + 2) + "|"]
    for key, meant, form in _LINES:
        power = exponents.get(key)
        shown = [form.format(row[key]) for row in rows] + [f"{power:.2f}" if power is not None else ""]
        lines.append(f"| {meant} | " + " | ".join(shown) + " |")
    lines += ["", "Targets: " + "; ".join(f"{what}: {wanted}" for what, wanted in TARGETS.items()) + "."]
    return "\n".join(lines)
