"""Does the simulation find bugs? One-line bugs of the protocol, and how many seeds each of them survives.

    python scripts/mutants.py --seeds 0:10000 --out mutants.jsonl [--only gate-removed ...]

Each bug (scripts/faults/mutants.py) is put into a copy of the package, whose simulation runs until a seed breaks an
invariant that it does not break without the bug. One line of JSON for each bug, written after every hundred seeds; a
bug in --out that was caught is not hunted again, one that was not is hunted from where that ended.

Rules of this file: the hunt itself runs in a process of its own that imports nothing but the copy.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from faults.mutants import MUTANTS, Mutant

PACKAGE = Path(__file__).resolve().parents[1] / "deadpool_plugin"
TESTS = Path(__file__).resolve().parents[1] / "tests"
AT_ONCE = 100
"""Seeds between two lines written."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:10000", metavar="A:B", help="from A up to B - 1")
    parser.add_argument("--only", nargs="+", default=[mutant.name for mutant in MUTANTS], metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--hunt", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# -- the hunt, in a process of its own ---------------------------------------------------------------------------------


def hunt(package: Path, seeds: range) -> dict[str, Any]:
    """Run `seeds` of the `package` at that place until one breaks an invariant."""
    sys.path[:0] = [str(package.parent), str(TESTS)]
    from simulator.campaign import outcomes

    import deadpool_plugin

    assert Path(deadpool_plugin.__file__).parent == package, deadpool_plugin.__file__
    for outcome in outcomes(seeds):
        if outcome.finding is not None:
            finding = outcome.finding
            return {"seed": outcome.seed, "invariant": finding.invariant, "sentence": finding.sentence}
    return {"seed": None}


def hunted(package: Path, first: int, last: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--hunt", str(package), "--seeds", f"{first}:{last}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# -- one bug after the other -------------------------------------------------------------------------------------------


def planted(mutant: Mutant, folder: Path) -> Path:
    """A copy of the package with the bug in it."""
    package = folder / PACKAGE.name
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    path = package / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.file} has {text.count(mutant.old)} times {mutant.old!r}, not once")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    return package


def pursue(mutant: Mutant, record: dict[str, Any], last: int) -> dict[str, Any] | None:
    """`record` after the next seeds, with the seed that caught the bug if one did; None if there is nothing to do."""
    if record["caught"] or record["next"] >= last:
        return None
    began, first = time.monotonic(), record["next"]
    with tempfile.TemporaryDirectory() as folder:
        found = hunted(planted(mutant, Path(folder)), first, min(first + AT_ONCE, last))
    seed = found["seed"]
    ended = min(first + AT_ONCE, last) if seed is None else seed + 1
    fails_anyway = seed is not None and hunted(PACKAGE, seed, seed + 1)["seed"] is not None
    found["caught"] = seed is not None and not fails_anyway
    return {**record, **found, "next": ended, "seconds": round(record["seconds"] + time.monotonic() - began, 1)}


def main() -> int:
    args = parse_args()
    first, last = map(int, args.seeds.split(":"))
    if args.hunt:
        print(json.dumps(hunt(args.hunt, range(first, last))))
        return 0
    records = read(args.out)
    for mutant in (one for one in MUTANTS if one.name in args.only):
        fresh = {"mutant": mutant.name, "why": mutant.why, "caught": False, "next": first, "seconds": 0.0}
        record: dict[str, Any] | None = records.get(mutant.name, fresh)
        while record is not None:
            records[mutant.name] = record
            write(args.out, records)
            record = pursue(mutant, record, last)
        print(told(records[mutant.name]), flush=True)
    return 0 if all(record["caught"] for record in records.values()) else 1


def read(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {record["mutant"]: record for record in map(json.loads, lines)}


def write(path: Path, records: dict[str, dict[str, Any]]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text("".join(json.dumps(record) + "\n" for record in records.values()), encoding="utf-8")
    draft.replace(path)


def told(record: dict[str, Any]) -> str:
    if not record["caught"]:
        return f"{record['mutant']}: not caught by the seeds before {record['next']}"
    return f"{record['mutant']}: seed {record['seed']}: {record['invariant']}: {record['sentence'][:160]}"


if __name__ == "__main__":
    sys.exit(main())
