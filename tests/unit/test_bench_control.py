"""The numbers of scripts/bench_control_plane.py are what was measured; the shapes of its jobs are what it says."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_control_plane as driver
from bench import control_floor, control_kernel, control_report as report
from bench.control_board import COUNTS, KINDS, NONE, Board
from bench.control_shape import FIRST, SECOND, Failed, Shape

ROLLUP = """55d0c8a2b000-7ffd9a5f6000 ---p 00000000 00:00 0                          [rollup]
Rss:               20480 kB
Pss:               10240 kB
Pss_Dirty:          4096 kB
Shared_Clean:       8192 kB
Shared_Dirty:       6144 kB
Private_Clean:      2048 kB
Private_Dirty:      4096 kB
"""


def counts(nodes: int, **sent: list[int]) -> dict[str, list[int]]:
    return {name: sent.get(name, [0] * nodes) for name in COUNTS}


def spent(nodes: int, coordinator_ms: float, member_ms: float) -> dict[str, Any]:
    """The coordinator has sent two messages to everybody, every member one."""
    kinds = {"Status": [nodes, *[0] * (nodes - 1)], "Prepare": [nodes] + [0] * (nodes - 1)}
    kinds |= {"Report": [0, *[1] * (nodes - 1)], "received": [nodes] + [2] * (nodes - 1)}
    cpu = [coordinator_ms * 1e6, *[member_ms * 1e6] * (nodes - 1)]
    return {"wall_s": 2.0, "cpu_ns": cpu, "counts": counts(nodes, **kinds)}


def lost(nodes: int, victim: str, known_s: float) -> dict[str, Any]:
    seconds = {"noticed": [0.01, 0.02], "planned": [0.1, known_s], "decided": 0.09, "training": 0.5, "protected": 0.4}
    work = {"to_plan": spent(nodes, nodes / 8, 3.0), "to_protection": spent(nodes, nodes / 4, 5.0)}
    return {"victim": victim, "seconds": seconds, **work}


def record(nodes: int) -> dict[str, Any]:
    losses = [lost(nodes, "member", known_s) for known_s in (0.2, 0.6, 0.3)] + [lost(nodes, "coordinator", 0.7)]
    memory = {"coordinator": 30.0, "member": 20.0 + nodes / 100, "least": 19.0, "most": 25.0}
    floor = {"wall_s": [0.001 * nodes] * 3, "cpu_s": [0.001] * 3}
    return {
        "shape": {"nodes": nodes},
        "processes": nodes,
        "start": {"wall_s": 5.0, "cpu_s": 9.0},
        "floor": floor,
        "floor_after": floor,
        "idle": report.work(spent(nodes, 40.0, 8.0), KINDS) | {"heartbeats": 4},
        "steps": report.work(spent(nodes, 40.0, 8.0), KINDS) | {"steps": 5},
        "memory": {"alone": memory, "private": memory, "pss": memory},
        "losses": [report.loss(one, KINDS) for one in losses],
    }


def test_a_members_figure_is_the_median_and_the_coordinators_its_own() -> None:
    assert report.spread([9, 1, 2, 6]) == {"coordinator": 9, "member": 2, "least": 1, "most": 6}


def test_work_adds_messages_up_over_kinds() -> None:
    found = report.work(spent(8, 4.0, 2.0), KINDS)
    assert found["sent"]["coordinator"] == 16 and found["sent"]["member"] == 1
    assert found["sent_by_kind"].keys() == {"Status", "Prepare", "Report"}
    assert found["cpu_ms"]["coordinator"] == 4.0 and found["received"]["member"] == 2


def test_a_size_is_a_row_of_medians_over_its_losses() -> None:
    row = report.figures(record(64))
    assert row["member_loss_s"] == 0.3 and row["member_loss_most_s"] == 0.6 and row["coordinator_loss_s"] == 0.7
    assert row["coordinator_loss_cpu_ms"] == 8.0 and row["member_swap_cpu_ms"] == 5.0
    assert row["member_heartbeat_cpu_ms"] == 2.0 and row["member_step_cpu_ms"] == pytest.approx(1.6)
    assert row["floor_s"] == pytest.approx(0.064) and row["step_s"] == pytest.approx(0.4)


def test_growth_is_the_exponent_of_a_power_law() -> None:
    assert report.exponent([64, 128, 256], [3.0, 3.0, 3.0]) == pytest.approx(0)
    assert report.exponent([64, 128, 256], [1.0, 2.0, 4.0]) == pytest.approx(1)
    assert report.exponent([64, 128, 256], [1.0, 4.0, 16.0]) == pytest.approx(2)
    assert report.exponent([64], [1.0]) is None and report.exponent([64, 128], [0.0, 1.0]) is None
    powers = report.growth([report.figures(record(nodes)) for nodes in (64, 128, 256)])
    assert powers["coordinator_loss_cpu_ms"] == pytest.approx(1)
    assert powers["member_loss_cpu_ms"] == pytest.approx(0)


def test_the_table_has_a_column_a_size_and_the_targets() -> None:
    rows = [report.figures(record(nodes)) for nodes in (64, 128)]
    text = report.markdown(rows, report.growth(rows))
    assert "| 64 agents | 128 agents |" in text and "| 0.300 s | 0.300 s | 0.00 |" in text
    assert "<= 1 s at 512 agents" in text and "<= 40 MB" in text
    assert "64 agents" in report.markdown(rows[:1], report.growth(rows[:1]))


@pytest.mark.parametrize(("nodes", "per_process"), [(16, 1), (64, 1), (512, 4), (130, 3)])
def test_every_agent_has_a_process_and_whoever_matters_its_own(nodes: int, per_process: int) -> None:
    shape = Shape(nodes, per_process, 1, 3)
    assert sorted(node for process in shape.processes for node in process) == list(range(nodes))
    assert max(map(len, shape.processes)) == per_process
    alone = {process[0] for process in shape.processes if len(process) == 1}
    assert {FIRST, SECOND, *shape.victims} <= alone and len(set(shape.victims)) == 3
    assert not {FIRST, SECOND} & set(shape.victims) and max(shape.victims) < nodes - shape.spares


def test_too_few_nodes_are_refused() -> None:
    with pytest.raises(Failed, match="3 losses"):
        _ = Shape(10, 1, 1, 3).victims


def test_memory_tells_shared_pages_apart() -> None:
    assert control_kernel.memory_of(ROLLUP, 1) == {"private": 6.0, "pss": 10.0, "alone": 20.0}
    assert control_kernel.memory_of(ROLLUP, 2) == {"private": 3.0, "pss": 5.0, "alone": 17.0}
    assert control_kernel.memory(os.getpid(), 1)["alone"] > 1.0


def test_the_kernel_tells_cpu_time_of_a_process() -> None:
    before, until = control_kernel.cpu_ns(os.getpid()), control_kernel.cpu_ns(os.getpid()) + 20_000_000
    while control_kernel.cpu_ns(os.getpid()) < until:
        pass
    assert before < until <= control_kernel.cpu_ns(os.getpid())


def test_what_a_forked_process_writes_is_on_the_board() -> None:
    board = Board(3)
    pid = os.fork()
    if pid == 0:
        board.row(1).add("Report", 2)
        board.row(2).set("generation", 7)
        os._exit(0)
    os.waitpid(pid, 0)
    assert board.column("Report") == [0, 2, 0] and board.column("generation") == [NONE, NONE, 7]
    assert board.counts()["Report"] == [0, 2, 0]


def test_the_floor_sends_what_a_plan_takes() -> None:
    small, large = control_floor.plan_bytes(64, 1, 4), control_floor.plan_bytes(512, 1, 4)
    assert 64 < small < large < 16 * small
    found = control_floor.measured([1, 2], small, 3)
    assert len(found["wall_s"]) == len(found["cpu_s"]) == 3 and min(found["wall_s"]) > 0


def test_a_size_that_is_there_is_not_run_again_and_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "64.json"
    assert driver.known(path, {"steps": 5}) is None
    driver.write(path, {"settings": {"steps": 5}, "floor": {}})
    assert driver.known(path, {"steps": 5}) == json.loads(path.read_text())
    with pytest.raises(Failed, match="another --out"):
        driver.known(path, {"steps": 6})
