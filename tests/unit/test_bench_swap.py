"""scripts/bench_swap.py measures each fault once, strikes whom it says, and sees every rank's newest step."""

import argparse
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_swap
from bench.peers import report
from bench.peers.jobs import Setting
from bench.peers.ours import StartupJob
from clusters.events import Tail


def options(**given: object) -> argparse.Namespace:
    default: dict[str, object] = {"runs": None, "peer_runs": 3, "only": [], "megatron_lm": None, "startup_s": 0.0}
    return argparse.Namespace(**default | given)


def test_of_a_slow_script_every_node_is_struck_three_times_and_a_process_on_each_twice() -> None:
    jobs = bench_swap.plan(options(startup_s=20.0), set())
    assert [(system, len(faults)) for system, faults in jobs] == [("startup deadpool", 20)]
    ((_, struck),) = jobs
    assert len(set(struck)) == len(struck)
    places = [(fault, index % 4) for fault, index in struck]
    assert {place: places.count(place) for place in places} == {
        **{("node", place): 3 for place in range(4)},
        **{("process", place): 2 for place in range(4)},
    }


def test_what_has_been_measured_is_not_measured_again() -> None:
    done = {("startup deadpool", "node", index) for index in range(11)}
    ((_, faults),) = bench_swap.plan(options(startup_s=20.0, only=["node"]), done)
    assert faults == [("node", 11)]


def test_a_slow_script_is_measured_only_if_it_is_asked_for() -> None:
    jobs = bench_swap.plan(options(only=["deadpool"]), set())
    assert jobs and all("startup" not in system for system, _ in jobs)
    faults = [fault for system, its in jobs for fault in its if system == "deadpool"]
    assert [faults.count((kind, 9)) for kind in ("first", "node", "process", "silent")] == [1] * 4


@pytest.fixture
def job(tmp_path: Path) -> StartupJob:
    setting = Setting(tmp_path, tmp_path, tmp_path, tmp_path, "dp8", startup_s=20.0, past_steps=1000)
    return StartupJob(setting, "default")


def test_a_host_that_has_taken_over_is_struck_in_the_place_of_the_lost_one(job: StartupJob, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    formed = {"event": "WorldFormed", "node_of": [0, 0, 1, 1, 2, 2, 3, 3], "time": 1.0}
    planned = {"event": "SwapPlanned", "takers": {"1": 4}, "time": 2.0}
    lines = "".join(json.dumps(event) + "\n" for event in (formed, planned))
    (tmp_path / "output" / "events.0.jsonl").write_text(lines)
    job._tail.read()
    struck = []
    for job.number in range(5):
        struck.append(job.victim("node"))
    assert struck == [0, 4, 2, 3, 0]


def test_a_step_counts_when_all_ranks_have_done_it_whenever_the_lines_are_read(job: StartupJob) -> None:
    def write(*steps: tuple[int, int]) -> None:
        with open(job.marks.path, "a") as marks:
            marks.writelines(json.dumps({"kind": "step", "rank": rank, "step": step}) + "\n" for rank, step in steps)

    write(*((rank, 5) for rank in range(7)))
    assert job.completed() == 0
    write((7, 4))
    assert job.completed() == 4
    write((7, 5), (0, 6), (0, 4))  # the last one is done again after a swap
    assert job.completed() == 5


def test_what_recurs_with_every_step_can_be_left_unread(tmp_path: Path) -> None:
    for name in ("events.3.jsonl", "events.3.recent0.jsonl"):
        (tmp_path / name).write_text(json.dumps({"event": name, "time": 1.0}) + "\n")
    assert [event["event"] for event in Tail(tmp_path, recurring=False).read()] == ["events.3.jsonl"]
    assert len(Tail(tmp_path).read()) == 2


def test_the_table_tells_how_many_were_covered_and_that_the_values_are_equal() -> None:
    base = {"system": "startup deadpool", "outcome": "recovered"}
    lines = [{**base, "fault": "node", "figures": {"ready_s": 0.5 + i, "covered": i == 0}} for i in range(3)]
    lines.append({**base, "fault": "equal", "figures": {}})
    lines.append({**base, "fault": "equal", "figures": {}, "outcome": "differs: step 7"})
    said = report.table(report.summary(lines))
    assert "| node killed | startup deadpool | 3 of 3, 1 covered | **1.50** (0.50 .. 2.50) |" in said
    assert "| startup deadpool | 1 of 2 | differs: step 7 |" in said
