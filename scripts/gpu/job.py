"""Jobs of four ranks on one card, of Megatron-core and DeepSpeed: hosts and processes are lost, all judged by the bit.

    python scripts/gpu/job.py --out DIR                 by gpu_evidence.sh
    python scripts/gpu/job.py --out DIR --device cpu    the same over gloo, to try this script

Four emulated hosts of one rank each (PP 2, DP 2, distributed optimizer, deterministic kernels; once TP 2, DP 2 with
overlapped communication) and a spare; real agents, real SIGKILLs; only the launcher is left out, as in fault_matrix.py.
The undisturbed run beside which everything is compared runs on the same card. A survivor that an abort kills would be
replaced on its host and change no bit: processes lost must be those that were struck. If NCCL does not take several
ranks per card, all of it runs over gloo with CUDA tensors (TP 2 instead of PP 2: gloo sends none), and names say so.

Rules of this file: it chooses jobs and what must hold of them; faults/job.py runs and judges them. What is wanted most
comes first.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # started by path

import make_corpus
from clusters import card, forked_node
from clusters.references import CORPUS, SCRIPTS, arguments_with_data, reference
from faults import cells
from faults.job import Job, Outcome
from faults.many import SURVIVORS, gained, look
from faults.plan import Kill
from gpt.layouts import SCRIPT_OF
from run_plain import run_ranks

from gpu.checks import Checks, Figures, parse_args

RANKS = 4
PARKED_S = 1.0
"""From the end of a rehearsal until its process has given back what it can."""
WARM_SWAPS = 3
"""After them nothing more is made for the first time."""
STEPS, SPACING = 20, 4
"""Steps of a job, and from one of its faults to the next. Jobs of equal steps share their undisturbed run."""
SIZES = {
    "megatron": "--hidden-size 64 --seq-length 64 --deterministic-mode --eval-interval 4 --use-distributed-optimizer",
    "deepspeed": "--eval-interval 4 --samples 24 --deterministic-mode",
}
PIPELINE, TENSOR = "--pp 2", "--tp 2"
OVERLAPPED = f"{TENSOR} --overlap-grad-reduce --overlap-param-gather"
BF16, FP16 = "--dtype bf16", "--dtype fp16 --initial-loss-scale 65536 --loss-scale-window 2 --hysteresis 1"
SETTINGS: dict[str, dict[str, Any]] = {"cuda": {"patience_s": 3.0}, "cpu": {"patience_s": 10.0}}
WAIT_S = {"cuda": 60.0, "cpu": 120.0}
"""Deadline of every wait in a job, that for its first step included."""
REFERENCE_S = {"cuda": 90.0, "cpu": 600.0}
"""Deadline of an undisturbed run."""
PROBE_S = 40.0
DEAD_CONTEXT = {"cuda": "assert", "cpu": "rank"}
SWAPS, SWAPS_SPACING = 20, 2
STRUCK = [rank for rank in range(RANKS) if rank not in SURVIVORS]
LEAKS_MAX = {"MiB": 8.0, "threads": 0.5, "descriptors": 1.0}
"""Per swap, of the card and of a survivor. Samples differ by a dozen descriptors, for they meet connections that are
being made: `fault_matrix.py --many` holds the ranks still, and finds one a swap."""
EXIT_CONFIG = 78
PROBE = "several ranks on one card"
Fault = tuple[str, str, int]
"""Kind, phase (as of faults/plan.py and faults/cells.py), rank."""


@dataclass(frozen=True)
class Place:
    """Place where jobs run. `out`: of one machine and commit, for undisturbed runs are kept there, too. `over_gloo`:
    NCCL does not take several ranks per card."""

    out: Path
    device: str
    over_gloo: bool = False
    framework: str = "megatron"

    @property
    def script(self) -> Path:
        return SCRIPTS / SCRIPT_OF[self.framework]

    def named(self, check: str) -> str:
        return f"{check}, gloo over CUDA tensors" if self.over_gloo else check

    def training(self, layout: str, precision: str = BF16, steps: int = STEPS) -> list[str]:
        words = f"{layout} {SIZES[self.framework]} {precision} --train-iters {steps}"
        if self.over_gloo:
            words = f"{words.replace(PIPELINE, TENSOR)} --backend gloo"
        return arguments_with_data(words.split(), self.script.name)

    def undisturbed(self, training: list[str]) -> Path:
        folder, limit_s = self.out / "references", REFERENCE_S[self.device]
        return reference(folder, training, RANKS, self.script, slots=1, deadline_s=limit_s)

    def job(self, name: str, training: list[str], kills: list[Kill], stops: int = 0) -> CardJob:
        settings = {"restarts_max": 100, **SETTINGS[self.device]}
        return CardJob(
            self.device, self.out / name, training, RANKS, 1, 1, kills, settings, stops, WAIT_S[self.device],
            heals=True, script=self.script, framework=self.framework,
        )  # fmt: skip


class CardJob(Job):
    """Looks at the card's memory and at the survivors of all faults before each of them, while all ranks wait.

    If it `parks`, that is not before the spare has rehearsed every host.
    """

    def __init__(self, device: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device, self.parks = device, False
        self.in_use: dict[str, list[int]] = defaultdict(list)

    @property
    def rehearsed(self) -> set[int]:
        return {rank for event in self.tail.of("SpareReady") for rank in event["ranks"]}

    def before_fault(self, outcome: Outcome) -> None:
        if self.parks:
            self.until("every host's rehearsal", lambda: self.rehearsed == set(range(RANKS)))
            time.sleep(PARKED_S)
            for pid, node in self.cluster.living().items():
                name = Path(f"/proc/{pid}/comm").read_text()
                if node == RANKS and name.startswith("python-spare") and (sample := look(pid)):
                    self.in_use["KiB private, parked"].append(sample["private_kib"])
                    if card.is_stand_in():  # of a real card only the whole is known, below
                        self.in_use["KiB of the card, parked"].append(sample["device_kib"])
        if self.device == "cuda":
            self.in_use["MiB of the card"].append(card.used_mib())
        for rank in SURVIVORS:
            sample = look(self.plan.pid_of(rank)) or {}  # it may have ended
            for quantity in (name for name in LEAKS_MAX if name in sample):
                self.in_use[f"{quantity} of rank {rank}"].append(sample[quantity])


def planned(faults: list[Fault], updates_by: list[int], spacing: int = SPACING) -> list[Kill]:
    """One after the other, `spacing` steps apart. `updates_by`: how many updates there have been after each step."""
    kills = []
    for index, (kind, phase, rank) in enumerate(faults):
        kills.append(cells.fault_at(index, spacing * (index + 1), phase, kind, rank, updates_by))
    return kills


def train(
    place: Place, figures: Figures, name: str, faults: list[Fault], layout: str = PIPELINE, precision: str = BF16,
    spacing: int = SPACING, then: Sequence[Kill] = (), may_lose_more: bool = False, parks: bool = False,
) -> CardJob:  # fmt: skip
    """Run one job with these faults, and `then` those. Raises: AssertionError if anything does not hold.

    `may_lose_more`: over NCCL a process may be where only its end leads out (comm/nccl.py); it is replaced like those
    that were struck.
    """
    training = place.training(layout, precision, max(STEPS, spacing * (len(faults) + 1)))
    undisturbed = place.undisturbed(training)
    kills = [*planned(faults, cells.updates(undisturbed, place.framework), spacing), *then]
    job = place.job(name, training, kills)
    job.parks = parks
    verdict = job.run(undisturbed)
    problems = [outcome.problem for outcome in verdict.outcomes if outcome.problem]
    lost, struck = job.tail.of("RankLost"), sum(kill.kind not in ("node", "silent") for kill in kills)
    ready = [one.ready_s for one in verdict.outcomes if one.ready_s is not None]
    figures |= {"swaps": len(ready), "bit_exact": verdict.bit_exact, "ready_s": ready, "job_s": verdict.seconds}
    figures |= job.in_use
    figures |= {"steps_lost": sum(one.lost_steps or 0 for one in verdict.outcomes), "processes_lost": len(lost)}
    assert verdict.holds, verdict.hang or verdict.difference or verdict.left or problems
    more = may_lose_more and place.device == "cuda" and not place.over_gloo
    assert len(lost) == struck or (more and len(lost) > struck), (
        f"{len(lost)} processes lost, {struck} struck: {[event['reason'] for event in lost]}"
    )
    figures["ready_median_s"] = statistics.median(ready)
    return job


def probe(place: Place, figures: Figures) -> None:
    """Ranks that pass for hosts of their own share the card; without that nothing else here can run over NCCL."""
    logs = place.out / "probe"
    logs.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).with_name("probe.py")
    figures["exit_code"] = run_ranks(RANKS, logs, [str(script), place.device], slots=1, deadline_s=PROBE_S)
    assert figures["exit_code"] == 0, f"{RANKS} ranks ended with {figures['exit_code']}, see {logs}"


def losses(place: Place, figures: Figures) -> None:
    """A host, a process, a silent process and the host that mirrors for it; the first rank's among them."""
    faults = [("node", "forward", 1), ("rank", "backward", 3), ("stop", "between", 0), ("node", "push", 2)]
    train(place, figures, "losses", faults)


