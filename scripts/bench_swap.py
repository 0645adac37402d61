"""Benchmark: how long a fault stops training. The plugin beside NVRx, torchft and kill-and-relaunch, in one run.

    python scripts/bench_swap.py --out bench                    # everything, resumable; hours (see --list)
    python scripts/bench_swap.py --out bench --only deadpool    # systems or faults whose name contains the word
    python scripts/bench_swap.py --out bench --startup-s 20 --past-steps 20000    # only a slow script, struck late

The small GPT of train_gpt.py in TP 2 x PP 2 x DP 2 on four emulated nodes of two ranks (plugin, NVRx, relaunch), or in
four replicas, one per node (torchft, plugin), and one node more that stands by; that of train_deepspeed.py with ZeRO 1
and 3 on four nodes (plugin); with --megatron-lm also its unedited pretrain_gpt.py, under the plugin and under its own
--inprocess-restart. A job trains until all spares stand and step 21 to 30 (each place between two checkpoints in turn),
is struck at a random moment of that step, and is watched until all ranks have completed a step again, or for --limit
seconds. Where what a fault took can come back (`deadpool join`; a relaunch; a replica started again), a job meets
several: the next one waits until everything stands again and ten to nineteen steps more. The systems take turns, so
that whatever else the machine does meets them all. A fault that a system has survived in none of --tries jobs is not
tried again.

With --startup-s only the plugin is measured: eight data-parallel ranks of a smaller model on four nodes, whose script
takes so long to its first step, three quarters of it to read a checkpoint. The first fault comes after --past-steps.
Every node is struck three times and a process on each twice, unless --runs says otherwise; the values are compared with
those of an undisturbed run (StartupJob in bench/peers/ours.py). To measure another version of the plugin, check it out
and put this folder in the place of its scripts/.

One clock: from the reading of it right before the first signal to (a) `ready_s`, the last rank is back in its training
loop, restored, and (b) `first_step_s`, the last rank has completed its first step. `lost_steps`: steps that all ranks
had completed and whose work was done again. What each peer's `tuned` is and why: bench/peers/train_*.py and job_*.py.

The peers' packages live in an environment of their own (.venv-peers or --peers-python), never in the project's.

Rules of this file: standard library only; a measurement is appended to OUT/measurements.jsonl as soon as it is made.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make_corpus
from bench.peers import report
from bench.peers.job_nvrx import NvrxJob
from bench.peers.job_pretrain import InprocessRestartJob, PretrainJob
from bench.peers.job_relaunch import RelaunchJob
from bench.peers.job_torchft import TorchftJob
from bench.peers.jobs import FAULTS, PRETRAIN, Job, Setting
from bench.peers.ours import DeadpoolJob, EngineJob, StartupJob
from clusters.launched import REPOSITORY, commit_of, read_json_lines

SCRIPTS = REPOSITORY / "scripts"
CACHE = REPOSITORY / ".cache" / "demo"
ALL: dict[str, type[Job]] = {
    "deadpool": DeadpoolJob,
    "startup": StartupJob,
    "engine": EngineJob,
    "nvrx": NvrxJob,
    "relaunch": RelaunchJob,
    "torchft": TorchftJob,
    "pretrain": PretrainJob,
    "inprocess-restart": InprocessRestartJob,
}
OURS = ("first", "node", "process", "silent")
Fault = tuple[str, int]
"""Kind, and its number among those of its kind."""

SYSTEMS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "deadpool": ("deadpool", "default", "tp2pp2dp2", OURS),
    "deadpool tuned": ("deadpool", "tuned", "tp2pp2dp2", ("node", "process", "silent")),
    "NVRx defaults": ("nvrx", "defaults", "tp2pp2dp2", FAULTS),
    "NVRx tuned": ("nvrx", "tuned", "tp2pp2dp2", FAULTS),
    "relaunch": ("relaunch", "defaults", "tp2pp2dp2", FAULTS),
    "relaunch tuned": ("relaunch", "tuned", "tp2pp2dp2", FAULTS),
    "deadpool dp4": ("deadpool", "default", "dp4", OURS),
    "torchft defaults": ("torchft", "defaults", "dp4", FAULTS),
    "torchft tuned": ("torchft", "tuned", "dp4", FAULTS),
    "torchft spare": ("torchft", "spare", "dp4", FAULTS),
    "zero1 deadpool tuned": ("engine", "tuned", "zero1", ("node", "process", "silent")),
    "zero3 deadpool tuned": ("engine", "tuned", "zero3", ("node", "process", "silent")),
    "startup deadpool": ("startup", "default", "dp8", ("node", "process")),
    "pretrain_gpt deadpool": ("pretrain", "default", PRETRAIN, ("first", "node", "process")),
    "pretrain_gpt deadpool tuned": ("pretrain", "tuned", PRETRAIN, ("node",)),
    "pretrain_gpt --inprocess-restart": ("inprocess-restart", "defaults", PRETRAIN, ("node", "process")),
    "pretrain_gpt --inprocess-restart tuned": ("inprocess-restart", "tuned", PRETRAIN, ("node", "process")),
}
"""Name -> job, variant, layout, faults."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--runs", type=int, help="of every fault, for the plugin; default: 10, or as said above")
    parser.add_argument("--peer-runs", type=int, default=3, help="of every fault, for each peer")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="all must occur in `SYSTEM/FAULT`")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a job has never recovered")
    parser.add_argument("--tries", type=int, default=2, help="jobs of a peer's that never recovers from a fault")
    parser.add_argument("--start-limit", type=float, default=240.0, help="seconds a job has to reach its step")
    parser.add_argument("--peers-python", type=Path, default=REPOSITORY / ".venv-peers" / "bin" / "python")
    parser.add_argument(
        "--megatron-lm", type=Path, help="a checkout (core_v0.16.1); without it `pretrain_gpt` is left out"
    )
    parser.add_argument("--startup-s", type=float, default=0.0, help="from the script's start to its first step")
    parser.add_argument("--past-steps", type=int, default=1000, help="before the first fault, with --startup-s")
    parser.add_argument("--keep", action="store_true", help="keep every job's folder, not only those of failures")
    parser.add_argument("--list", action="store_true", help="say what is left to measure, and stop")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.megatron_lm = args.megatron_lm and args.megatron_lm.resolve()
    return args


