"""Kill a node of a running job and look: the demonstration behind `scripts/demo.sh`.

A small GPT trains on emulated nodes of this machine under the real `deepspeed` launcher and the plugin; whole nodes
get SIGKILL; a spare takes over. Afterwards every rank's loss, gradient norm and final state is compared bitwise with
a run of the same script that never failed and knew no plugin. The last line printed is one JSON object; the exit
code is 0 only if everything promised holds.

Rules of this file: standard library only, up to the pictures; it observes the job and never steers it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import compare_runs
import make_corpus
from clusters import demo_report, references
from clusters.demo_jobs import CACHE, JOBS, SCRIPTS, DemoJob, add_arguments
from clusters.launched import REPOSITORY, Cluster, folder_size, read_events, read_json_lines
from faults.inject import PHASES

MADE_HERE = "launcher output observe stacks hostfile secret deadpool.yaml kills.jsonl* *.png events.jsonl summary.json"
TOLD = (
    "WorldFormed", "TrainingStarted", "SpareReady", "Unprotected", "Mirrored", "Protected", "NodeLost", "SwapPlanned",
    "SwapDone", "RehearsalFailed", "PeerRefused", "NodeFenced", "JobStopped", "JobFinished",
)  # fmt: skip


class Failed(Exception):
    """The demonstration cannot go on; the message says why."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4, help="active nodes")
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--kill", action="append", metavar="NODE@STEP[:PHASE]", help=f"PHASE: {' '.join(PHASES)}")
    parser.add_argument("--no-kill", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="for every `random` in a kill; default kill: all random")
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--patience", type=float, default=10.0, help="seconds, the plugin's patience_s")
    parser.add_argument("--stall", type=float, default=150.0, help="seconds without any output that count as a hang")
    add_arguments(parser)
    args = parser.parse_args()
    world = args.nodes * args.ranks_per_node
    if world % job_of(args).pipelines(args):
        parser.error(f"{world} ranks cannot be split into replicas of {job_of(args).pipelines(args)}")
    try:
        args.kills = [] if args.no_kill else plan_kills(args)
    except ValueError as problem:
        parser.error(str(problem))
    args.world, args.out = world, args.out.resolve()
    return args


def job_of(args: argparse.Namespace) -> DemoJob:
    return JOBS[args.framework]