def dead_contexts(place: Place, figures: Figures) -> None:
    """A device-side assertion leaves a process whose every further CUDA call fails."""
    places = (("forward", 1), ("backward", 2), ("between", 0))
    train(place, figures, "dead-contexts", [(DEAD_CONTEXT[place.device], phase, rank) for phase, rank in places])


def dead_in_swap(place: Place, figures: Figures) -> None:
    """The context of a survivor of one loss dies before its device has come to rest."""
    second = Kill(1, -1, 0, "unwinding", DEAD_CONTEXT[place.device], 2, after=0)
    train(place, figures, "dead-in-swap", [("rank", "backward", 1)], then=[second])


def many(place: Place, figures: Figures) -> None:
    """Swap processes SWAPS times in one job: neither the card nor a process that survives all swaps has more in use
    with each."""
    phases = ("forward", "backward", "optimizer", "update", "between")
    faults = [("rank", phases[index % len(phases)], STRUCK[index % len(STRUCK)]) for index in range(SWAPS)]
    job = train(place, figures, "many", faults, spacing=SWAPS_SPACING)
    expected = 2 * len(SURVIVORS) + (place.device == "cuda")
    counted = {name: len(values) for name, values in job.in_use.items()}
    looked = len(counted) == expected and min(counted.values()) >= 0.75 * SWAPS  # what closes meanwhile costs a sample
    assert looked, f"not everything was looked at: {counted}"
    # Not fewer samples: a helper thread and its descriptors are met by half of them, and few may all have met it.
    late = {name: values[WARM_SWAPS:] for name, values in job.in_use.items()}
    grown = {name: gained(values) / (len(values) // 2) for name, values in late.items()}
    figures |= {f"{name}, per swap": value for name, value in grown.items()}
    leaks = {name: value for name, value in grown.items() if value > LEAKS_MAX[name.partition(" of ")[0]]}
    assert not leaks, f"more with every swap: {leaks}"


def parked(place: Place, figures: Figures) -> None:
    """A spare parks a process for every host on the card. One takes over; the others leave the card before."""
    job = train(place, figures, "parked", [("node", "forward", 2)], parks=True)
    assert len(job.in_use["KiB private, parked"]) == RANKS, dict(job.in_use)
    taken = [(event["rank"], event["covered"]) for event in job.tail.of("RankTakenOver")]
    assert taken == [(2, True)], taken


def twice(place: Place, figures: Figures) -> None:
    """A second process is lost while groups are built after the first loss: half-made communicators are cut off."""
    second = Kill(1, -1, 0, "on:GroupsRebuilt", "rank", 2, after=0)
    train(place, figures, "twice", [("rank", "backward", 1)], then=[second], may_lose_more=True)


def graphs_refused(place: Place, figures: Figures) -> None:
    """Check that a job with CUDA graphs, which keep communicators that a swap replaces, is refused before it trains."""
    training = place.training(f"{PIPELINE} --cuda-graph-impl local")
    verdict = place.job("graphs", training, [], stops=EXIT_CONFIG).run(None)
    figures |= {"exit_codes": verdict.exit_codes, "said": verdict.stopped}
    assert verdict.holds, verdict.hang or verdict.difference or verdict.left
    assert "cuda_graph_impl" in verdict.stopped, verdict.stopped


def overlapped(place: Place, figures: Figures) -> None:
    """Collectives of autograd's own threads are cut off, too."""
    faults = [("rank", "backward", 3), ("node", "forward", 2), ("rank", "optimizer", 1)]
    train(place, figures, "overlapped", faults, OVERLAPPED, may_lose_more=True)


def losses_fp16(place: Place, figures: Figures) -> None:
    """Some steps are skipped."""
    faults = [("node", "optimizer", 2), ("rank", "update", 1), ("raise", "forward", 2)]
    train(place, figures, "losses-fp16", faults, precision=FP16)


def losses_zero(place: Place, figures: Figures, stage: int) -> None:
    """Lose a host, a process and a CUDA context of DeepSpeed's engine with ZeRO `stage`."""
    faults = [("node", "forward", 1), ("rank", "backward", 3), (DEAD_CONTEXT[place.device], "optimizer", 2)]
    train(replace(place, framework="deepspeed"), figures, f"zero{stage}", faults, f"--zero {stage}")


CHECKS = {
    "losses, bf16": losses,
    "dead CUDA contexts": dead_contexts,
    "a CUDA context that dies in a swap": dead_in_swap,
    f"{SWAPS} swaps in one job": many,
    "a loss while groups are built": twice,
    "every host parked on the card": parked,
    "CUDA graphs are refused by name": graphs_refused,
    "losses, overlapped communication": overlapped,
    "losses, fp16": losses_fp16,
}
DEEPSPEED_CHECKS = {f"losses, ZeRO {stage}": functools.partial(losses_zero, stage=stage) for stage in (1, 3)}
"""The last: DeepSpeed is imported after the checks above. Over NCCL only, as train_deepspeed.py."""
CARD_ONLY = {"CUDA graphs are refused by name"}
"""Megatron-core itself takes no such option where there is no card."""


def main() -> int:
    args = parse_args(__doc__)
    if args.device == "cuda" and card.is_stand_in():  # it computes as slowly as a CPU, for it is one
        SETTINGS["cuda"], REFERENCE_S["cuda"] = SETTINGS["cpu"], REFERENCE_S["cpu"]
        WAIT_S["cuda"] = WAIT_S["cpu"]
    checks, place = Checks("job", args.out, args.of), Place(args.out / args.of, args.device)
    make_corpus.ensure(CORPUS)
    forked_node.preload(device=args.device)
    several = checks.run({PROBE: functools.partial(probe, place)}) == 0
    place = replace(place, over_gloo=args.device == "cuda" and not several)
    wanted = {name: check for name, check in CHECKS.items() if args.device == "cuda" or name not in CARD_ONLY}
    engines = {} if place.over_gloo else DEEPSPEED_CHECKS
    checks.plan([*map(place.named, wanted), *engines])
    checks.run({place.named(name): functools.partial(check, place) for name, check in wanted.items()})
    if engines:
        forked_node.preload(forked_node.MODULES["deepspeed"], args.device)
        checks.run({name: functools.partial(check, place) for name, check in engines.items()})
    return checks.exit_code


if __name__ == "__main__":
    sys.exit(main())