def plan(args: argparse.Namespace, done: set[tuple[str, str, int]]) -> list[tuple[str, list[Fault]]]:
    """The jobs that are left: of each its system and its faults; in turns, all first ones first."""
    found = []
    for system, (name, _, layout, faults) in SYSTEMS.items():
        job = ALL[name]
        if (layout == PRETRAIN and not args.megatron_lm) or issubclass(job, StartupJob) != bool(args.startup_s):
            continue
        wanted = []
        for fault in faults:
            runs = (args.runs or job.runs[fault]) if issubclass(job, DeadpoolJob) else args.peer_runs
            if all(word in f"{system}/{fault}" for word in args.only):
                wanted += [(fault, index) for index in range(runs) if (system, fault, index) not in done]
        wanted.sort(key=lambda fault: fault[1])
        jobs = shared(wanted, job) if job.heals else [[fault] for fault in wanted]
        found += [(number, system, its) for number, its in enumerate(jobs)]
    return [(system, its) for _, system, its in sorted(found, key=lambda entry: entry[0])]


def shared(wanted: list[Fault], job: type[Job]) -> list[list[Fault]]:
    """Faults as few jobs; where each has one first node only, its loss comes first."""
    firsts = [[fault] for fault in wanted if job.one_first and fault[0] == "first"]
    others = [fault for fault in wanted if not (job.one_first and fault[0] == "first")]
    parts = [others[start : start + job.per_job] for start in range(0, len(others), job.per_job)]
    nothing: list[Fault] = []
    return [[*first, *part] for first, part in itertools.zip_longest(firsts, parts, fillvalue=nothing)]


def is_hopeless(measurements: list[dict[str, Any]], system: str, fault: str, tries: int) -> bool:
    """Return whether a system has recovered from that fault in none of `tries` jobs or more."""
    outcomes = [line["outcome"] for line in measurements if (line["system"], line["fault"]) == (system, fault)]
    return len(outcomes) >= tries and "recovered" not in outcomes


def measure(args: argparse.Namespace, system: str, faults: list[Fault]) -> Iterator[dict[str, Any]]:
    """One job and its faults, one line each; it ends with the first fault that it does not recover from."""
    name, variant, layout, _ = SYSTEMS[system]
    folder = args.out / "jobs" / "-".join([*system.split(), *map(str, faults[0])])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    setting = Setting(
        folder, CACHE / "corpus", CACHE / "bench-indices", args.peers_python.absolute(), layout, args.megatron_lm,
        args.startup_s, args.past_steps,
    )  # fmt: skip
    job, since = ALL[name](setting, variant), time.time()
    step, outcome = job.first_step + 7 * faults[0][1] % 10, ""
    try:
        job.start()
        for number, (fault, index) in enumerate(faults):
            line: dict[str, Any] = {"system": system, "fault": fault, "index": index, "time": time.time()}
            line |= {"faults_before": number, "load_before": round(os.getloadavg()[0], 2)}
            line |= {"startup_s": args.startup_s, "past_steps": args.past_steps} if args.startup_s else {}
            job.number = index
            draw = random.Random(int(hashlib.sha256(f"{fault}{index}".encode()).hexdigest(), 16))
            try:
                job.wait_until(step, args.start_limit)
                line["waited_s"] = round(time.time() - since, 1)
                time.sleep(draw.uniform(0.0, 0.3))
                line |= watch(args, job, fault)
            except TimeoutError as reason:
                line |= {"outcome": "not started", "reason": str(reason)}
            outcome = line["outcome"]
            yield line
            if outcome != "recovered":
                return
            since, step = time.time(), job.completed() + job.gap_after(fault) + 7 * (number + 1) % 10
        if (differs := job.differs(args.start_limit)) is not None:
            outcome = f"differs: {differs}" if differs else "recovered"
            yield {"system": system, "fault": "equal", "index": faults[0][1], "outcome": outcome, "figures": {}}
    finally:
        job.close()
        if outcome == "recovered" and not args.keep:
            shutil.rmtree(folder)


