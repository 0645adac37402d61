"""Benchmark: how long a host that joins an old job takes until it can take over, and what memory that needs.

    python scripts/bench_join.py --steps 300000 --out join-out

Two nodes of one rank each train by very short steps (bench/many_steps.py), under the real `deepspeed` launcher and
without a spare. At --steps a host joins. It rehearses both ranks and goes through the script's loop by the records of
every step so far; then the job says that it is ready for them. Beside it is what training itself took for as many
steps. Then the second node is killed, and the newcomer takes its rank over.

Rules of this file: standard library only; times are those of the job's events, where it has one. What is measured is
written at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.control_kernel import cpu_ns, machine, memory
from bench.peers.ours import name_of
from clusters.demo_jobs import JOBS
from clusters.events import Tail
from clusters.launched import Cluster, commit_of, configure

SCRIPT = Path(__file__).resolve().parent / "bench" / "many_steps.py"
NODES = 2
STEP_POLL_S = 10.0


class Growing:
    """A job without a spare, whose events are read as it goes."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.cluster, self.output = Cluster(folder, NODES, 1), folder / "output"
        self.tail, self._config = Tail(self.output, recurring=False), folder / "deadpool.yaml"
        configure(self._config, self.output, spares=0, preload=JOBS["deepspeed"].preload)

    def start(self) -> None:
        self.cluster.launch(["--module", "deadpool_plugin.run", str(SCRIPT), "--deadpool-config", str(self._config)])

    def join(self) -> None:
        words = [sys.executable, "-m", "deadpool_plugin", "join", "--job", str(self.output)]
        self.cluster.start(NODES, [*words, "--deadpool-config", str(self._config)])

    def kill(self, node: int) -> None:
        while found := [pid for pid, its in self.cluster.processes().items() if its == node]:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def step(self) -> int:
        """The newest step that is known to be committed: `deadpool watch` reads the same file."""
        newest = Tail(self.output)  # what recurs is bounded
        newest.read()
        return newest.committed(time.time())

    def until(self, what: str, done: Callable[[], object], limit_s: float, poll_s: float = 0.5) -> None:
        """Raises: TimeoutError if that is not so in time, or the job has ended."""
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline or all(code is not None for code in self.cluster.exit_codes()):
                raise TimeoutError(f"{what}: not within {limit_s:g} s, or the job has ended")
            time.sleep(poll_s)
            self.tail.read()

    def processes(self) -> dict[str, dict[str, float]]:
        """CPU time and memory of the agents and the processes that run ranks or stand in for them."""
        found = {}
        for pid, node in self.cluster.processes().items():
            if name := name_of(pid):
                found[f"{name} of node {node}"] = {"cpu_s": cpu_ns(pid) / 1e9, **memory(pid, 1)}
        return found


def measured(job: Growing, steps: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """Stage after stage. Raises: TimeoutError."""
    job.start()
    job.until("training", lambda: job.tail.of("TrainingStarted"), 300.0)
    began = time.time()
    job.until(f"step {steps}", lambda: job.step() >= steps, limit_s, poll_s=STEP_POLL_S)
    trained_s, step = time.time() - began, job.step()
    yield {"steps": step, "trained_s": round(trained_s, 1), "step_ms": round(1e3 * trained_s / step, 3)}
    yield {"before": job.processes()}
    joins = time.time()
    job.join()
    job.until("a spare for every host", lambda: len(job.tail.of("SpareReady")) == NODES, limit_s)
    after = {kind: [event["time"] - joins for event in job.tail.of(kind)] for kind in ("HostJoined", "SpareReady")}
    yield {f"{kind}_after_s": [round(seconds, 2) for seconds in its] for kind, its in after.items()}
    yield {"after": job.processes()}
    struck = time.time()
    job.kill(1)
    job.until("the loss's end", lambda: job.tail.of("SwapDone", since=struck), 120.0)
    yield {"kill_to_done_s": round(job.tail.of("SwapDone", since=struck)[0]["time"] - struck, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("join-out"))
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds for these steps, and to go through them")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the job is ended, too
    job = Growing(args.out.resolve() / "job")
    whole: dict[str, Any] = {"machine": machine(), "commit": commit_of(), "load": round(os.getloadavg()[0], 1)}
    try:
        for found in measured(job, args.steps, args.limit):
            whole |= found
            (args.out / "join.json").write_text(json.dumps(whole, indent=1) + "\n")
            print(json.dumps(found), flush=True)
    finally:
        job.cluster.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
