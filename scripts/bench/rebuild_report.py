"""Counts of bench_rebuild.py, sorted: kinds of ranks, what a loss touches, and the tables. Standard library only.

Rules of this file: a communicator is a group's of one backend, with more than one member; those of one member connect
nobody. A round trip is a request to the store's server that waits for its answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

TRIPS = {"set": 0, "add": 1, "wait": 1, "get": 2, "multi_get": 2}
"""Round trips of a call of TCPStore: set waits for no answer, and whoever gets waits for the key first."""
RING = 2
"""Peers that NCCL connects a rank to, per channel of a ring."""

PUBLISHED = {
    "8 GPUs of a host, NVLink (NVIDIA/nccl-tests issue 273): 0.02 s of it connections": 0.66,
    "8 H100 of a host, NCCL 2.22.3 (NVIDIA/nccl issue 534, 2024): 0.12 s of it connections, 1.6 s bootstrap": 2.46,
    "32 V100, InfiniBand, 32 communicators in 130 s (the same, 2021)": 4.06,
    "16 hosts, 7 communicators in 41.7 s, which NCCL's maintainer finds too much (the same, 2021)": 5.95,
}
"""Seconds until one communicator can be used, as others report them."""


@dataclass(frozen=True)
class Layout:
    """Ranks for each kind of parallelism, and on each node."""

    tp: int
    pp: int
    dp: int
    node_ranks: int

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def nodes(self) -> int:
        return self.ranks // self.node_ranks

    @property
    def name(self) -> str:
        return f"TP{self.tp} PP{self.pp} DP{self.dp}"

    def on_node(self, node: int) -> frozenset[int]:
        """The ranks of a node."""
        return frozenset(range(node * self.node_ranks, (node + 1) * self.node_ranks))


class Group(NamedTuple):
    """One process group of one backend: the framework's name for it, and its members."""

    role: str
    backend: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """Ranks that differ in nothing a rebuild could tell: how many there are, and the first of them."""

    first: int
    count: int
    is_lost: bool


def communicators(groups: Iterable[Group]) -> list[Group]:
    return [group for group in groups if len(group.ranks) > 1]


def kinds(groups: Sequence[Group], ranks: int, lost: frozenset[int]) -> list[Kind]:
    """Sort all ranks by their communicators: role, backend, size, and how many lost ranks each has."""
    seen: dict[int, list[tuple[str, str, int, int]]] = {rank: [] for rank in range(ranks)}
    for group in communicators(groups):
        fact = (group.role, group.backend, len(group.ranks), len(lost.intersection(group.ranks)))
        for rank in group.ranks:
            seen[rank].append(fact)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for rank, facts in seen.items():
        alike.setdefault((rank in lost, *sorted(facts)), []).append(rank)
    return [Kind(members[0], len(members), members[0] in lost) for members in alike.values()]


def row(kind: Kind, counted: Mapping[str, Any], lost: frozenset[int], used: frozenset[str]) -> dict[str, Any]:
    """The figures of one rank that stands for its kind."""
    mine = communicators(counted["mine"])
    kept = [group for group in mine if not lost.intersection(group.ranks)]
    nccl = [group for group in mine if group.backend == "nccl"]
    gloo = [group for group in mine if group.backend == "gloo"]
    return {
        "rank": kind.first,
        "ranks": kind.count,
        "lost": kind.is_lost,
        "groups": len(counted["mine"]),
        "nccl": len(nccl),
        "gloo": len(gloo),
        "nccl_used": sum(group.role in used for group in nccl),
        "nccl_kept": sum(group in kept for group in nccl),
        "nccl_used_kept": sum(group.role in used and group in kept for group in nccl),
        "gloo_kept": sum(group in kept for group in gloo),
        "gloo_connections": sum(len(group.ranks) - 1 for group in gloo),
        "nccl_ring_peers": sum(min(RING, len(group.ranks) - 1) for group in nccl),
        "store_calls": counted["store"],
        "round_trips": sum(TRIPS[name] * calls for name, calls in counted["store"].items()),
        "round_trips_to_use": TRIPS["get"] * sum(group.role in used for group in nccl),
        "touched": sorted({group.role for group in mine if group not in kept}),
        "kept": sorted({group.role for group in kept}),
    }


def job(
    groups: Sequence[Group], lost: frozenset[int], rows: Sequence[Mapping[str, Any]], used: frozenset[str]
) -> dict[str, Any]:
    """All ranks together: the job's communicators, those without a lost member, and what the store's server answers."""
    all_of_them = communicators(groups)
    kept = [group for group in all_of_them if not lost.intersection(group.ranks)]
    found: dict[str, Any] = {"round_trips": sum(each["round_trips"] * each["ranks"] for each in rows)}
    joining = [len(group.ranks) - 1 for group in all_of_them if group.backend == "nccl" and group.role in used]
    found["round_trips_to_use"] = TRIPS["get"] * sum(joining)
    for backend in sorted({group.backend for group in all_of_them}):
        found[backend] = sum(group.backend == backend for group in all_of_them)
        found[f"{backend}_kept"] = sum(group.backend == backend for group in kept)
    return found


def savings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compute what keeping communicators without a lost member is worth at each published cost, in seconds.

    A rank connects its communicators one after the other, and a swap is over when the last rank is done.
    """
    found = []
    for what, cost_s in PUBLISHED.items():
        survivors = [each for each in rows if not each["lost"]]
        times = {
            "all": max(each["nccl_used"] for each in rows),
            "others_kept": max(each["nccl_used"] - each["nccl_used_kept"] for each in rows),
            "a_survivor_least": min(each["nccl_used"] - each["nccl_used_kept"] for each in survivors),
            "eager": max(each["nccl"] for each in rows),
        } if survivors else {}  # fmt: skip
        seconds = {f"{name}_s": round(cost_s * count, 2) for name, count in times.items()}
        found.append({"what": what, "each_s": cost_s} | seconds)
    return found


_COLUMNS = {
    "kind": "rank {rank}",
    "ranks of it": "{ranks}",
    "NCCL (used)": "{nccl} ({nccl_used})",
    "without a lost member (used)": "{nccl_kept} ({nccl_used_kept})",
    "gloo": "{gloo}",
    "without a lost member": "{gloo_kept}",
    "gloo's connections": "{gloo_connections}",
    "store round trips: rebuild + first use": "{round_trips} + {round_trips_to_use}",
}


def markdown(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of one set-up: a row for each kind of rank."""
    lines = [f"**{name}**", "", "| " + " | ".join(_COLUMNS) + " |"]
    lines.append("| --- " * len(_COLUMNS) + "|")
    for each in rows:
        each = {**each, "rank": f"{each['rank']}{', lost' if each['lost'] else ''}"}
        lines.append("| " + " | ".join(form.format(**each) for form in _COLUMNS.values()) + " |")
    return "\n".join(lines)
