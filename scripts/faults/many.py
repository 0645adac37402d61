"""Very many swaps in one job, and what its long-lived processes keep of each: memory, descriptors, threads, sockets.

Rules of this file: rank losses in place, round and round over all ranks but two, whose processes are the survivors that
live through all of them; every sample is taken between two swaps, while all ranks wait in the training script.
What grows is judged by a straight line through the second half of the samples: the first half fills caches. On CUDA
devices nothing at all may be kept of a swap: no device memory, no descriptor, no thread.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from clusters import processes
from clusters.demo_report import pyplot
from clusters.references import arguments_with_data, reference
from gpt.layouts import LAYOUTS, Layout

from faults.cells import SETTINGS, SLOTS
from faults.job import Job, Outcome
from faults.plan import Kill
from faults.table import keep

LAYOUT = {"cpu": LAYOUTS["dp4"], "cuda": LAYOUTS["pp2-dp2"]}
SURVIVORS = {0: "survivor that hosts the stores", 3: "survivor"}
"""Ranks that are never hit: the first one of node 0, whose process offers every generation's store, and another."""
SPACING, FIRST = 3, 4
PHASES = ("forward", "backward", "before", "optimizer", "update", "staging", "push", "between")
QUANTITIES = ("rss_kib", "private_kib", "device_kib", "descriptors", "threads", "sockets")
FLAT = ("device_kib", "descriptors", "threads")
"""No process that survives has more of these in the last quarter of the swaps than in the one before."""
DEVICE_MEMORY = "/memfd:fakecuda-device"
"""Its name in the maps of a process, where the stand-in for CUDA (tests/fakecuda) is the device; 0 KiB elsewhere."""
Sample = dict[str, Any]


class ManySwaps(Job):
    """Samples every long-lived process before each fault."""

    samples: list[Sample] = []

    def before_fault(self, outcome: Outcome) -> None:
        known = processes.table()
        for name, pid in long_lived(self, known).items():
            sample = look(pid)
            if sample is not None:
                self.samples.append({"swap": outcome.kill.index, "process": name, "pid": pid, **sample})


def long_lived(job: Job, known: dict[int, processes.Entry]) -> dict[str, int]:
    """name -> pid. The first children of a node's launcher are supervisors; theirs are agent and standby processes."""
    found: dict[str, int] = {}
    for node in job.cluster.nodes:
        supervisors = sorted(pid for pid, entry in known.items() if entry.parent == node.leader)
        for slot, supervisor in enumerate(supervisors):
            found[f"supervisor {node.index}.{slot}"] = supervisor
            children = sorted(pid for pid, entry in known.items() if entry.parent == supervisor)
            names = ["agent", "standby"] if slot == 0 else ["standby"]
            for name, pid in zip(names, children, strict=False):
                found[f"{name} {node.index}.{slot}"] = pid
    found.update({name: job.plan.pid_of(rank) for rank, name in SURVIVORS.items()})
    return found


