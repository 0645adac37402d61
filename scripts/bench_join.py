"""Benchmark: how long a host that joins an old job takes until it can take over, and what memory that needs.

    python scripts/bench_join.py --steps 300000 --out join-out

Two nodes of one rank each train by very short steps (bench/many_steps.py), under the real `deepspeed` launcher and
without a spare. At --steps a host joins. It goes through the script's loop by the records of every step so far. Beside
the time for that is what training itself took for as many steps, and the time of a memcpy of the records. Then the
second node is killed, and the newcomer takes its rank over.

Rules of this file: standard library only; times are those of the job's events. A measurement is written as soon as it
is made.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.control_kernel import machine
from bench_parked import cpu_s, memory_mib
from clusters.demo_jobs import JOBS
from clusters.events import Tail
from clusters.launched import Cluster, commit_of

SCRIPT = Path(__file__).resolve().parent / "bench" / "many_steps.py"
NODES = 2


class Growing:
    """A job without a spare, whose events are read as it goes."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.cluster, self.output = Cluster(folder, NODES, 1), folder / "output"
        self.tail, self._config = Tail(self.output, recurring=False), folder / "deadpool.yaml"
        (folder / "secret").touch(mode=0o600)
        (folder / "secret").write_text(secrets.token_hex(32))
        config = {
            "spares": 0,
            "secret_file": str(folder / "secret"),
            "output_dir": str(self.output),
            "interface_address": "127.0.0.1",
            "memory_headroom_gib": 0.25,
            "preload": JOBS["deepspeed"].preload,
        }
        self._config.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in config.items()))

    def start(self) -> None:
        self.cluster.launch(["--module", "deadpool_plugin.run", str(SCRIPT), "--deadpool-config", str(self._config)])

    def join(self) -> None:
        words = [sys.executable, "-m", "deadpool_plugin", "join", "--job", str(self.output)]
        self.cluster.start(NODES, [*words, "--deadpool-config", str(self._config)])

    def kill(self, node: int) -> None:
        for pid in [pid for pid, its in self.cluster.processes().items() if its == node]:
            os.kill(pid, signal.SIGKILL)

    def step(self) -> int:
        """The newest step that is known to be committed: `deadpool watch` reads the same file."""
        newest = Tail(self.output)  # what recurs is bounded
        newest.read()
        return newest.committed(time.time())

    def until(self, what: str, done: Callable[[], object], limit_s: float) -> None:
        """Raises: TimeoutError if that is not so in time, or the job has ended."""
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline or all(code is not None for code in self.cluster.exit_codes()):
                raise TimeoutError(f"{what}: not within {limit_s:g} s, or the job has ended")
            time.sleep(0.5)
            self.tail.read()

    def processes(self) -> dict[str, dict[str, float]]:
        """What every process of the job has: agents by their node, workers by theirs."""
        found = {}
        for pid, node in self.cluster.processes().items():
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            kind = "agent" if b"deadpool_plugin.launch.agent" in command else name
            if kind == "agent" or name.startswith(("python-rank", "python-spare")):
                found[f"{kind} of node {node}"] = {"cpu_s": cpu_s(pid), **memory_mib(pid)}
        return found


def measured(job: Growing, steps: int, limit_s: float) -> dict[str, Any]:
    job.start()
    job.until("training", lambda: job.tail.of("TrainingStarted"), 300.0)
    began = time.time()
    job.until(f"step {steps}", lambda: job.step() >= steps, limit_s)
    trained_s, step, before = time.time() - began, job.step(), job.processes()
    joins = time.time()
    job.join()
    job.until("a spare", lambda: job.tail.of("SpareReady"), limit_s)
    ready, after = job.tail.of("SpareReady")[0]["time"], job.processes()
    struck = time.time()
    job.kill(1)
    job.until("the loss's end", lambda: job.tail.of("SwapDone", since=struck), 120.0)
    swapped = job.tail.of("SwapDone", since=struck)[0]["time"]
    return {
        "steps": step,
        "trained_s": round(trained_s, 1),
        "step_ms": round(1e3 * trained_s / step, 3),
        "join_to_ready_s": round(ready - joins, 2),
        "joined_after_s": round(job.tail.of("HostJoined")[0]["time"] - joins, 2),
        "kill_to_done_s": round(swapped - struck, 2),
        "before": before,
        "ready": after,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("join-out"))
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds for these steps, and to go through them")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the job is ended, too
    job = Growing(args.out.resolve() / "job")
    try:
        found = measured(job, args.steps, args.limit)
    finally:
        job.cluster.close()
    whole = {"machine": machine(), "commit": commit_of(), "load": round(os.getloadavg()[0], 1), **found}
    (args.out / "join.json").write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(whole))
    return 0


if __name__ == "__main__":
    sys.exit(main())
