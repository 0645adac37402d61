"""One emulated node of a peer's job: imports once, then forks the node's ranks, each of which runs a script.

    python node.py --ranks 2,3 --world 10 --port P --logs DIR [--preload MODULE]... [--go FILE] -- SCRIPT ARGUMENTS

With `--go` it imports, says so by a file FILE.RANKS, and waits until FILE exists: a standing-by node. It ends when all
its ranks have, or with `--until-first` as soon as one has. NVRx's monitor processes leave their parents; they carry the
node's tag in their environment like everything here, so whoever kills the node finds them.

Rules of this file: no thread before the forks.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import run_plain


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--preload", action="append", default=[])
    parser.add_argument("--go", type=Path)
    parser.add_argument("--until-first", action="store_true")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    args.logs.mkdir(parents=True, exist_ok=True)
    for name in args.preload:
        importlib.import_module(name)
    run_plain.preload()
    if args.go:
        Path(f"{args.go}.{args.ranks}").touch()
    while args.go and not args.go.exists():
        time.sleep(0.02)
    pids = set()
    for rank in map(int, args.ranks.split(",")):
        pid = os.fork()
        if pid == 0:
            run_plain.become_rank(rank, args.world, args.port, args.logs, script)
        pids.add(pid)
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        print(f"process {pid} ended with {os.waitstatus_to_exitcode(status)}", flush=True)
        if args.until_first:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