def look(pid: int) -> Sample | None:
    """The quantities of one process; None if it has gone."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        descriptors = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    except (OSError, ValueError):
        return None
    private = sum(int(line.split()[1]) for line in rollup if line.startswith("Private"))
    ranges = [line.split()[0].split("-") for line in maps if DEVICE_MEMORY in line]
    device_kib = sum(int(end, 16) - int(start, 16) for start, end in ranges) >> 10
    sockets = sum(target.startswith("socket:") for target in descriptors)
    return {
        "rss_kib": int(status["VmRSS"].split()[0]), "private_kib": private, "device_kib": device_kib,
        "descriptors": len(descriptors), "threads": int(status["Threads"]), "sockets": sockets,
    }  # fmt: skip


def planned(swaps: int, layout: Layout) -> list[Kill]:
    """Every rank but the survivors in turn, in every phase in turn."""
    victims = [rank for rank in range(layout.world_size) if rank not in SURVIVORS]
    kills = []
    for index in range(swaps):
        step = FIRST + SPACING * index
        phase, rank = PHASES[index % len(PHASES)], victims[index % len(victims)]
        kills.append(Kill(index, -1, step, phase, "rank", rank, hold=step - 2))
    return kills


def growth(samples: list[Sample]) -> dict[str, dict[str, float]]:
    """Process -> quantity -> slope per swap over the second half of its samples."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(sample["process"] for sample in samples):
        mine = [sample for sample in samples if sample["process"] == name]
        late = mine[len(mine) // 2 :]
        if len(late) > 2:
            swaps = [sample["swap"] for sample in late]
            found[name] = {
                quantity: round(statistics.linear_regression(swaps, [sample[quantity] for sample in late]).slope, 4)
                for quantity in QUANTITIES
            }
    return found


def gained(values: list[int]) -> float:
    """Return by how much more is in use in the second half of these samples than in the first.

    What every swap leaves raises the least and the median in use alike. Helper threads that some samples meet do not
    raise the least, a connection that is not made yet does not lower the median: both count for nothing.
    """
    half = len(values) // 2
    return min(of(values[half:]) - of(values[:half]) for of in (min, statistics.median))


def kept(samples: list[Sample]) -> list[str]:
    """Describe what the surviving ranks keep of swaps."""
    found = []
    for name in SURVIVORS.values():
        mine = [sample for sample in samples if sample["process"] == name]
        quarter = len(mine) // 4
        if not quarter:
            found.append(f"{name}: {len(mine)} samples, expected one for each swap")
            continue
        for quantity in FLAT:
            more = gained([one[quantity] for one in mine[-2 * quarter :]])
            if more > 0:
                found.append(f"{name}: {more:g} more {quantity} in {quarter} swaps")
    return found


def draw(path: Path, samples: list[Sample]) -> None:
    plt = pyplot()
    figure, panels = plt.subplots(len(QUANTITIES), 1, figsize=(8, 12), layout="constrained", sharex=True)
    colors = {"survivor": "#c0392b", "agent": "#2980b9", "standby": "#27ae60", "supervisor": "#9aa5b1"}
    for name in dict.fromkeys(sample["process"] for sample in samples):
        mine = [sample for sample in samples if sample["process"] == name]
        color = next(color for kind, color in colors.items() if name.startswith(kind))
        for panel, quantity in zip(panels, QUANTITIES, strict=True):
            panel.plot([s["swap"] for s in mine], [s[quantity] for s in mine], color=color, linewidth=1)
    for panel, quantity in zip(panels, QUANTITIES, strict=True):
        panel.set_ylabel(quantity)
    panels[-1].set_xlabel("swaps so far")
    handles = [plt.Line2D([], [], color=color, label=kind) for kind, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(out: Path, references: Path, swaps: int, device: str) -> int:
    steps, layout = FIRST + SPACING * swaps + 4, LAYOUT[device]
    training = arguments_with_data([*layout.arguments, "--train-iters", str(steps), "--eval-interval", "0"])
    undisturbed = reference(references, training, layout.world_size, slots=SLOTS)
    settings = {**SETTINGS, "restarts_max": swaps}
    is_card = device == "cuda"
    job = ManySwaps(
        out / "many", training, layout.world_size, SLOTS, 1, planned(swaps, layout), settings, only_struck=is_card
    )
    began = time.monotonic()
    verdict = job.run(undisturbed)
    slopes, leaks = growth(job.samples), kept(job.samples) if is_card else []
    problems = [verdict.hang, verdict.difference, *verdict.left, *(one.problem for one in verdict.outcomes), *leaks]
    result = {
        "swaps": sum(one.ready_s is not None for one in verdict.outcomes), "holds": verdict.holds, "hang": verdict.hang,
        "bit_exact": verdict.bit_exact, "seconds": round(time.monotonic() - began, 1), "difference": verdict.difference,
        "ready_s": [one.ready_s for one in verdict.outcomes], "growth_per_swap": slopes,
        "kept": leaks, "problems": [one.problem for one in verdict.outcomes if one.problem],
    }  # fmt: skip
    line = {"cell": f"{swaps} swaps in one job", "ok": not any(problems), "problem": "; ".join(filter(None, problems))}
    keep(out / "many.jsonl", line | {"refused": "", "ready_s": verdict.outcomes[-1].ready_s})
    (out / "many.json").write_text(json.dumps(result | {"samples": job.samples}, indent=1))
    try:
        draw(out / "many.png", job.samples)
    except ImportError:
        print("matplotlib is not installed: no picture")
    print(json.dumps(result, indent=1))
    return int(not line["ok"])
