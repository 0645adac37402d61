"""The control plane of big jobs on one machine: a loss until everybody has the plan, and what it costs each agent.

    python scripts/bench_control_plane.py --sizes 64 128 256 512:4 --out control-out

Real agents with real sockets, forked from one process that has imported them; their workers are stubs, their snapshots
a few KiB. Per size: the start; a while of heartbeats; some steps; members lost one after the other; the coordinator
lost; each by SIGKILL of the agent, while the job stands between two steps, `--patience` after the one before (what
follows sooner is a storm, which is planned together). `512:4` are 512 agents, four to a process
(who is lost, and who coordinates, has a process of its own). Beside each job: the same bytes over bare sockets.

All agents share this machine's CPUs, so that seconds are upper bounds for a job whose agents have a host each; CPU time
and messages per agent are what they are. Nothing is asserted of any time. A size that is in --out already is not run
again. The links of 256 agents and more overflow the queue that all loopback traffic of a machine shares, so that some
are reset: before those sizes, `sysctl net.core.netdev_max_backlog=100000`.

Rules of this file: sizes run one after the other; what one has measured is written before the next begins.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from bench import control_floor, control_kernel, control_report
from bench.control_board import KINDS
from bench.control_job import Job
from bench.control_processes import Processes
from bench.control_shape import Failed, Shape

FLOOR_ROUNDS = 20


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["64", "128", "256", "512:4"], help="AGENTS[:AGENTS PER PROCESS]")
    parser.add_argument("--slots", type=int, default=1, help="ranks per node")
    parser.add_argument("--losses", type=int, default=3, help="members lost one by one, before the coordinator is")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--idle", type=float, default=20.0, help="seconds of heartbeats only")
    parser.add_argument(
        "--patience", type=float, default=20.0,
        help="the agents' patience_s: as long as a machine with so many of them may keep one from running",
    )  # fmt: skip
    parser.add_argument("--memory-gib", type=float, default=8.0, help="give up before the machine has this much less")
    parser.add_argument("--out", type=Path, default=Path("control-out"))
    args = parser.parse_args()
    args.out = args.out.resolve()
    return args


def shape_of(size: str, args: argparse.Namespace) -> Shape:
    agents, _, per_process = size.partition(":")
    return Shape(int(agents), int(per_process or 1), args.slots, args.losses)


def measured(shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """One size's record. Raises: Failed."""
    folder = args.out / "jobs" / shape.name
    shutil.rmtree(folder, ignore_errors=True)
    sockets = [len(nodes) for nodes in shape.processes]
    size = control_floor.plan_bytes(shape.nodes, shape.slots, shape.spares)
    record: dict[str, Any] = {"shape": asdict(shape), "processes": len(sockets), "began": time.time()}
    record |= {"load": os.getloadavg(), "floor": control_floor.measured(sockets, size, FLOOR_ROUNDS)}
    processes = Processes(folder, shape, args.patience, int(args.memory_gib * (1 << 30)))
    try:
        record |= exercised(Job(processes), args)
    finally:
        processes.close()
    record |= {"load_after": os.getloadavg(), "floor_after": control_floor.measured(sockets, size, FLOOR_ROUNDS)}
    return record


def exercised(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Take a job through its trials, in this order, and return their figures."""
    found: dict[str, Any] = {"start": job.start()}
    tell(job.shape, f"trains after {found['start']['wall_s']:.1f} s")
    idle, steps = job.idle(args.idle), job.steps(args.steps)
    found["idle"] = control_report.work(idle, KINDS) | {"heartbeats": idle["heartbeats"]}
    found["steps"] = control_report.work(steps, KINDS) | {"steps": steps["steps"]}
    found["memory"] = memory_of(job)
    tell(job.shape, f"{steps['steps']} steps in {steps['wall_s']:.2f} s")
    found["losses"] = []
    for victim in (*job.shape.victims, job.coordinator):
        job.calm_down()
        found["losses"].append(control_report.loss(job.lose(victim), KINDS))
        newest = found["losses"][-1]
        tell(job.shape, f"{newest['victim']} {victim} lost: plan known to all after {newest['known_s']:.3f} s")
    found["memory_after"] = memory_of(job)
    return found


def memory_of(job: Job) -> dict[str, Any]:
    found = job.memory()
    return {name: control_report.spread(values) if len(values) > 1 else values[0] for name, values in found.items()}


def tell(shape: Shape, what: str) -> None:
    print(f"[control] {shape.name} agents: {what}", flush=True)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name not in ("sizes", "out")}


def known(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The record in `path`, None if there is none. Raises: Failed if it was made with other settings."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    if found["settings"] != settings:
        raise Failed(f"{path} was made with {found['settings']}, not {settings}: choose another --out")
    return found


def write(path: Path, content: dict[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content, indent=1))
    draft.replace(path)


def main() -> int:
    args = parse_args()
    records, settings = [], settings_of(args)
    (args.out / "sizes").mkdir(parents=True, exist_ok=True)
    gc.collect()
    gc.freeze()  # what has been imported stays shared with the forked processes
    try:
        for shape in [shape_of(size, args) for size in args.sizes]:
            path = args.out / "sizes" / f"{shape.name}.json"
            record = known(path, settings)
            if record is None:
                record = {"settings": settings, **measured(shape, args)}
                write(path, record)
            records.append(record)
    except Failed as problem:
        print(f"[control] FAILED: {problem}", flush=True)
        return 1
    rows = [control_report.figures(record) for record in records]
    exponents = control_report.growth(rows)
    summary = {"figures": rows, "growth": exponents, "targets": control_report.TARGETS}
    write(args.out / "control-plane.json", {"machine": control_kernel.machine(), "summary": summary, "sizes": records})
    print(control_report.markdown(rows, exponents), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