def plan_kills(args: argparse.Namespace) -> list[tuple[int, int, str]]:
    """(node, step, phase) of every kill, the random ones drawn from the seed; random nodes are all different."""
    draw = random.Random(args.seed)
    nodes = list(range(args.nodes))
    draw.shuffle(nodes)
    first, last = max(2, args.steps // 4), max(2, args.steps - 6)
    kills = []
    for text in args.kill or ["random@random:random"]:
        match = re.fullmatch(r"(\d+|random)@(\d+|random)(?::(\w+))?", text)
        if not match or (match[3] or "random") not in (*PHASES, "random"):
            raise ValueError(f"--kill {text}: expected NODE@STEP[:PHASE], PHASE one of {' '.join(PHASES)} random")
        node = nodes.pop() if match[1] == "random" else int(match[1])
        step = draw.randint(min(first, last), last) if match[2] == "random" else int(match[2])
        phase = draw.choice(PHASES) if match[3] in (None, "random") else match[3]
        if node >= args.nodes + args.spares or not 1 <= step <= args.steps:
            raise ValueError(f"--kill {text}: there are nodes 0..{args.nodes + args.spares - 1}, steps 1..{args.steps}")
        kills.append((node, step, phase))
    return kills


# The two runs


def script_and_arguments(args: argparse.Namespace) -> list[str]:
    job = job_of(args)
    return [str(job.script), *job.arguments(args)]


def reference_run(args: argparse.Namespace) -> Path:
    """Folder of the same training without plugin and without faults; run now, unless it was run before."""
    job = job_of(args)
    folder = CACHE / "reference" / references.key(job.arguments(args), args.world, job.script)
    if folder.exists():
        tell(f"reference run: kept from an earlier demonstration ({folder.relative_to(REPOSITORY)})")
        return folder
    tell(f"reference run: {args.world} ranks, {args.steps} steps, without the plugin")
    running = folder.with_name(f"{folder.name}.running")
    shutil.rmtree(running, ignore_errors=True)
    cluster = Cluster(running, nodes=1, slots=args.world)
    try:
        run_plain = [str(SCRIPTS / "run_plain.py"), "--ranks", str(args.world), "--logs", str(running / "output")]
        run_plain += ["--preload", ",".join(job.plain_preload)]
        cluster.start(0, [sys.executable, *run_plain, "--", *script_and_arguments(args)])
        watch(cluster, args)
    finally:
        cluster.close()
    if cluster.exit_codes() != [0]:
        raise Failed(f"the reference run ended with {cluster.exit_codes()}; its output is in {running}")
    running.rename(folder)
    return folder


def protected_run(args: argparse.Namespace) -> Cluster:
    """The run that is killed. Returns when it has ended; raises Failed if it hangs."""
    cluster = Cluster(args.out, args.nodes + args.spares, args.ranks_per_node)
    write_config(args)
    faults = [word for node, step, phase in args.kills for word in ("--at", f"{node}@{step}:{phase}")]
    injector = [
        *faults,
        "--framework",
        args.framework,
        "--marker",
        str(args.out / "kills.jsonl"),
        "--observe",
        str(args.out / "observe"),
    ]
    command = ["deadpool_plugin.run", str(SCRIPTS / "faults" / "inject.py"), *injector]
    command += ["--", *script_and_arguments(args)]
    command += ["--deadpool-config", str(args.out / "deadpool.yaml")]
    tell(f"protected run: {args.nodes} nodes of {args.ranks_per_node} ranks, {args.spares} spare")
    for node, step, phase in args.kills:
        tell(f"  planned: node {node} is killed in step {step}, {phase}")
    table = start_table(args.out / "output")
    try:
        cluster.launch(["--module", *command])
        watch(cluster, args, table)
        left = cluster.close(grace_s=5.0)
    finally:
        cluster.close()
        end_table(table)
    if left:
        raise Failed(f"{len(left)} processes were still there after the job's end and had to be killed")
    return cluster


def write_config(args: argparse.Namespace) -> None:
    """The plugin's configuration. YAML reads JSON, so no YAML library is needed here."""
    config = {
        "spares": args.spares,
        "patience_s": args.patience,
        "secret_file": str(args.out / "secret"),
        "output_dir": str(args.out / "output"),
        "interface_address": "127.0.0.1",
        "memory_headroom_gib": 0.25,
        "preload": job_of(args).preload,
    }
    secret = args.out / "secret"
    secret.touch(mode=0o600)
    secret.write_text(f"{random.SystemRandom().getrandbits(256):064x}\n")
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in config.items()]
    (args.out / "deadpool.yaml").write_text("".join(lines))


def start_table(output: Path) -> subprocess.Popen[bytes] | None:
    """The plugin's own live table of the nodes on our terminal; None where standard output is none."""
    if not sys.stdout.isatty():
        return None
    return subprocess.Popen([sys.executable, "-m", "deadpool_plugin", "watch", str(output)], cwd=REPOSITORY)


def end_table(table: subprocess.Popen[bytes] | None) -> None:
    """It ends with the job; if the job had no proper end, it is told to."""
    if table is not None:
        try:
            table.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            table.terminate()
            table.wait()