def watch(args: argparse.Namespace, job: Job, fault: str) -> dict[str, Any]:
    """Strike, and wait for what comes of it."""
    strike = job.strike(fault)
    found: dict[str, Any] = {"struck_at_step": strike.completed}
    while time.time() < strike.time + args.limit:
        job.tend(strike)
        if figures := job.recovered(strike):
            job.heal(strike)
            rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
            return found | {"outcome": "recovered", "figures": rounded}
        if job.ended():
            return found | {"outcome": "job ended", "after_s": round(time.time() - strike.time, 1)}
        time.sleep(0.05)
    return found | {"outcome": f"never within {args.limit:.0f} s"}


def surroundings(args: argparse.Namespace) -> dict[str, Any]:
    """The machine and every version that matters."""
    versions = {"project": versions_of(Path(sys.executable))}
    versions |= {"peers": versions_of(args.peers_python)} if args.peers_python.exists() else {}
    processor = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = Path("/proc/meminfo").read_text().splitlines()[0].split()[1]
    return {
        "processor": processor[:1],
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory) / 1024**2, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit_of(),
    }


def versions_of(python: Path) -> dict[str, str]:
    names = ("torch", "megatron-core", "deepspeed", "numpy", "nvidia-resiliency-ext", "torchft-nightly")
    code = "import json; from importlib.metadata import distributions as all; "
    code += f"print(json.dumps({{d.name: d.version for d in all() if d.name in {names}}}))"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(answer.stdout)
    return versions


def make_peers_environment(python: Path) -> None:
    """The peers' own environment, if it is the default one and not there yet. Refuses a CUDA build of torch."""
    venv = REPOSITORY / ".venv-peers"
    if not python.exists():
        if python != venv / "bin" / "python":
            sys.exit(f"{python} does not exist")
        print(f"making {venv} from scripts/requirements-peers.txt (minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        (venv / ".gitignore").write_text("*\n")
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-r"]
        subprocess.run([*pip, str(SCRIPTS / "requirements-peers.txt")], check=True)
    asked = subprocess.run([python, "-c", "import torch; print(torch.version.cuda)"], capture_output=True, text=True)
    if asked.stdout.strip() != "None":
        sys.exit(f"{python} has torch for CUDA {asked.stdout.strip()}: not comparable with the project's CPU build")


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the job under way is ended, too
    log = args.out / "measurements.jsonl"
    measurements = read_json_lines(log)
    todo = plan(args, {(line["system"], line["fault"], line["index"]) for line in measurements})
    with_peers = any(not issubclass(ALL[SYSTEMS[system][0]], DeadpoolJob) for system, _ in todo)
    if args.list:
        for system, faults in todo:
            print(f"{system}: {', '.join(f'{fault}/{index}' for fault, index in faults)}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if with_peers:
        make_peers_environment(args.peers_python)
    make_corpus.ensure(CACHE / "corpus")
    while todo:
        system, faults = todo.pop(0)
        faults = [fault for fault in faults if not is_hopeless(measurements, system, fault[0], args.tries)]
        for line in measure(args, system, faults) if faults else ():
            measurements.append(line)
            with open(log, "a") as output:
                output.write(json.dumps(line) + "\n")
            print(said(line), flush=True)
            faults = [fault for fault in faults if fault != (line["fault"], line["index"])]
        if faults:  # the job did not survive the one before them
            todo.append((system, faults))
    entries = report.summary(measurements)
    whole = {"machine": surroundings(args), "summary": entries, "measurements": measurements}
    (args.out / "bench.json").write_text(json.dumps(whole, indent=1))
    text = report.table(entries)
    (args.out / "bench.md").write_text(text + "\n")
    print(text)
    return 0


def said(line: dict[str, Any]) -> str:
    figures = line.get("figures", {})
    known = [f"{name} {figures[name]}" for name in (*report.COMMON, "covered") if figures.get(name) is not None]
    name = f"{line['system']}/{line['fault']}/{line['index']}"
    return " ".join([f"{name}: {line['outcome']}", *known, line.get("reason", "")])


if __name__ == "__main__":
    sys.exit(main())
