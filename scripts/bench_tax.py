"""Count what the plugin adds to a step on a device: kernels, copies, waits of the host, allocations.

    eval "$(python tests/fakecuda/build.py)" && $PYTHON scripts/bench_tax.py --out tax-out
    $PYTHON scripts/bench_tax.py --out tax-zero --framework deepspeed  DeepSpeed's engines instead of Megatron-core

A job of four ranks on the stand-in for CUDA (tests/fakecuda), without the plugin and with it (real agents, a spare),
each in two lengths: the difference is what steps do. Nothing is timed.

Rules of this file: counts of the stand-in and of torch's allocator only; events are left out, as which of them are
recorded and waited for depends on time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import make_corpus
from bench.control_kernel import machine
from clusters import card, forked_node
from clusters.forked import Cluster
from clusters.references import CORPUS, arguments_with_data
from gpt.layouts import ENGINES_ON_CARDS, Layout
from run_plain import run_ranks

SCRIPTS = Path(__file__).resolve().parent
RANKS, STEPS = 4, (4, 12)
_SIZES = "--hidden-size 64 --seq-length 64 --deterministic-mode --use-distributed-optimizer --dtype bf16"
_ZERO_1 = ENGINES_ON_CARDS["zero1-bf16-adamw"]
LAYOUTS = {
    "megatron": {
        "PP 2, DP 2": Layout(("--pp", "2", *_SIZES.split())),
        "TP 2, DP 2, overlapped": Layout(
            ("--tp", "2", "--overlap-grad-reduce", "--overlap-param-gather", *_SIZES.split())
        ),
    },
    "deepspeed": {
        "ZeRO 1": _ZERO_1,
        "ZeRO 1, loss in the loop": replace(_ZERO_1, arguments=(*_ZERO_1.arguments, "--loss-outside")),
        "ZeRO 3": ENGINES_ON_CARDS["zero3-bf16-adamw"],
    },
}
WAITS = ("stream_waits", "copy_waits", "form_waits", "event_waits", "device_waits")
COUNTS = ("launches", "copies", "sets", "host_functions", "allocations", "host_allocations", "blocks", *WAITS)
DEADLINE_S = 300.0
POLL_S = 0.05


def words(layout: Layout, steps: int, out: Path) -> list[str]:
    """The training script's command line, behind the one that counts."""
    training = [*layout.arguments, "--eval-interval", "0", "--train-iters", str(steps)]
    counting = [SCRIPTS / "bench" / "tax_counts.py", "--out", out, "--", SCRIPTS / layout.script]
    return [*map(str, counting), *arguments_with_data(training, layout.script)]


def run(layout: Layout, steps: int, protected: bool, out: Path) -> list[dict[str, Any]]:
    """Each rank's counts. Raises: SystemExit if the job does not finish."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if protected:
        codes = with_plugin(words(layout, steps, out), out)
    else:
        codes = {run_ranks(RANKS, out, words(layout, steps, out), slots=1, deadline_s=DEADLINE_S)}
    if codes != {0}:
        raise SystemExit(f"[tax] a job ended with {codes}, expected 0; its output is in {out}")
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def with_plugin(script: list[str], out: Path) -> set[int | None]:
    cluster = Cluster(out / "job", RANKS + 1, 1, script, 1, {"patience_s": 10.0})
    deadline = time.monotonic() + DEADLINE_S
    try:
        cluster.start()
        while None in cluster.exit_codes() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return set(cluster.exit_codes())
    finally:
        cluster.close()


def of_a_step(short: dict[str, Any], long: dict[str, Any]) -> dict[str, float]:
    return {name: (long[name] - short[name]) / (STEPS[1] - STEPS[0]) for name in COUNTS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tax-out"))
    parser.add_argument("--framework", choices=LAYOUTS, default="megatron")
    parser.add_argument("--layouts", nargs="+", help="default: all of the framework's")
    args = parser.parse_args()
    layouts = LAYOUTS[args.framework]
    names = args.layouts or list(layouts)
    if unknown := set(names) - set(layouts):
        parser.error(f"no such layout: {', '.join(sorted(unknown))}; there are: {'; '.join(layouts)}")
    out = args.out.resolve()
    os.environ.update(card.environment(), TORCH_DIST_USE_NCCL2="0")  # the plugin's communicators, also without it
    make_corpus.ensure(CORPUS)
    forked_node.preload(forked_node.MODULES[args.framework], device="cuda")
    versions = {name: version(name) for name in ("torch", "megatron-core", "deepspeed")}
    found: dict[str, Any] = {"machine": machine(), "versions": versions, "layouts": {}}
    for layout in names:
        rows = {}
        for name, protected in (("plain", False), ("plugin", True)):
            place = out / layout.replace(", ", "-").replace(" ", "") / name
            runs = [run(layouts[layout], steps, protected, place / str(steps)) for steps in STEPS]
            rows[name] = [of_a_step(short, long) for short, long in zip(*runs, strict=True)]
        found["layouts"][layout] = rows
        for rank in range(RANKS):
            pairs = {name: rows["plugin"][rank][name] - rows["plain"][rank][name] for name in COUNTS}
            more = ", ".join(f"{many:+g} {name}" for name, many in pairs.items() if many)
            print(f"[tax] {layout}, rank {rank}, a step: {more}", flush=True)
    (out / "tax.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
