"""The demonstration again and again, every run with another seed: how often does it hold, and how fast is it?

    python scripts/soak.py --runs 50 --out soak -- --steps 30

What stands behind `--` goes to demo.py. One JSON line per run is kept in OUT/runs.jsonl; a second call goes on where
the first stopped. The table at the end has the seconds from the kill, for ranks a spare had rehearsed and for others.

Rules of this file: standard library only; it starts demo.py and believes nothing but its last line and exit code.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().with_name("demo.py")
PHASES = ("detect_s", "plan_s", "unblock_s", "groups_s", "restore_s", "ready_s", "first_step_s")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("demo", nargs=argparse.REMAINDER, help="-- arguments of demo.py")
    args = parser.parse_args()
    args.demo = args.demo[1:] if args.demo[:1] == ["--"] else args.demo
    return args


def run(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One demonstration; its folder is kept only if something did not hold."""
    folder, began = args.out / f"seed{seed}", time.monotonic()
    command = [sys.executable, str(DEMO), "--seed", str(seed), "--out", str(folder), *args.demo]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = ended.stdout.splitlines()
    try:
        summary = json.loads(lines[-1])
    except (IndexError, ValueError):
        summary = {"swaps": []}
    if ended.returncode:
        (args.out / f"seed{seed}.txt").write_text(ended.stdout)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return {"seed": seed, "returncode": ended.returncode, "seconds": round(time.monotonic() - began, 1), **summary}


def table(runs: list[dict[str, Any]]) -> str:
    """Median and range of every phase, by whether the lost node was rehearsed."""
    lines = []
    for title, rehearsed in (("rehearsed", True), ("not rehearsed", False)):
        swaps = [swap for run in runs for swap in run["swaps"] if swap["covered"] == rehearsed]
        for phase in PHASES:
            values = [swap[phase] for swap in swaps if swap[phase] is not None]
            if values:
                middle, spread = statistics.median(values), f"{min(values):.3f} .. {max(values):.3f}"
                lines.append(f"{title:14s} {phase:14s} median {middle:.3f} s ({spread}; n={len(values)})")
    return "\n".join(lines)


def main() -> int:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "runs.jsonl"
    runs = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {one["seed"] for one in runs}
    for seed in range(args.first_seed, args.first_seed + args.runs):
        if seed in done:
            continue
        runs.append(run(args, seed))
        with open(log, "a") as output:
            output.write(json.dumps(runs[-1]) + "\n")
        verdict = "FAILED" if runs[-1]["returncode"] else "holds"
        print(f"seed {seed}: {verdict} ({runs[-1]['seconds']} s)", flush=True)
    failed = [one["seed"] for one in runs if one["returncode"]]
    print(table(runs))
    print(f"{len(runs) - len(failed)} of {len(runs)} runs hold" + (f"; failed seeds: {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
