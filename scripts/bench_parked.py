"""Benchmark: what parked processes cost a spare, and how soon one covers the hosts of a large job.

    python scripts/bench_parked.py --out parked-out

A script that takes --startup-s to its first step (three quarters of it to read a checkpoint) is trained on four
emulated nodes under the plugin: eight ranks with one spare and with two, 32 ranks with one. Of each job: the time from
training's start until each host was rehearsed; the memory of every parked process and, beside it, of a rank; over
--seconds, the CPU time of each kind of process for a step. From these a table: one and two spares in jobs of 16, 64 and
128 hosts of eight ranks. It takes for granted that a spare's CPUs suffice for four hosts' rehearsals at a time.

Rules of this file: standard library only. CPU times are the kernel's, by process. A process is a rank's, parked or the
agent's by what it says it is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import make_corpus
from bench.control_kernel import cpu_ns, machine, memory
from bench.peers.jobs import NODES, Setting
from bench.peers.ours import StartupJob, name_of
from bench_swap import CACHE
from clusters.launched import commit_of

JOBS = {"8 ranks, one spare": ("dp8", 1), "8 ranks, two spares": ("dp8", 2), "32 ranks, one spare": ("dp32", 1)}
HOSTS, RANKS_OF_A_HOST = (16, 64, 128), 8
AT_A_TIME = 4
"""Hosts that a spare rehearses at the same time, after the first (core/spares.py)."""


class ParkedJob(StartupJob):
    """A StartupJob that nothing strikes."""

    def coverage(self) -> list[float]:
        """Seconds from training's start until one more host was covered by some spare."""
        self._tail.read()
        [began] = [event["time"] for event in self._tail.of("TrainingStarted")]
        covered: dict[tuple[int, ...], float] = {}
        for event in self._tail.of("SpareReady"):
            covered.setdefault(tuple(event["ranks"]), event["time"] - began)
        return sorted(covered.values())

    def kinds(self) -> dict[int, str]:
        """Process -> "rank", "agent", "spare's agent", "parked" on a spare or "parked at home"."""
        training = {line["pid"] for line in self.marks.poll()}
        found = {}
        for pid, node in self.cluster.processes().items():
            name = name_of(pid)
            if pid in training:
                found[pid] = "rank"
            elif name == "agent":
                found[pid] = "agent" if node < NODES else "spare's agent"
            elif name.startswith("spare"):
                found[pid] = "parked at home" if node < NODES else "parked"
        return found


def measured(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """One job. Raises: TimeoutError if it does not come to train, or not all hosts are covered."""
    layout, spares = JOBS[name]
    folder = args.out / "job"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    indices, python = CACHE / "bench-indices", Path(sys.executable)
    setting = Setting(folder, CACHE / "corpus", indices, python, layout, startup_s=args.startup_s, past_steps=100_000)
    job = ParkedJob(setting, "two spares" if spares == 2 else "default")
    try:
        job.start()
        job.wait_until(StartupJob.loads + 1, args.limit)
        wanted = {"parked": setting.world * spares, "parked at home": setting.world}
        deadline, count = time.monotonic() + args.limit, Counter[str]()
        while len(job.coverage()) < NODES or {name: count[name] for name in wanted} != wanted:
            if time.monotonic() > deadline or job.ended():
                raise TimeoutError(f"{name}: covered after {job.coverage()} s, {dict(count)} in {args.limit:g} s")
            time.sleep(2.0)
            count = Counter(job.kinds().values())
        time.sleep(1.5 * args.startup_s)  # until the last one at home has rehearsed, too
        kinds = job.kinds()
        before, first = {pid: cpu_ns(pid) for pid in kinds}, job.completed()
        began = time.monotonic()
        time.sleep(args.seconds)
        used = {pid: cpu_ns(pid) - before[pid] for pid in kinds}
        steps, took = job.completed() - first, time.monotonic() - began
        sizes = {pid: memory(pid, 1) for pid, kind in kinds.items() if "agent" not in kind}
    finally:
        job.close()
    cpu = {kind: sum(used[pid] for pid in kinds if kinds[pid] == kind) / steps / count[kind] / 1e6 for kind in count}
    return {
        "job": name,
        "ranks": setting.world,
        "spares": spares,
        "covered_after_s": [round(seconds, 1) for seconds in job.coverage()],
        "step_s": round(took / steps, 4),
        "steps": steps,
        "processes": dict(count),
        "cpu_ms_a_step_each": {kind: round(value, 3) for kind, value in cpu.items()},
        "memory_mib": {
            f"{kind}, {sort}": sorted(round(sizes[pid][sort], 1) for pid in sizes if kinds[pid] == kind)
            for kind in ("parked", "parked at home", "rank")
            for sort in ("private", "pss")
        },
    }


def plan(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Work out larger jobs from the job of eight ranks and one spare, which fills the machine least.

    Several spares divide the hosts at first. Then each goes on with the others', as long as memory allows.
    """
    [small] = [one for one in found if (one["ranks"], one["spares"]) == (8, 1)]
    first_s, all_s = small["covered_after_s"][0], small["covered_after_s"][-1]
    cpu = small["cpu_ms_a_step_each"]
    each_ms = cpu["parked"] + cpu["spare's agent"] / small["ranks"]
    each_mib = statistics.median(small["memory_mib"]["parked, private"])
    rows = []
    for hosts in HOSTS:
        for spares in (1, 2):
            batches = math.ceil((math.ceil(hosts / spares) - 1) / AT_A_TIME)
            rows.append(
                {
                    "hosts": hosts,
                    "spares": spares,
                    "all_covered_after_s": round(first_s + batches * (all_s - first_s), 1),
                    "memory_gib_a_spare": round(hosts * RANKS_OF_A_HOST * each_mib / 1024, 1),
                    "cpu_ms_a_step_a_spare": round(hosts * RANKS_OF_A_HOST * each_ms, 1),
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(name.replace("_", " ") for name in rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row.values())) + " |" for row in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("parked-out"))
    parser.add_argument("--only", action="append", default=[], choices=list(JOBS))
    parser.add_argument("--startup-s", type=float, default=20.0, help="from the script's start to its first step")
    parser.add_argument("--seconds", type=float, default=60.0, help="over which CPU times are taken")
    parser.add_argument(
        "--limit", type=float, default=900.0, help="seconds until a job trains, and until it is covered"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the job under way is ended, too
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    make_corpus.ensure(CACHE / "corpus")
    found = []
    for name in args.only or JOBS:
        found.append(measured(args, name) | {"load": round(os.getloadavg()[0], 1)})
        print(json.dumps(found[-1]), flush=True)
    whole: dict[str, Any] = {"machine": machine(), "commit": commit_of(), "startup_s": args.startup_s, "jobs": found}
    if any((one["ranks"], one["spares"]) == (8, 1) for one in found):
        whole["larger_jobs"] = plan(found)
        print(table(whole["larger_jobs"]))
    (args.out / "parked.json").write_text(json.dumps(whole, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
