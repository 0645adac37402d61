"""Options of the demonstration, the jobs that it runs for each framework, and where nodes are killed.

A framework's job: the script, its arguments, and what its processes import first.

Rules of this file: standard library only, for demo.sh checks its options with it before the environment is there.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # started by path

import run_plain
from faults.inject import PHASES

from clusters.launched import REPOSITORY

SCRIPTS = REPOSITORY / "scripts"
CACHE = REPOSITORY / ".cache" / "demo"


@dataclass(frozen=True)
class DemoJob:
    """Args:
    preload: modules a node's standby processes import; plain_preload: the undisturbed run's one process.
    words: the script's own arguments, but for those that all have in common.
    pipelines: how many ranks one replica of the model has.
    """

    script: Path
    preload: tuple[str, ...]
    plain_preload: tuple[str, ...]
    words: Callable[[argparse.Namespace], list[str]]
    pipelines: Callable[[argparse.Namespace], int]

    def arguments(self, args: argparse.Namespace) -> list[str]:
        common = {
            "--train-iters": args.steps,
            "--dtype": args.dtype,
            "--num-microbatches": args.microbatches,
            "--dropout": args.dropout,
            "--data-path": CACHE / "corpus",
        }
        words = [str(word) for pair in common.items() for word in pair]
        return [*words, *self.words(args), "--log-all-ranks", "--digest"]


def parse_args() -> argparse.Namespace:
    """Read the command line of demo.sh; `kills` is planned, and `world` is the number of ranks.

    Ends the process on `--help`, and on what cannot be run.
    """
    parser = argparse.ArgumentParser(prog="demo.sh", description="Kill a node of a running job, and compare the run.")
    parser.add_argument("--nodes", type=int, default=4, help="active nodes")
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--startup-s", type=float, default=0.0, help="seconds the script sleeps before it trains")
    parser.add_argument("--kill", action="append", metavar="NODE@STEP[:PHASE]", help=f"PHASE: {' '.join(PHASES)}")
    parser.add_argument("--no-kill", action="store_true")
    line = "all hosts get SIGTERM in this step, and another job goes on from what they leave on disk"
    parser.add_argument("--stop-at", type=int, default=0, metavar="STEP", help=line)
    line = "the same with SIGKILL: it goes on from what they had written before"
    parser.add_argument("--kill-all", type=int, default=0, metavar="STEP", help=line)
    line = "how often all hosts write their state to disk"
    parser.add_argument("--store-every-s", type=float, default=None, metavar="SECONDS", help=line)
    seed = random.SystemRandom().randrange(10**6)
    parser.add_argument("--seed", type=int, default=seed, help="for every `random` in a kill; default kill: all random")
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--patience", type=float, default=2.0, help="seconds, the plugin's patience_s")
    parser.add_argument("--stall", type=float, default=150.0, help="seconds without any output that count as a hang")
    parser.add_argument("--framework", choices=JOBS, default="megatron")
    on_off = argparse.BooleanOptionalAction
    megatron = parser.add_argument_group("with --framework megatron")
    megatron.add_argument("--tp", type=int, default=2)
    megatron.add_argument("--pp", type=int, default=2)
    megatron.add_argument("--distributed-optimizer", action=on_off, default=True)
    deepspeed = parser.add_argument_group("with --framework deepspeed")
    deepspeed.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=1, help="stage of ZeRO")
    deepspeed.add_argument("--pipeline", type=int, default=0, help="stages of a pipeline; 0: none")
    deepspeed.add_argument("--offload", action="store_true", help="masters, moments and the update on the CPU")
    deepspeed.add_argument("--optimizer", choices=("adamw", "fused", "cpu"), default="adamw")
    args = parser.parse_args()
    if args.kill_all and args.store_every_s is None:
        parser.error("--kill-all leaves nothing to go on from without --store-every-s")
    if args.kill_all and args.stop_at:
        parser.error("--kill-all and --stop-at both end the job: give one")
    args.world, args.out = args.nodes * args.ranks_per_node, args.out.resolve()
    if args.world % (replica := JOBS[args.framework].pipelines(args)):
        parser.error(f"{args.world} ranks cannot be split into replicas of {replica}")
    try:
        ends = args.stop_at or args.kill_all
        args.kills = [] if args.no_kill or (ends and not args.kill) else plan_kills(args)
    except ValueError as problem:
        parser.error(str(problem))
    return args


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


def _megatron(args: argparse.Namespace) -> list[str]:
    words = ["--tp", args.tp, "--pp", args.pp, "--layers", max(2, args.pp), "--data-cache-path", CACHE / "indices"]
    sharded = "--distributed-optimizer" if args.distributed_optimizer else "--no-distributed-optimizer"
    return [*map(str, words), sharded]


def _deepspeed(args: argparse.Namespace) -> list[str]:
    words = ["--zero", args.zero, "--pipeline", args.pipeline, "--optimizer", args.optimizer]
    words += ["--layers", max(2, args.pipeline), "--samples", 480]
    return [*map(str, words), *(["--offload"] if args.offload else [])]


JOBS = {
    "megatron": DemoJob(
        SCRIPTS / "train_gpt.py",
        ("torch.distributed", "patches.cpu.applied", "megatron.core.models.gpt", "megatron.core.datasets.gpt_dataset"),
        run_plain.PRELOAD,
        _megatron,
        lambda args: args.tp * args.pp,
    ),
    "deepspeed": DemoJob(
        SCRIPTS / "train_deepspeed.py",
        ("torch.distributed", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"),
        ("torch.distributed", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"),
        _deepspeed,
        lambda args: max(1, args.pipeline),
    ),
}

if __name__ == "__main__":
    parse_args()
