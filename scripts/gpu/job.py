"""A Megatron-core job of four ranks on one card: hosts and processes are lost, every loss judged bit for bit.

    python scripts/gpu/job.py --out DIR                 by gpu_evidence.sh
    python scripts/gpu/job.py --out DIR --device cpu    the same over gloo, to try this script

Four emulated hosts of one rank each (PP 2, DP 2, distributed optimizer, deterministic kernels; once TP 2, DP 2 with
overlapped communication) and a spare; real agents, real SIGKILLs; only the launcher is left out, as in fault_matrix.py.
The undisturbed run beside which everything is compared runs on the same card. A survivor that an abort kills would be
replaced on its host and change no bit: processes lost must be those that were struck.

Rules of this file: it chooses jobs and what must hold of them; faults/job.py runs and judges them.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # started by path

import make_corpus
from clusters import card, forked_node
from clusters.references import CORPUS, arguments_with_data, reference
from faults import cells
from faults.job import Job, Outcome
from faults.plan import Kill

from gpu.checks import Checks, Figures, parse_args

RANKS = 4
SPACING = 4
LAYOUTS = {
    "PP 2": "--pp 2 --use-distributed-optimizer",
    "TP 2, overlapped": "--tp 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}
SIZES = "--hidden-size 64 --seq-length 64 --deterministic-mode --eval-interval 4"
PRECISIONS = {
    "bf16": "--dtype bf16",
    "fp16": "--dtype fp16 --initial-loss-scale 65536 --loss-scale-window 2 --hysteresis 1",
}
SETTINGS = {"restarts_max": 100, "patience_s": 10.0}
SWAPS = 20
Fault = tuple[str, str, int]
"""Kind, phase (as of faults/plan.py and faults/cells.py), rank."""
LEAK_MIB_MAX = 8.0
"""Of device memory per swap, by a straight line through the second half of the samples."""


class CardJob(Job):
    """Samples the card's memory before each fault, while all ranks wait."""

    def __init__(self, device: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device = device
        self.used_mib: list[int] = []

    def before_fault(self, outcome: Outcome) -> None:
        if self.device == "cuda":
            self.used_mib.append(card.used_mib())


def planned(faults: list[Fault], updates_by: list[int]) -> list[Kill]:
    """One after the other, SPACING steps apart. `updates_by`: how many updates there have been after each step."""
    kills = []
    for index, (kind, phase, rank) in enumerate(faults):
        kills.append(cells.fault_at(index, SPACING * (index + 1), phase, kind, rank, updates_by))
    return kills


def train(
    checks: Checks, device: str, name: str, faults: list[Fault], layout: str = "PP 2", precision: str = "bf16",
    then: Sequence[Kill] = (),
) -> tuple[CardJob, Figures]:  # fmt: skip
    """Run one job with these faults, and `then` those. Raises: AssertionError if anything does not hold."""
    steps = ["--train-iters", str(SPACING * (len(faults) + 2))]
    training = arguments_with_data([*LAYOUTS[layout].split(), *SIZES.split(), *PRECISIONS[precision].split(), *steps])
    undisturbed = reference(checks.out / "references", training, RANKS, slots=1)
    kills = [*planned(faults, cells.updates(undisturbed)), *then]
    job = CardJob(device, checks.out / name, training, RANKS, 1, 1, kills, SETTINGS, heals=True)
    verdict = job.run(undisturbed)
    problems = [outcome.problem for outcome in verdict.outcomes if outcome.problem]
    assert verdict.holds, verdict.hang or verdict.difference or verdict.left or problems
    lost, struck = job.tail.of("RankLost"), sum(kill.kind not in ("node", "silent") for kill in kills)
    assert len(lost) == struck, f"{len(lost)} processes lost, {struck} struck: {[event['reason'] for event in lost]}"
    ready = [one.ready_s for one in verdict.outcomes if one.ready_s is not None]
    undone = sum(one.lost_steps or 0 for one in verdict.outcomes)
    figures = {"swaps": len(ready), "bit_exact": verdict.bit_exact, "steps_lost": undone, "ready_s": ready}
    return job, figures | {"ready_median_s": statistics.median(ready), "job_s": verdict.seconds}


def losses(checks: Checks, device: str, precision: str) -> Figures:
    """Hosts and processes, in every kind of phase; the first rank's and a last stage's among them."""
    faults = [
        ("node", "forward", 1), ("rank", "backward", 3), ("node", "optimizer", 2), ("stop", "between", 0),
        ("rank", "update", 1), ("node", "push", 0), ("raise", "forward", 2),
    ]  # fmt: skip
    return train(checks, device, f"losses-{precision}", faults, precision=precision)[1]


def overlapped(checks: Checks, device: str) -> Figures:
    """Collectives of autograd's own threads are cut off, too."""
    faults = [("rank", "backward", 3), ("node", "forward", 2), ("rank", "optimizer", 1)]
    return train(checks, device, "overlapped", faults, layout="TP 2, overlapped")[1]


def twice(checks: Checks, device: str) -> Figures:
    """A second process is lost while groups are built after the first loss: half-made communicators are cut off."""
    second = Kill(1, -1, 0, "on:GroupsRebuilt", "rank", 2, after=0)
    return train(checks, device, "twice", [("rank", "backward", 1)], then=[second])[1]


def dead_contexts(checks: Checks, device: str) -> Figures:
    """A device-side assertion leaves a process whose every further CUDA call fails."""
    faults = [("assert", "forward", 1), ("assert", "backward", 2), ("assert", "between", 0)]
    return train(checks, device, "dead-contexts", faults)[1]


def many(checks: Checks, device: str) -> Figures:
    """So many swaps of processes in one job: what the card has in use does not grow."""
    phases = ("forward", "backward", "optimizer", "update", "between")
    faults = [("rank", phases[index % len(phases)], index % RANKS) for index in range(SWAPS)]
    job, figures = train(checks, device, "many", faults)
    late = job.used_mib[len(job.used_mib) // 2 :]
    if late:
        growth = statistics.linear_regression(range(len(late)), late).slope
        figures |= {"used_mib": job.used_mib, "growth_mib_per_swap": round(growth, 2)}
        assert growth <= LEAK_MIB_MAX, f"device memory grows by {growth:.1f} MiB a swap: {job.used_mib}"
    return figures


def main() -> int:
    args = parse_args(__doc__)
    checks = Checks("job", args.out)
    make_corpus.ensure(CORPUS)
    forked_node.preload(device=args.device)
    for precision in PRECISIONS:
        checks.run(f"losses, {precision}", functools.partial(losses, checks, args.device, precision))
    checks.run("losses, overlapped communication", lambda: overlapped(checks, args.device))
    checks.run("a loss while groups are built", lambda: twice(checks, args.device))
    if args.device == "cuda":
        checks.run("dead CUDA contexts", lambda: dead_contexts(checks, args.device))
    checks.run(f"{SWAPS} swaps in one job", lambda: many(checks, args.device))
    return min(1, checks.failed)


if __name__ == "__main__":
    sys.exit(main())
