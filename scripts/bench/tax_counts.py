"""Counts of what a rank did to its device in a whole training script: the stand-in's, left behind at its end.

    python scripts/run_plain.py --ranks 4 --logs LOGS -- scripts/bench/tax_counts.py --out DIR -- SCRIPT ...

Runs of different length tell steps from start and end. DIR/rank<k>.json: counts of the process (tests/fakecuda), and
`blocks`, which torch's allocator was asked for on each device.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", help="from the launcher, which looks for no script behind ours")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="-- SCRIPT ARGUMENTS")
    args = parser.parse_args()
    script = args.script[1:]
    sys.argv, sys.path[0] = script, str(Path(script[0]).resolve().parent)
    runpy.run_path(script[0], run_name="__main__")
    import torch
    from fakecuda import control

    counts = control.report() | {"blocks": torch.cuda.memory_stats()["allocation.all.allocated"]}
    (args.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
