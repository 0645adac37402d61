"""Runs a training script as N ranks on this machine, with no launcher and nothing else between.

    python scripts/run_plain.py --ranks 8 --logs DIR -- scripts/train_gpt.py ...

Rules of this file: torch and the framework are imported once, without being patched, and every rank is a fork of that
process (a rank imports for 4 CPU seconds otherwise), so it must not start a thread. One output file per rank; the
exit code is the first failed rank's, whereupon the others are ended.
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from clusters import card
from clusters.launched import free_port

PRELOAD = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
)


def preload(names: Sequence[str] = PRELOAD) -> None:
    warnings.filterwarnings("ignore")
    for name in names:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"{threads} threads after the imports: forked ranks could hang; set OMP_NUM_THREADS=1")


def become_rank(rank: int, ranks: int, port: int, logs: Path, script: list[str], slots: int = 0) -> None:
    """In the forked process: run the script as `rank`, on hosts of `slots` ranks (0: all on one). Never returns."""
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
    os._exit(code)


def wait(pids: set[int]) -> int:
    """Until all have ended. Returns the first exit code that is not 0."""
    code = 0
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            for other in pids:
                os.kill(other, signal.SIGTERM)
    return code


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
    port = free_port()
    pids = set()
    for rank in range(args.ranks):
        pid = os.fork()
        if pid == 0:
            become_rank(rank, args.ranks, port, args.logs, script)
        pids.add(pid)
    return 1 if wait(pids) else 0


if __name__ == "__main__":
    sys.exit(main())
