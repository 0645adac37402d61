"""Runs a training script as N ranks on this machine, with no launcher and nothing else between.

    python scripts/run_plain.py --ranks 8 --logs DIR -- scripts/train_gpt.py ...

Rules of this file: torch and the framework are imported once, without being patched, and every rank is a fork of that
process (a rank imports for 4 CPU seconds otherwise), so it must not start a thread. One output file per rank; the
exit code is 1 if a rank fails, whereupon the others are ended.
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from clusters import card, processes
from clusters.launched import free_port

PRELOAD = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
)
POLL_S = 0.02


def preload(names: Sequence[str] = PRELOAD) -> None:
    warnings.filterwarnings("ignore")
    for name in names:
        importlib.import_module(name)
    processes.require_one_thread()


def run_ranks(ranks: int, logs: Path, script: list[str], slots: int = 0, deadline_s: float = math.inf) -> int:
    """Run the script as so many ranks, on hosts of `slots` (0: all on one). Returns the first exit code that is not 0,
    whereupon the others are ended; all are killed at the deadline (-9)."""
    port, pids = free_port(), set()
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            become_rank(rank, ranks, port, logs, script, slots)
        pids.add(pid)
    return wait(pids, time.monotonic() + deadline_s)


def become_rank(rank: int, ranks: int, port: int, logs: Path, script: list[str], slots: int = 0) -> None:
    """Run the script, in the forked process, as `rank`, on hosts of `slots` ranks (0: all on one). Never returns."""
    host, local_rank = divmod(rank, slots or ranks)
    output = os.open(logs / f"rank{rank:04d}.log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    places: dict[str, int | str] = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": ranks}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()} | card.host_id(host))
    sys.argv = script
    sys.path[0] = str(Path(script[0]).resolve().parent)
    code = 0
    try:
        runpy.run_path(script[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():  # what writes checkpoints, say: os._exit would leave it behind
        child.kill()
    os._exit(code)


def wait(pids: set[int], deadline: float) -> int:
    code = 0
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > deadline:
                end(pids, signal.SIGKILL)
            time.sleep(POLL_S)
        elif pid in pids:  # else what a rank has left behind
            pids.remove(pid)
            if status and not code:
                code = os.waitstatus_to_exitcode(status)
                end(pids, signal.SIGTERM)
    return code


def end(pids: set[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--preload", default=",".join(PRELOAD), help="modules to import before the forks")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="-- SCRIPT ARGUMENTS")
    args = parser.parse_args()
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    args.logs.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    preload(args.preload.split(","))
    return 1 if run_ranks(args.ranks, args.logs, script) else 0


if __name__ == "__main__":
    sys.exit(main())
