"""Are two training runs bitwise equal? Compares what every rank printed of every step and its final digests.

Rules of this file: standard library only (neither torch nor the plugin), so that the verdict cannot share a bug with
what it judges. A run is a folder: all `*.log` files below it are searched for `metrics {...}` and `digest {...}`
lines. Missing ranks or steps, repeated lines that differ, and a step count that differs are failures too. What a
spare printed while it rehearsed (files in a folder `rehearsals`) is nobody's output: it only fills in for lines that
a killed node took with it.

    python scripts/compare_runs.py REFERENCE_DIR RUN_DIR        exit code 0 only if equal
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LINE = re.compile(r"\b(metrics|digest) (\{[^{}\n]*\})")
COMPARED = ("loss", "grad_norm", "lr", "eval")


class Malformed(Exception):
    """A run's own lines contradict each other or are incomplete."""


@dataclass
class Run:
    """The output of one run."""

    folder: Path
    metrics: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    """rank -> step -> the line's fields"""
    digests: dict[int, dict[str, Any]] = field(default_factory=dict)
    """rank -> the line's fields"""

    @property
    def steps(self) -> int:
        return max((step for steps in self.metrics.values() for step in steps), default=0)

    @property
    def first_step(self) -> int:
        """Not 1 in a run that went on from a checkpoint."""
        return min((step for steps in self.metrics.values() for step in steps), default=1)

    def losses(self) -> list[tuple[int, float]]:
        """Step and loss of the lowest rank that knows it."""
        for rank in sorted(self.metrics):
            found = [(step, line["loss"]) for step, line in sorted(self.metrics[rank].items()) if line["loss"]]
            if found:
                return [(step, float.fromhex(value)) for step, value in found]
        return []


def read_run(folder: Path) -> Run:
    """Raises: Malformed if the same rank and step was printed twice with different values."""
    run = Run(folder)
    files = sorted(folder.rglob("*.log"), key=lambda path: (is_rehearsal(path), path))
    if not files:
        raise Malformed(f"{folder}: no *.log file")
    for path in files:
        for kind, text in LINE.findall(path.read_text(errors="replace")):
            line = json.loads(text)
            table = run.metrics.setdefault(line["rank"], {}) if kind == "metrics" else run.digests
            key = line["step"] if kind == "metrics" else line["rank"]
            if table.setdefault(key, line) != line and not is_rehearsal(path):
                raise Malformed(f"{path}: {kind} printed twice and different: {table[key]} and {line}")
    return run


def is_rehearsal(path: Path) -> bool:
    return path.parent.name == "rehearsals"


def first_gap(run: Run, ranks: int, steps: range) -> str | None:
    """The first rank, step or digest that `run` lacks."""
    for rank in range(ranks):
        present = run.metrics.get(rank, {})
        missing = [step for step in steps if step not in present]
        if missing:
            return f"{run.folder}: rank {rank} printed no metrics of step {missing[0]} ({len(missing)} steps missing)"
        if rank not in run.digests:
            return f"{run.folder}: rank {rank} printed no digest"
    strangers = sorted((set(run.metrics) | set(run.digests)) - set(range(ranks)))
    return f"{run.folder}: unexpected rank {strangers[0]}" if strangers else None


def first_difference(reference: Run, run: Run) -> str | None:
    """Yield in order of steps, so that what is reported is where the runs part."""
    first, last = min(reference.first_step, run.first_step), max(reference.steps, run.steps)
    ranks, steps = len(reference.metrics), range(first, last + 1)
    for each in (reference, run):
        gap = first_gap(each, ranks, steps)
        if gap:
            return gap
    for step in steps:
        for rank in range(ranks):
            for name in COMPARED:
                want, have = reference.metrics[rank][step].get(name), run.metrics[rank][step].get(name)
                if want != have:
                    return f"step {step} rank {rank} {name}: reference {describe(want)}, run {describe(have)}"
    for rank in range(ranks):
        for name in sorted(set(reference.digests[rank]) | set(run.digests[rank])):
            want, have = reference.digests[rank].get(name), run.digests[rank].get(name)
            if want != have:
                return f"final {name} of rank {rank}: reference {want}, run {have}"
    return None


def describe(value: str | None) -> str:
    return "nothing" if value is None else f"{value} ({float.fromhex(value):.9g})"


def compare(reference_folder: Path, run_folder: Path) -> dict[str, Any]:
    """{"bit_exact", "steps", "ranks", "difference"}; `difference` is None or says where the runs part first."""
    steps = ranks = 0
    try:
        reference, run = read_run(Path(reference_folder)), read_run(Path(run_folder))
        steps, ranks = run.steps, len(run.metrics)
        difference = first_difference(reference, run)
        if not reference.metrics:
            difference = f"{reference_folder}: no metrics line at all"
    except (Malformed, json.JSONDecodeError, KeyError) as problem:
        difference = str(problem)
    return {"bit_exact": difference is None, "steps": steps, "ranks": ranks, "difference": difference}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reference", type=Path)
    parser.add_argument("run", type=Path)
    args = parser.parse_args()
    verdict = compare(args.reference, args.run)
    if verdict["bit_exact"]:
        print(f"bitwise equal: {verdict['ranks']} ranks, {verdict['steps']} steps, digests")
        return 0
    print(f"different: {verdict['difference']}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
