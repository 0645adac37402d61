"""Statistics and the table of bench_mirror.py. Pure functions of its raw samples; standard library only.

Rules of this file: steps of one block are not independent, so blocks are what is resampled; a difference is between
blocks of the same round, which ran within seconds of each other. The first step of a block is no sample: nothing of an
earlier step is in flight then.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

RESAMPLES = 10_000
PARTS = {
    "calls": "main thread, in calls",
    "rest_of_main": "main thread, in training itself",
    "stager": "staging thread",
    "link": "link thread",
    "agents_bulk": "agents, bulk threads of both ends",
    "agents_rest": "agents, all else",
    "update_waits": "(wall time) updates wait for the snapshot",
}
GB = 1e9


def of(blocks: list[dict[str, Any]], variant: str, device_ms: float) -> list[dict[str, Any]]:
    """The blocks of one variant, by round."""
    found = [block for block in blocks if (block["variant"], block["device_ms"]) == (variant, device_ms)]
    return sorted(found, key=lambda block: int(block["round"]))


def steps_s(block: dict[str, Any]) -> list[float]:
    """Step times: of every step the mean over ranks, which wait for each other; without the first."""
    return [statistics.fmean(step) / 1e9 for step in zip(*block["samples_ns"], strict=True)][1:]


def step_s(block: dict[str, Any]) -> float:
    return statistics.fmean(steps_s(block))


def cpu_s(block: dict[str, Any]) -> float:
    """CPU time of the whole job, agents included, per step: other work on the machine hardly changes it."""
    return float(block["job_cpu_s"] / block["steps"])


def interval(values: list[float], seed: int = 0) -> tuple[float, float]:
    """95 % percentile bootstrap confidence interval of the mean of `values`."""
    draw = random.Random(seed)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]


def compare(blocks: list[dict[str, Any]], variant: str, device_ms: float, beside: str = "plain") -> dict[str, Any]:
    """Step time and CPU time of `variant`, and how much more than those of `beside` in the same rounds."""
    mine, others = of(blocks, variant, device_ms), of(blocks, beside, device_ms)
    times = [time for block in mine for time in steps_s(block)]
    found: dict[str, Any] = {"variant": variant, "device_ms": device_ms, "steps": len(times), "beside": beside}
    found["collectives_per_step"] = statistics.fmean(max(block.get("counted", [0])) / block["steps"] for block in mine)
    found |= {"median_s": statistics.median(times), "mean_s": statistics.fmean(times)}
    found["cpu_per_step_s"] = statistics.fmean(map(cpu_s, mine))
    for name, value in (("more", step_s), ("cpu_more", cpu_s)) if variant != beside else ():
        base = statistics.fmean(map(value, others))
        more = [value(a) - value(b) for a, b in zip(mine, others, strict=True)]
        low, high = interval(more)
        seconds = {name: statistics.fmean(more), f"{name}_low": low, f"{name}_high": high}
        found |= {f"{key}_s": each for key, each in seconds.items()}
        found |= {f"{key}_percent": 100 * each / base for key, each in seconds.items()}
    return found


def floor_per_gb(samples: list[dict[str, int]], payload_bytes: int, *names: str) -> float:
    return statistics.median(sum(sample[name] for name in names) for sample in samples) / payload_bytes


def cost(blocks: list[dict[str, Any]], device_ms: float, payload_bytes: int) -> dict[str, Any]:
    """CPU seconds per mirrored GB, over the floor measured beside training in the same rounds (medians of blocks)."""
    mine, floors = of(blocks, "plugin", device_ms), of(blocks, "floor", device_ms)
    quiet = [sample for block in floors for sample in block["floor_quiet"]]
    beside = [sample for block in floors for sample in block["floor"]]

    def per_gb(name: str) -> float:
        per_byte: float = statistics.median(
            block["threads_ns"][name] / (block["steps"] * block["ranks"] * payload_bytes) for block in mine
        )
        return per_byte

    found: dict[str, Any] = {"device_ms": device_ms, "payload_bytes": payload_bytes}
    for name, samples in (("memcpy", ("memcpy_ns",)), ("loopback", ("send_ns", "receive_ns"))):
        found[f"{name}_per_gb"] = floor_per_gb(beside, payload_bytes, *samples)
        found[f"{name}_quiet_per_gb"] = floor_per_gb(quiet, payload_bytes, *samples)
    found["stager_per_gb"] = per_gb("stager")
    found["agents_bulk_per_gb"], found["agents_all_per_gb"] = per_gb("bulk"), per_gb("agents")
    found["trainer_over_floor"] = found["stager_per_gb"] / found["memcpy_per_gb"]
    found["agents_over_floor"] = found["agents_bulk_per_gb"] / found["loopback_per_gb"]
    return found | calls(mine)


def calls(mine: list[dict[str, Any]]) -> dict[str, float]:
    """Compute what the plugin adds on the trainers' main threads, per framework call and per step."""
    steps = sum(block["steps"] * block["ranks"] for block in mine)
    every = [call for block in mine for call in block["calls"]]
    total = {name: sum(call[name] for call in every) for name in ("count", "cpu_ns", "wall_ns")}
    return {
        "calls_per_step": total["count"] / steps,
        "main_us_per_call": total["cpu_ns"] / total["count"] / 1e3,
        "main_us_per_step": total["cpu_ns"] / steps / 1e3,
        "main_wall_us_per_step": total["wall_ns"] / steps / 1e3,
        "link_us_per_step": sum(block["threads_ns"]["link"] for block in mine) / steps / 1e3,
    }


