"""The numbers of scripts/bench_mirror.py are what its samples say."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench import mirror_report as report

PAYLOAD = 1_000_000_000


def block(variant: str, number: int, step_ms: float, **more: Any) -> dict[str, Any]:
    samples = [[int(1e9), *[int(step_ms * 1e6)] * 3]] * 2  # the first step of a block is no sample
    fields = {"variant": variant, "device_ms": 0.0, "round": number, "steps": 4, "ranks": 2, "job_cpu_s": 2.0}
    return fields | {"samples_ns": samples} | more


def plugin(number: int) -> dict[str, Any]:
    threads = {"main": int(0.1e9), "stager": int(0.88e9), "link": 8000, "bulk": int(2.4e9), "agents": int(3.2e9)}
    calls = [{"count": 20, "cpu_ns": 8_000_000, "wall_ns": 16_000_000, "wait_ns": 4_000_000}] * 2
    return block("plugin", number, 110 + number, threads_ns=threads, calls=calls, job_cpu_s=2.1)


def floor(number: int) -> dict[str, Any]:
    sample = {"memcpy_ns": int(0.1e9), "send_ns": int(0.1e9), "receive_ns": int(0.1e9)}
    return block("floor", number, 100, floor=[sample], floor_quiet=[sample])


@pytest.fixture
def blocks() -> list[dict[str, Any]]:
    plain = {"threads_ns": {"main": int(0.08e9)}, "calls": []}
    return [made for n in range(3) for made in (plugin(n), block("plain", n, 100, **plain), floor(n))]


def test_a_difference_is_between_blocks_of_one_round(blocks: list[dict[str, Any]]) -> None:
    found = report.compare(blocks, "plugin", 0.0)
    assert found["steps"] == 9 and found["median_s"] == pytest.approx(0.111)
    assert found["more_s"] == pytest.approx(0.011) and found["more_percent"] == pytest.approx(11)
    assert 0.0099 < found["more_low_s"] < found["more_s"] < found["more_high_s"] < 0.0121
    assert found["cpu_more_s"] == pytest.approx(0.025) and found["cpu_more_percent"] == pytest.approx(5)
    assert "more_s" not in report.compare(blocks, "plain", 0.0)


def test_costs_are_per_gigabyte_and_over_the_floor(blocks: list[dict[str, Any]]) -> None:
    found = report.cost(blocks, 0.0, PAYLOAD)
    assert found["stager_per_gb"] == pytest.approx(0.11) and found["trainer_over_floor"] == pytest.approx(1.1)
    assert found["agents_bulk_per_gb"] == pytest.approx(0.3) and found["agents_over_floor"] == pytest.approx(1.5)
    assert found["agents_all_per_gb"] == pytest.approx(0.4)
    assert found["main_us_per_call"] == pytest.approx(400) and found["calls_per_step"] == pytest.approx(5)
    assert found["main_us_per_step"] == pytest.approx(2000)


def test_the_parts_of_a_step_are_told_apart(blocks: list[dict[str, Any]]) -> None:
    found = report.parts(blocks, 0.0)
    assert found["plain_main_ms"] == pytest.approx(10)
    ms = {name: found[name]["ms"] for name in report.PARTS}
    assert ms["calls"] == pytest.approx(2) and ms["rest_of_main"] == pytest.approx(0.5)
    assert ms["stager"] == pytest.approx(110) and ms["link"] == pytest.approx(0.001)
    assert ms["agents_bulk"] == pytest.approx(300) and ms["agents_rest"] == pytest.approx(100)
    assert ms["update_waits"] == pytest.approx(1)


def test_the_table_shows_every_row(blocks: list[dict[str, Any]]) -> None:
    rows = [report.compare(blocks, variant, 0.0) for variant in ("plain", "plugin")]
    parts = [report.parts(blocks, 0.0)]
    text = report.markdown({"step_times": rows, "costs": [report.cost(blocks, 0.0, PAYLOAD)], "parts": parts})
    assert "| 0 ms | plugin | 9 | 111.0 ms | +11.0 ms, +11.0 %" in text and "| 1.10 |" in text and "| 1.50 |" in text
    assert "| main thread, in calls, idle 0 ms | 2.00 (2.00 .. 2.00) | +20.0 % (+20.0 .. +20.0 %) |" in text
