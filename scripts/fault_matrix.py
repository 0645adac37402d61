"""Faults of every kind in every phase of every layout, on whole emulated clusters, judged bit for bit.

    python scripts/fault_matrix.py --out matrix                      all cells that are not known yet, then the table
    python scripts/fault_matrix.py --out matrix --only tp4           one layout
    python scripts/fault_matrix.py --out matrix --only '.*:push:node' one column and kind
    python scripts/fault_matrix.py --out zero --framework deepspeed  DeepSpeed's engines instead of Megatron-core
    python scripts/fault_matrix.py --out matrix --double             two faults, one in the middle of the other's swap
    python scripts/fault_matrix.py --out matrix --many 100           a hundred swaps in one job, and what they leak
    python scripts/fault_matrix.py --out cuda --device cuda          two cards in each host, shared by all hosts; NCCL

Every cell is one JSON line in OUT/cells.jsonl as soon as it is known; a rerun goes on with those that are missing
(`--again`: also with those that did not hold). OUT/table.md is the matrix.

Rules of this file: it only chooses and keeps; clusters/forked.py starts, faults/plan.py strikes, faults/job.py judges.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any

import make_corpus
from clusters import forked_node
from clusters.launched import read_json_lines
from clusters.references import CORPUS
from faults import cells, table
from gpt.layouts import DEEPSPEED, ENGINES_ON_CARDS, MEGATRON, ON_CARDS

LAYOUTS = {
    ("megatron", "cpu"): MEGATRON,
    ("deepspeed", "cpu"): DEEPSPEED,
    ("megatron", "cuda"): ON_CARDS,
    ("deepspeed", "cuda"): ENGINES_ON_CARDS,
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for results, references and broken jobs")
    parser.add_argument("--framework", choices=tuple(forked_node.MODULES), default="megatron")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="results of each need a folder")
    parser.add_argument("--references", type=Path, help="folder for undisturbed runs; default: OUT/references")
    parser.add_argument("--only", action="append", default=[], metavar="LAYOUT[:COLUMN[:KIND]]")
    parser.add_argument("--kinds", nargs="+", default=["node", "rank"], help="others: see faults/plan.py")
    parser.add_argument("--group", choices=("main", "save", "async"), help="columns of this group only")
    parser.add_argument("--spares", type=int, default=3, help="hosts that may be lost in one job")
    parser.add_argument("--heal", action="store_true", help="lost hosts come back and join: all faults in one job")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no further job after so long; 0: no limit")
    parser.add_argument(
        "--mirror-every", type=int, default=1, help="steps between snapshots (1); results need a folder"
    )
    parser.add_argument("--again", action="store_true", help="repeat cells that did not hold")
    parser.add_argument("--double", action="store_true", help="pairs of faults instead")
    parser.add_argument("--many", type=int, metavar="SWAPS", help="so many swaps in one job instead")
    parser.add_argument("--list", action="store_true", help="print the cells that are missing, and end")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.references = (args.references or args.out / "references").resolve()
    return args


def known(args: argparse.Namespace, name: str) -> dict[str, dict[str, Any]]:
    lines = {line["cell"]: line for line in read_json_lines(args.out / name)}
    return {key: line for key, line in lines.items() if line["ok"] or line["refused"] or not args.again}


def matrix(args: argparse.Namespace) -> int:
    done, results = known(args, "cells.jsonl"), args.out / "cells.jsonl"
    wanted = cells.selected(cells.cells(list(LAYOUTS[args.framework, args.device]), args.kinds), args.only)
    wanted = [cell for cell in wanted if cell.key not in done and args.group in (None, cell.group)]
    if args.list:
        print("\n".join(cell.key for cell in wanted))
        return 0
    keep, only_struck = functools.partial(table.keep, results), args.device == "cuda"
    settings = {"mirror_every": args.mirror_every}
    runner = cells.Runner(args.out, args.references, keep, args.heal, only_struck, settings)
    began = time.monotonic()
    for together in cells.jobs(wanted, len(wanted) if args.heal else args.spares):
        if args.minutes and time.monotonic() - began > 60 * args.minutes:
            print("the time is up; a rerun goes on from here")
            break
        runner.run(together)
    lines = list({line["cell"]: line for line in read_json_lines(results)}.values())
    (args.out / "table.md").write_text(table.table(lines))
    print(table.summary(lines))
    return int(any(not line["ok"] and not line["refused"] for line in lines))


def main() -> int:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    make_corpus.ensure(CORPUS)
    forked_node.preload(forked_node.MODULES[args.framework], args.device, cells.SLOTS)
    if args.double:
        from faults import pairs

        return pairs.main(args.out, args.references, args.only, known(args, "pairs.jsonl"), args.list)
    if args.many:
        from faults import many

        return many.main(args.out, args.references, args.many, args.device)
    return matrix(args)


if __name__ == "__main__":
    sys.exit(main())
