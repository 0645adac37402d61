"""Count what a swap rebuilds in a big job: communicators, connections and store round trips of a rank.

    python scripts/bench_rebuild.py --tp 8 --pp 4 --dp 16 --lost 21 0 63 --out rebuild-out

Membership is simulated, the code is real: Megatron-core's and DeepSpeed's groups are made through the plugin, for a job
of hundreds of ranks, in one process for each kind of rank (bench/rebuild_alone.py says what is not real). Which groups
a step uses is counted in a Megatron-core job of eight real ranks (TP 2, PP 2, DP 2). Then: which communicators have no
member on the lost node, and what keeping those would save at the costs that others have published.

Rules of this file: it counts and times nothing, so other work on the machine changes no figure.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from bench import rebuild_report as report
from bench.control_kernel import machine
from bench.rebuild_report import Group, Layout

SCRIPTS = Path(__file__).resolve().parent
SMALL = (
    "--tp 2 --pp 2 --dtype bf16 --use-distributed-optimizer --hidden-size 32 --seq-length 32 --micro-batch-size 1 "
    "--eval-interval 0"
)
SMALL_RANKS, STEPS = 8, (2, 4)
"""Two runs differ in length: their difference is what the steps use, without start and end."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, size in (("tp", 8), ("pp", 4), ("dp", 16), ("node-ranks", 8)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--lost", type=int, nargs="+", default=[21, 0, 63], help="nodes, each lost alone")
    parser.add_argument("--out", type=Path, default=Path("rebuild-out"))
    return parser.parse_args()


def counted(layout: Layout, setup: str, rank: int) -> dict[str, Any]:
    """`rebuild_alone.count` in a process of its own, forked from this one."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        from bench import rebuild_alone

        with open(write, "wb") as answer, contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints all ranks
            pickle.dump(rebuild_alone.count(layout, rebuild_alone.SETUPS[setup], rank), answer)
        os._exit(0)  # past the helper threads of its groups
    os.close(write)
    with open(read, "rb") as answer:
        data = answer.read()
    _, status = os.waitpid(pid, 0)
    if status or not data:
        raise SystemExit(f"[rebuild] counting for rank {rank} of {setup} failed; its traceback is above")
    found: dict[str, Any] = pickle.loads(data)
    return found


def of_setup(layout: Layout, setup: str, lost_nodes: list[int], used: frozenset[str] | None) -> dict[str, Any]:
    """All of one set-up. `used`: roles of the groups that a step uses; None: all of them."""
    ask = functools.cache(functools.partial(counted, layout, setup))
    everything = tuple(range(layout.ranks))
    groups = [Group("default_pg", "nccl", everything), *ask(0)["called"]]
    roles = frozenset(group.role for group in groups) if used is None else used
    losses = []
    for node in lost_nodes:
        lost = layout.on_node(node)
        rows = []
        for kind in report.kinds(groups, layout.ranks, lost):
            mine = sorted(group for group in groups if kind.first in group.ranks)
            if sorted(ask(kind.first)["mine"]) != mine:
                raise SystemExit(f"[rebuild] rank {kind.first} of {setup} made other groups than rank 0 says it has")
            rows.append(report.row(kind, ask(kind.first), lost, roles))
        losses.append({"node": node, "kinds": rows, "job": report.job(groups, lost, rows, roles)})
        losses[-1]["savings"] = report.savings(rows)
    return {"setup": setup, "new_group_calls": len(groups) - 1, "used": sorted(roles), "losses": losses}


def used_roles() -> tuple[frozenset[str], dict[str, dict[str, int]]]:
    """The groups that a step of a real job uses, and its operations by group and name, all ranks together."""
    counts = Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, SCRIPTS / "make_corpus.py", folder / "text", "--mebibytes", "1"], check=True)
        for steps, sign in zip(STEPS, (-1, 1), strict=True):
            out = folder / str(steps)
            out.mkdir()
            command = ["--ranks", SMALL_RANKS, "--logs", out, "--", SCRIPTS / "bench" / "rebuild_used.py", out]
            command += [SCRIPTS / "train_gpt.py", "--data-path", folder / "text", *SMALL.split()]
            command += ["--train-iters", steps]
            subprocess.run([sys.executable, SCRIPTS / "run_plain.py", *map(str, command)], check=True)
            for rank in range(SMALL_RANKS):
                for role, operation, times in json.loads((out / f"rank{rank}.json").read_text()):
                    counts[role, operation] += sign * times
    found: dict[str, dict[str, int]] = {}
    for (role, operation), times in counts.items():
        if times:
            found.setdefault(role, {})[operation] = times // (STEPS[1] - STEPS[0])
    return frozenset(found), found


def main() -> int:
    args = parse_args()
    warnings.filterwarnings("ignore")
    layout = Layout(args.tp, args.pp, args.dp, args.node_ranks)
    used, operations = used_roles()
    importlib.import_module("patches.cpu.deepspeed").apply()
    importlib.import_module("megatron.core.parallel_state")
    setups = [("megatron", used), ("zero", None), ("pipeline", None)]
    found: dict[str, Any] = {
        "machine": machine(),
        "versions": {name: version(name) for name in ("torch", "megatron-core", "deepspeed")},
        "layout": asdict(layout),
        "operations_of_a_step": operations,
        "setups": [of_setup(layout, setup, args.lost, roles) for setup, roles in setups],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rebuild.json").write_text(json.dumps(found, indent=1) + "\n")
    for setup in found["setups"]:
        print(report.markdown(f"{setup['setup']}, node {args.lost[0]} lost", setup["losses"][0]["kinds"]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