def watch(cluster: Cluster, args: argparse.Namespace, table: subprocess.Popen[bytes] | None = None) -> None:
    """Wait for every launcher's end and say what happens meanwhile, unless `table` shows it.

    Raises: Failed on a hang, with all stacks dumped.
    """
    told, size, changed = 0, -1, time.monotonic()
    steps = {*range(0, args.steps + 1, max(1, args.steps // 6))}
    while None in cluster.exit_codes():
        time.sleep(0.2)
        events = read_events(cluster.folder / "output")
        if table is None or table.poll():
            for event in events[told:]:
                tell_event(event, steps)
        told = len(events)
        if (now_size := folder_size(cluster.folder)) != size:
            size, changed = now_size, time.monotonic()
        if time.monotonic() - changed > args.stall:
            cluster.dump_stacks(cluster.folder / "stacks")
            raise Failed(f"nothing was written for {args.stall:.0f} s; stacks are in {cluster.folder / 'stacks'}")
    if table is None or table.poll():
        for event in read_events(cluster.folder / "output")[told:]:
            tell_event(event, steps)


# The verdict


def judge(args: argparse.Namespace, reference: Path, cluster: Cluster) -> tuple[dict[str, Any], list[str]]:
    """(the summary, everything that does not hold)"""
    kills, events = read_json_lines(args.out / "kills.jsonl"), read_events(args.out / "output")
    compared = compare_runs.compare(reference, args.out / "output")
    killed = {kill["node"] for kill in kills}
    ranks = range(args.ranks_per_node)
    survivors = [node * args.ranks_per_node + i for node in range(args.nodes) if node not in killed for i in ranks]
    summary = {
        "bit_exact": compared["bit_exact"],
        "steps": compared["steps"],
        "swaps": demo_report.swaps(kills, events),
    }
    summary |= demo_report.kept(args.out / "observe", survivors, args.steps)
    problems = [] if compared["bit_exact"] else [f"not bitwise equal: {compared['difference']}"]
    problems += [f"{compared['steps']} steps, {args.steps} expected"] if compared["steps"] != args.steps else []
    problems += [
        f"{name} is false" for name in ("survivor_pids_kept", "handles_kept", "storages_kept") if not summary[name]
    ]
    problems += [f"planned kill did not happen: {kill}" for kill in args.kills if kill not in fired(kills)]
    for swap in summary["swaps"]:
        problems += [f"node {swap['node']}: {name} unknown" for name, value in swap.items() if value is None]
    codes = {node: code for node, code in enumerate(cluster.exit_codes()) if node not in killed}
    problems += [f"launcher of node {node} ended with {code}" for node, code in codes.items() if code]
    summary["exit_code"] = next((code for code in codes.values() if code), 1 if problems else 0)
    return summary, problems


def fired(kills: list[dict[str, Any]]) -> set[tuple[int, int, str]]:
    return {(kill["node"], kill["step"], kill["phase"]) for kill in kills}


def report(args: argparse.Namespace, reference: Path, cluster: Cluster) -> dict[str, Any]:
    """Write everything into the output folder. Returns the summary."""
    summary, problems = judge(args, reference, cluster)
    events, kills = read_events(args.out / "output"), read_json_lines(args.out / "kills.jsonl")
    (args.out / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    settings = {name: value for name, value in vars(args).items() if name not in ("kill", "out")}
    (args.out / "summary.json").write_text(json.dumps(summary | {"problems": problems, "settings": settings}, indent=1))
    try:
        expected, found = (compare_runs.read_run(folder).losses() for folder in (reference, args.out / "output"))
        demo_report.draw_losses(args.out / "loss.png", expected, found, kills)
    except compare_runs.Malformed as error:
        tell(f"no loss.png: {error}")
    nodes = args.nodes + args.spares
    demo_report.draw_timeline(args.out / "timeline.png", summary["swaps"], kills, events, nodes)
    for problem in problems:
        tell(f"FAILED: {problem}")
    tell(f"loss.png, timeline.png, events.jsonl, summary.json are in {args.out}")
    return summary


STARTED = time.monotonic()


def tell(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


def tell_event(event: dict[str, Any], steps: set[int]) -> None:
    """One line for what a person wants to know of: of `steps` the first word of each, which is taken out."""
    kind = event["event"]
    if kind == "StepDone" and event["step"] in steps:
        steps.remove(event["step"])
        tell(f"  step {event['step']}")
    elif kind in TOLD:
        fields = {
            k: v for k, v in event.items() if k not in ("event", "time", "node", "generation") and v not in ((), [])
        }
        words = " ".join(f"{name}={value}" for name, value in fields.items())
        tell(f"  node {event['node']} generation {event['generation']}: {kind} {words}")


def prepare_folder(folder: Path) -> None:
    """Make it, and remove what an earlier demonstration left in it (nothing else)."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in MADE_HERE.split():
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    prepare_folder(args.out)
    summary: dict[str, Any] = {"bit_exact": False, "steps": 0, "swaps": [], "survivor_pids_kept": False}
    summary |= {"handles_kept": False, "storages_kept": False, "exit_code": 1}
    try:
        make_corpus.ensure(CACHE / "corpus")
        reference = reference_run(args)
        summary = report(args, reference, protected_run(args))
    except (Failed, subprocess.CalledProcessError) as problem:
        tell(f"FAILED: {problem}")
        (args.out / "summary.json").write_text(json.dumps(summary | {"problems": [str(problem)]}, indent=1))
    print(json.dumps(summary), flush=True)
    return int(summary["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