def parts(blocks: list[dict[str, Any]], device_ms: float) -> dict[str, Any]:
    """Tell apart, per step and rank, where the plugin spends CPU time, and how long an update waits (wall time).

    Each in ms with a 95 % interval. `rest_of_main`: how much more CPU time training itself takes on the main thread
    than in the plain job of the same round: colder caches, shared memory bandwidth, collectives through handles.
    """
    pairs = list(zip(of(blocks, "plugin", device_ms), of(blocks, "plain", device_ms), strict=True))

    def per_step(block: dict[str, Any], ns: float) -> float:
        return float(ns / (block["steps"] * block["ranks"]) / 1e6)

    def called(block: dict[str, Any], name: str) -> float:
        return per_step(block, sum(call[name] for call in block["calls"]))

    def thread(block: dict[str, Any], name: str) -> float:
        return per_step(block, block["threads_ns"][name])

    plain = [thread(theirs, "main") for _, theirs in pairs]
    rows = {
        "calls": [called(mine, "cpu_ns") for mine, _ in pairs],
        "rest_of_main": [thread(a, "main") - called(a, "cpu_ns") - thread(b, "main") for a, b in pairs],
        "stager": [thread(mine, "stager") for mine, _ in pairs],
        "link": [thread(mine, "link") for mine, _ in pairs],
        "agents_bulk": [thread(mine, "bulk") for mine, _ in pairs],
        "agents_rest": [thread(mine, "agents") - thread(mine, "bulk") for mine, _ in pairs],
        "update_waits": [called(mine, "wait_ns") for mine, _ in pairs],
    }
    found: dict[str, Any] = {"device_ms": device_ms, "plain_main_ms": statistics.fmean(plain)}
    for name, values in rows.items():
        low, high = interval(values)
        found[name] = {"ms": statistics.fmean(values), "low_ms": low, "high_ms": high}
    return found


def markdown(summary: dict[str, Any]) -> str:
    """Tables: step times, each but those of `plain` beside others of its rounds; costs; parts of a step."""
    lines = ["| host idle a step | variant | steps | median step | more than beside it (95 % CI) | CPU a step | more |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in summary["step_times"]:
        more = cpu = "-"
        if "more_s" in row:
            cpu = f"{row['cpu_more_percent']:+.1f} % "
            cpu += f"({row['cpu_more_low_percent']:+.1f} .. {row['cpu_more_high_percent']:+.1f} %)"
            more = f"{1e3 * row['more_s']:+.1f} ms, {row['more_percent']:+.1f} % "
            more += f"({row['more_low_percent']:+.1f} .. {row['more_high_percent']:+.1f} %) than {row['beside']}"
        lines.append(
            f"| {row['device_ms']:g} ms | {row['variant']} | {row['steps']} | {1e3 * row['median_s']:.1f} ms "
            f"| {more} | {1e3 * row['cpu_per_step_s']:.0f} ms | {cpu} |"
        )
    lines += ["", "| per mirrored GB, CPU-s | plugin | floor beside it (quiet) | ratio |", "|---|---|---|---|"]
    for row in summary["costs"]:
        where = f"{row['payload_bytes'] / 2**20:.1f} MiB a rank, idle {row['device_ms']:g} ms"
        lines.append(
            f"| trainer: staging thread ({where}) | {row['stager_per_gb']:.3f} | memcpy {row['memcpy_per_gb']:.3f} "
            f"({row['memcpy_quiet_per_gb']:.3f}) | {row['trainer_over_floor']:.2f} |"
        )
        lines.append(
            f"| agents: bulk threads, both ends ({where}) | {row['agents_bulk_per_gb']:.3f} | loopback TCP "
            f"{row['loopback_per_gb']:.3f} ({row['loopback_quiet_per_gb']:.3f}) | {row['agents_over_floor']:.2f} |"
        )
        lines.append(f"| agents: everything ({where}) | {row['agents_all_per_gb']:.3f} | | |")
    lines += ["", "| trainer's main thread, CPU added by the plugin | per call | calls per step | per step | wall |"]
    lines += ["|---|---|---|---|---|"]
    for row in summary["costs"]:
        lines.append(
            f"| idle {row['device_ms']:g} ms | {row['main_us_per_call']:.0f} us | {row['calls_per_step']:.1f} "
            f"| {row['main_us_per_step']:.0f} us (+ link thread {row['link_us_per_step']:.0f} us) "
            f"| {row['main_wall_us_per_step']:.0f} us |"
        )
    lines += ["", "| CPU a step and rank (95 % CI) | ms | of the main thread's without the plugin |", "|---|---|---|"]
    for row in summary["parts"]:
        plain = row["plain_main_ms"]
        for name, title in PARTS.items():
            ms, low, high = (row[name][key] for key in ("ms", "low_ms", "high_ms"))
            shares = f"{100 * ms / plain:+.1f} % ({100 * low / plain:+.1f} .. {100 * high / plain:+.1f} %)"
            lines.append(f"| {title}, idle {row['device_ms']:g} ms | {ms:.2f} ({low:.2f} .. {high:.2f}) | {shares} |")
    return "\n".join(lines)
