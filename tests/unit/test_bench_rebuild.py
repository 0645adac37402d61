"""The tables of scripts/bench_rebuild.py say what was counted."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench import rebuild_report as report
from bench.rebuild_report import Group, Kind, Layout

LAYOUT = Layout(tp=2, pp=1, dp=2, node_ranks=2)
GROUPS = [
    Group("default_pg", "nccl", (0, 1, 2, 3)),
    *(Group("TENSOR", "nccl", ranks) for ranks in ((0, 1), (2, 3))),
    *(Group("DATA", "nccl", ranks) for ranks in ((0, 2), (1, 3))),
    *(Group("DATA_GLOO", "gloo", ranks) for ranks in ((0, 2), (1, 3))),
    *(Group("ALONE", "nccl", (rank,)) for rank in range(4)),
]
LOST = LAYOUT.on_node(1)
USED = frozenset({"TENSOR", "DATA"})


def counted(rank: int) -> dict[str, Any]:
    store = {"add": 1, "wait": 3, "set": 2, "get": 2, "multi_get": 1}
    return {"mine": [group for group in GROUPS if rank in group.ranks], "store": store}


def rows() -> list[dict[str, Any]]:
    return [report.row(kind, counted(kind.first), LOST, USED) for kind in report.kinds(GROUPS, 4, LOST)]


def test_ranks_are_of_a_kind_if_a_loss_is_the_same_to_them() -> None:
    assert LAYOUT.nodes == 2 and sorted(LOST) == [2, 3]
    assert report.kinds(GROUPS, 4, LOST) == [Kind(0, 2, False), Kind(2, 2, True)]
    assert report.kinds([*GROUPS, Group("MORE", "nccl", (0, 3))], 4, LOST) == [
        Kind(0, 1, False), Kind(1, 1, False), Kind(2, 1, True), Kind(3, 1, True)
    ]  # fmt: skip


def test_a_survivor_has_communicators_without_a_lost_member_and_a_replacement_none() -> None:
    survivor, replacement = rows()
    assert (survivor["nccl"], survivor["nccl_used"], survivor["nccl_kept"], survivor["nccl_used_kept"]) == (3, 2, 1, 1)
    assert survivor["kept"] == ["TENSOR"] and survivor["touched"] == ["DATA", "DATA_GLOO", "default_pg"]
    assert (replacement["nccl"], replacement["nccl_kept"], replacement["gloo_kept"]) == (3, 0, 0)
    assert survivor["groups"] == 5 and survivor["gloo_connections"] == 1
    assert survivor["nccl_ring_peers"] == 2 + 1 + 1, "two of four members, the only other one of two"


def test_round_trips_are_those_of_each_call() -> None:
    survivor, _ = rows()
    assert survivor["round_trips"] == 1 + 3 + 2 * 2 + 2 and survivor["round_trips_to_use"] == 2 * 2
    whole = report.job(GROUPS, LOST, rows(), USED)
    assert whole["round_trips"] == 4 * 10 and whole["round_trips_to_use"] == 2 * 4
    assert (whole["nccl"], whole["nccl_kept"], whole["gloo"], whole["gloo_kept"]) == (5, 1, 2, 0)


def test_a_swap_waits_for_whoever_has_most_to_connect() -> None:
    for saving, cost_s in zip(report.savings(rows()), report.PUBLISHED.values(), strict=True):
        assert saving["all_s"] == saving["others_kept_s"] == 2 * cost_s
        assert saving["a_survivor_least_s"] == cost_s and saving["eager_s"] == round(3 * cost_s, 2)


def test_the_table_has_a_row_for_each_kind() -> None:
    text = report.markdown("small", rows()).splitlines()
    assert text[0] == "**small**" and len(text) == 4 + 2
    assert text[4].startswith("| rank 0 | 2 | 3 (2) | 1 (1) | 1 | 0 | 1 | 10 + 4 |")
    assert text[5].startswith("| rank 2, lost | 2 | 3 (2) | 0 (0) | 1 | 0 |")
