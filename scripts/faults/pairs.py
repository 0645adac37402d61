"""Two faults: one after the other, at the same moment, or the second in each phase of the first one's swap.

Rules of this file: four nodes of two ranks (TP 2, PP 2, DP 2), so that who may be lost next to whom without losing
state is known: node n's snapshots are on node n + 1. Node 0 is the coordinator unless it is lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusters.references import arguments_with_data, reference
from gpt.layouts import LAYOUTS

from faults.cells import SETTINGS, SLOTS
from faults.job import Job, Verdict
from faults.plan import Kill
from faults.table import keep

LAYOUT = LAYOUTS["tp2-pp2-dp2"]
FIRST, STEPS, INTERVAL = 4, 14, 4
EXIT_UNRECOVERABLE = 86
SURVIVOR_PHASES = ("SwapPlanned", "WorkerUnblocked", "GroupsRebuilt", "StateRestored", "WorkerResumed", "FirstStepDone")
TAKER_PHASES = ("SnapshotFetched", "GroupsRebuilt", "StateRestored", "FirstStepDone")
AGENT_PHASES = ("SwapPlanned", "SnapshotFetched")


@dataclass(frozen=True)
class Pair:
    """A named course of faults. `stops`: the exit code it is expected to end with; `says`: what the verdict names."""

    name: str
    kills: tuple[Kill, ...]
    spares: int = 2
    settings: dict[str, Any] = field(default_factory=dict)
    stops: int = 0
    says: str = ""
    heals: bool = False


def node_lost(rank: int, index: int = 0, step: int = FIRST, **more: Any) -> Kill:
    return Kill(index, -1, step, "forward", "node", rank, hold=step - 2, **more)


def during(event: str, kind: str, rank: int, node: int = -1) -> Kill:
    """The second fault, in the process that reports `event`: a worker of `rank`, or an agent."""
    if event in AGENT_PHASES:
        return Kill(1, node, 0, f"on:{event}", kind, -1, after=0)
    return Kill(1, -1, 0, f"on:{event}", kind, rank, after=0)


def pairs() -> list[Pair]:
    return [*one_by_one(), *in_the_swap(), *of_the_spare(), *at_once(), *without_spare(), *stuck()]


def one_by_one() -> list[Pair]:
    again = node_lost(6, index=1, step=FIRST + 4)
    return [
        Pair("one-after-the-other", (node_lost(2), again)),
        Pair("the-taker-next", (node_lost(2), node_lost(2, index=1, step=FIRST + 4))),
        Pair("the-first-node-next", (node_lost(0), node_lost(0, index=1, step=FIRST + 4))),
    ]


def in_the_swap() -> list[Pair]:
    found = []
    for event in SURVIVOR_PHASES:
        for kind in ("node", "rank") if event not in AGENT_PHASES else ("node",):
            if event not in AGENT_PHASES:
                found.append(Pair(f"survivor-{kind}-at-{event}", (node_lost(2), during(event, kind, 6))))
        found.append(Pair(f"coordinator-at-{event}", (node_lost(4), during(event, "node", 0, node=0))))
    for event in TAKER_PHASES:
        for kind in ("node", "rank") if event not in AGENT_PHASES else ("node",):
            found.append(Pair(f"taker-{kind}-at-{event}", (node_lost(2), during(event, kind, 2))))
    first = Kill(0, -1, FIRST, "forward", "rank", 2, hold=FIRST - 2)
    for event in ("WorkerUnblocked", "StateRestored"):
        found.append(Pair(f"after-a-rank-node-at-{event}", (first, during(event, "node", 6)), spares=1))
        found.append(Pair(f"after-a-rank-rank-at-{event}", (first, during(event, "rank", 6)), spares=1))
    return found


def of_the_spare() -> list[Pair]:
    """With two spares the third and fourth node are rehearsed by none of them."""
    rehearsing = Kill(1, -1, 0, "rehearsal", "node", 6, after=0)
    process = Kill(1, -1, 0, "rehearsal", "rank", 6, after=0)
    idle = Kill(0, -1, 0, "on:SpareReady", "node")
    preparing = Kill(0, -1, 0, "rehearsal", "node")
    return [
        Pair("spare-idle", (idle, node_lost(2, index=1))),
        Pair("spare-rehearsing", (preparing, node_lost(2, index=1))),
        Pair("taker-node-rehearsing", (node_lost(6), rehearsing)),
        Pair("taker-rank-rehearsing", (node_lost(6), process)),
    ]


def at_once() -> list[Pair]:
    both = node_lost(2, also=(2,))
    verdict = r"newest checkpoint|no checkpoint was saved"
    return [
        Pair("node-and-buddy", (both,), stops=EXIT_UNRECOVERABLE, says=verdict),
        Pair("two-at-once-apart", (node_lost(2, also=(3,)),)),
        Pair("two-at-once-two-copies", (both,), settings={"copies": 2}),
        Pair("first-two-at-once-two-copies", (node_lost(0, also=(1,)),), settings={"copies": 2}),
    ]


def without_spare() -> list[Pair]:
    waits = {"on_no_spare": "wait"}
    again = node_lost(6, index=1, step=FIRST + 4)
    verdict = r"newest checkpoint|no checkpoint was saved"
    return [
        Pair("no-spare", (node_lost(2),), spares=0, stops=EXIT_UNRECOVERABLE, says=verdict),
        Pair("no-spare-wait-join", (node_lost(2),), spares=0, settings=waits, heals=True),
        Pair("no-spare-wait-join-twice", (node_lost(2), again), spares=0, settings=waits, heals=True),
        Pair("join-to-be-the-next-spare", (node_lost(2), again), spares=1, heals=True),
    ]


def stuck() -> list[Pair]:
    """A survivor that cannot unwind because it holds the GIL for ever is replaced on its node."""
    holding = Kill(0, -1, FIRST, "forward", "gil", 6, hold=FIRST - 2)
    return [Pair("survivor-holds-the-gil", (holding, Kill(1, 1, 0, "driver", "node", after=0)))]


def run(pair: Pair, out: Path, references: Path) -> dict[str, Any]:
    own = ["--train-iters", STEPS, "--eval-interval", INTERVAL, "--eval-iters", 1]
    training = arguments_with_data([*LAYOUT.arguments, *map(str, own)])
    undisturbed = reference(references, training, LAYOUT.world_size)
    job = Job(
        out / "pairs" / pair.name, training, LAYOUT.world_size, SLOTS, pair.spares, list(pair.kills),
        {**SETTINGS, **pair.settings}, pair.stops, heals=pair.heals,
    )  # fmt: skip
    return line_of(pair, job.run(undisturbed))


def line_of(pair: Pair, verdict: Verdict) -> dict[str, Any]:
    problems = [verdict.hang, verdict.difference, *verdict.left, *(one.problem for one in verdict.outcomes)]
    if pair.says and not re.search(pair.says, verdict.stopped):
        problems.append(f"the verdict does not say `{pair.says}`: {verdict.stopped}")
    last = verdict.outcomes[-1]
    return {
        "cell": pair.name, "ok": not any(problems), "refused": "", "problem": "; ".join(filter(None, problems)),
        "fired": [one.fired for one in verdict.outcomes], "bit_exact": verdict.bit_exact, "ready_s": last.ready_s,
        "lost_steps": last.lost_steps, "hang": bool(verdict.hang), "stopped": verdict.stopped,
        "exit_codes": verdict.exit_codes, "seconds": verdict.seconds,
    }  # fmt: skip


def main(out: Path, references: Path, only: list[str], done: dict[str, dict[str, Any]], listing: bool) -> int:
    """`listing`: print the names of those that are missing, and end."""
    wanted = [pair for pair in pairs() if not only or any(re.fullmatch(pattern, pair.name) for pattern in only)]
    missing = [pair for pair in wanted if pair.name not in done]
    if listing:
        print("\n".join(pair.name for pair in missing))
        return 0
    for pair in missing:
        done[pair.name] = run(pair, out, references)
        keep(out / "pairs.jsonl", done[pair.name])
    held = sum(line["ok"] for line in done.values())
    print(f"{held} of {len(done)} pairs hold, {sum(line['hang'] for line in done.values())} hangs")
    return int(held < len(done))
