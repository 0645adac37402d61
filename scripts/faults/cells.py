"""The cells of the fault matrix: which places and kinds, how many of them share a job, and what each cell came to.

Rules of this file: a cell's step depends on its column only, so that a job with fewer cells has the same reference. A
job that does not hold is split at the fault it broke at, until the cell that breaks it stands alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clusters.launched import REPOSITORY
from clusters.references import arguments_with_data, reference
from compare_runs import read_run
from gpt.layouts import LAYOUTS, Layout

from faults.job import Job, Verdict
from faults.plan import HANGS, ORDERED, Kill

AT_START, LAST = -1, -2
SPACING = 4
"""Steps from one fault to the next, and between evaluations and saves: every fault's step has both."""
SLOTS = 2
SETTINGS = {"restarts_max": 100}
COUNTS_SKIPPED = ("update", "staging", "push")
"""Phases whose steps are the plugin's, skipped ones included; all others count the optimizer's updates."""


@dataclass(frozen=True)
class Column:
    """A place where faults strike: `phase` as in inject.py, hooks.py or save_hooks.py."""

    phase: str
    group: str
    at: int = 0
    any_rank: bool = False


COLUMNS = {
    "startup": Column("startup", "main", AT_START),
    "rehearsal": Column("rehearsal", "main", any_rank=True),
    "forward": Column("forward", "main"),
    "backward": Column("backward", "main"),
    "before": Column("before", "main"),
    "optimizer": Column("optimizer", "main"),
    "update": Column("update", "main"),
    "staging": Column("staging", "main"),
    "push": Column("push", "main"),
    "between": Column("between", "main"),
    "evaluate": Column("evaluate", "main"),
    "last": Column("optimizer", "main", LAST),
    "planned": Column("planned", "save", any_rank=True),
    "write": Column("write", "save", any_rank=True),
    "finishing": Column("finishing", "save", any_rank=True),
    "exit": Column("exit", "save", LAST),
    "async-training": Column("forward", "async"),
    "async-write": Column("write", "async", any_rank=True),
    "async-finishing": Column("finishing", "async", any_rank=True),
    "async-exit": Column("exit", "async", LAST),
}
IN_A_WORKER = ("forward", "backward", "before", "optimizer", "update", "staging", "between", "evaluate")
MORE_KINDS = {
    "raise": ("forward", "optimizer", "evaluate"),
    "stop": ("backward", "between"),
    "silent": ("forward",),
    "assert": IN_A_WORKER,
    "oom": ("forward", "backward", "optimizer", "evaluate"),
} | dict.fromkeys(("spin", "mute", "abort-hangs", "issue", "on-stream"), IN_A_WORKER)
MORE_KINDS |= {
    kind: tuple(name for name in IN_A_WORKER if name != "between" and (kind, name) != ("absent", "staging"))
    for kind in HANGS
}
"""Kinds besides node and rank, and the columns they are tried in. Between training calls a hang may last for long; the
thread that stages communicates with nobody."""
STALLS = {"stall_timeout_s": 15.0, "start_timeout_s": 60.0}
"""Settings of jobs that a fault of ORDERED leaves in silence."""
ENDS = {"mute": 86}
"""Kinds that end the job, with this exit code: nobody can tell a silent process from those that wait for it."""
CANNOT_SAVE = ("overlap-pp2",)
"""Without the plugin neither: torch's planner refuses what megatron-core 0.16.1 makes of its padded buckets."""


@dataclass(frozen=True)
class Cell:
    layout: str
    column: str
    kind: str

    @property
    def group(self) -> str:
        return COLUMNS[self.column].group

    @property
    def key(self) -> str:
        return f"{self.layout}:{self.column}:{self.kind}"


def cells(layouts: list[str], kinds: list[str]) -> list[Cell]:
    found = []
    for layout in layouts:
        for kind in kinds:
            columns = [name for name in MORE_KINDS.get(kind, tuple(COLUMNS)) if has_place(layout, name)]
            found += [Cell(layout, column, kind) for column in columns]
    return found


def has_place(layout: str, column: str) -> bool:
    """The places in saves are those of megatron-core's."""
    saves = LAYOUTS[layout].framework == "megatron" and layout not in CANNOT_SAVE
    return saves or COLUMNS[column].group == "main"


def jobs(wanted: list[Cell], node_faults_max: int) -> Iterator[list[Cell]]:
    """Cells that can share a job: same layout, group and kind; faults that cost a host, as many as there are spares."""
    by_job: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in wanted:
        by_job.setdefault((cell.layout, cell.group, cell.kind), []).append(cell)
    for (_, _, kind), together in by_job.items():
        size = 1 if kind in ENDS else node_faults_max if kind in ("node", "silent", *HANGS) else len(together)
        yield from (together[first : first + size] for first in range(0, len(together), size))


class Runner:
    """Runs jobs of cells and tells `on_result` what became of each cell as soon as it is known."""

    def __init__(
        self, out: Path, references: Path, on_result: Callable[[dict[str, Any]], None], heals: bool = False,
        only_struck: bool = False, settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.out, self.references, self.on_result, self.settings = out, references, on_result, settings
        self.heals, self.only_struck = heals, only_struck

    def run(self, together: list[Cell]) -> None:
        verdict, name = self._job(together)
        refusal = refused(verdict)
        if refusal:
            self._tell(together, verdict, name, refusal)
        elif verdict.holds or len(together) == 1:
            self._tell(together, verdict, name, "")
        else:
            for part in split(together, verdict):
                self.run(part)

    def _job(self, together: list[Cell]) -> tuple[Verdict, str]:
        layout, group = LAYOUTS[together[0].layout], together[0].group
        name = f"{together[0].key.replace(':', '.')}-{len(together)}"
        folder = self.out / "jobs" / name
        training = arguments(layout, group)
        script = REPOSITORY / "scripts" / layout.script
        undisturbed = reference(self.references, training, layout.world_size, script, SLOTS)
        saving = save_arguments(group, folder)
        kills = planned_faults(together, layout.world_size, updates(undisturbed, layout.framework))
        hosts = sum(kill.kind in ("node", "silent") for kill in kills)
        settings = {**SETTINGS, **(STALLS if together[0].kind in ORDERED else {}), **self.settings}
        job = Job(
            folder, [*training, *saving], layout.world_size, SLOTS, 2 if self.heals else max(1, hosts), kills, settings,
            ENDS.get(together[0].kind, 0), heals=self.heals, script=script, framework=layout.framework,
            only_struck=self.only_struck and together[0].kind not in ORDERED,
        )  # fmt: skip
        return job.run(undisturbed), name

    def _tell(self, together: list[Cell], verdict: Verdict, name: str, refusal: str) -> None:
        for cell, outcome in zip(together, own_outcomes(verdict), strict=True):
            problem = verdict.hang or verdict.difference or "; ".join(verdict.left) or outcome.problem
            line: dict[str, Any] = {"cell": cell.key, "layout": cell.layout, "column": cell.column, "kind": cell.kind}
            line |= {"fired": outcome.fired is not None, "bit_exact": verdict.bit_exact, "refused": refusal}
            line |= {"ready_s": outcome.ready_s, "lost_steps": outcome.lost_steps, "hang": bool(verdict.hang)}
            line |= {"ok": verdict.holds and outcome.fired is not None, "problem": "" if refusal else problem}
            line |= {"where": outcome.fired, "job": name, "cells_in_job": len(together), "job_s": verdict.seconds}
            self.on_result(line)


def own_outcomes(verdict: Verdict) -> list[Any]:
    """Without the faults that only prepare another one."""
    prepares = {outcome.kill.after for outcome in verdict.outcomes}
    return [outcome for outcome in verdict.outcomes if outcome.kill.index not in prepares]


def split(together: list[Cell], verdict: Verdict) -> list[list[Cell]]:
    """At the first fault that went wrong (it alone in the middle), or in halves if none can be named."""
    outcomes = own_outcomes(verdict)
    first = next((i for i, one in enumerate(outcomes) if one.problem or one.fired is None), len(together) // 2)
    parts = [together[:first], together[first : first + 1], together[first + 1 :]]
    return [part for part in parts if part]


def refused(verdict: Verdict) -> str:
    """The refusal, if the plugin does not take this layout at all."""
    return verdict.stopped if set(verdict.exit_codes) == {78} else ""


def group_columns(group: str) -> list[str]:
    return [name for name, column in COLUMNS.items() if column.group == group]


def last_step(group: str) -> int:
    return SPACING * (len([name for name in group_columns(group) if COLUMNS[name].at == 0]) + 2)


def step_of(name: str) -> int:
    column, places = COLUMNS[name], [n for n in group_columns(COLUMNS[name].group) if COLUMNS[n].at == 0]
    if column.at == AT_START:
        return 0
    return last_step(column.group) if column.at == LAST else SPACING * (places.index(name) + 1)


def updates(undisturbed: Path, framework: str = "megatron") -> list[int]:
    """Count the updates that there have been after each step, the first being step 0: overflows of fp16 skip some.

    A step that megatron-core skips has no gradient norm; DeepSpeed's have none with ZeRO 0 and fp32.
    """
    run = read_run(undisturbed)
    if infinite := [step for step, loss in run.losses() if not math.isfinite(loss)]:
        raise RuntimeError(f"the loss of step {infinite[0]} in {undisturbed} is not finite: equal bits prove nothing")
    lines = run.metrics[0]
    skipped = [framework == "megatron" and lines[step]["grad_norm"] is None for step in sorted(lines)]
    return list(accumulate([0, *(int(not one) for one in skipped)]))


def planned_faults(together: list[Cell], world: int, updates_by: list[int]) -> list[Kill]:
    """Plan kills in the order of steps. The rank that is hit moves through all nodes and slots."""
    kills: list[Kill] = []
    order = list(COLUMNS)
    for cell in sorted(together, key=lambda cell: (step_of(cell.column), order.index(cell.column))):
        kills += faults_of(cell, len(kills), world, updates_by)
    return kills


def faults_of(cell: Cell, index: int, world: int, updates_by: list[int]) -> list[Kill]:
    column, step = COLUMNS[cell.column], step_of(cell.column)
    updated = updates_by[step]
    rank = -1 if column.any_rank else (list(COLUMNS).index(cell.column) * (SLOTS + 1) + 1) % world
    if cell.column == "rehearsal" and cell.kind == "node":
        return [Kill(index, -1, 0, "rehearsal", cell.kind)]
    if cell.column == "rehearsal":  # of the process that replaces a rank on its own node
        prepares = Kill(index, -1, updated, "forward", "rank", 1 % world, hold=updated - 1)
        return [prepares, Kill(index + 1, -1, 0, "rehearsal", cell.kind, 1 % world, after=index)]
    if column.at == AT_START:
        return [Kill(index, -1, 0, "startup", cell.kind, rank)]
    if cell.kind == "abort-hangs":  # something must be aborted: a process of another host is killed as well
        hangs = fault_at(index, step, column.phase, cell.kind, rank, updates_by)
        return [hangs, Kill(index + 1, -1, 0, column.phase, "rank", (rank + SLOTS) % world, after=index)]
    return [fault_at(index, step, column.phase, cell.kind, rank, updates_by)]


def fault_at(index: int, step: int, phase: str, kind: str, rank: int, updates_by: list[int]) -> Kill:
    """A fault in iteration `step`, once all ranks are there. Most phases count updates, of which fp16 skips some."""
    updated = updates_by[step]
    at, hold = step if phase in COUNTS_SKIPPED else updated, updated if phase == "exit" else updated - 1
    return Kill(index, -1, at, phase, kind, rank, hold=hold)


def arguments(layout: Layout, group: str) -> list[str]:
    own = ["--train-iters", last_step(group), "--eval-interval", SPACING]
    own += ["--eval-iters", 1] if layout.framework == "megatron" else []
    if "fp16" in layout.arguments:  # early faults need updates to strike at, too
        own += ["--initial-loss-scale", 65536]
    return arguments_with_data([*layout.arguments, *map(str, own)], layout.script)


def save_arguments(group: str, folder: Path) -> list[str]:
    words = ["--save", str(folder / "checkpoints"), "--save-interval", str(SPACING)]
    return {"main": [], "save": words, "async": [*words, "--async-save"]}[group]


def selected(wanted: list[Cell], only: list[str]) -> list[Cell]:
    """`layout[:column[:kind]]`, each a regular expression for the whole word; several: any of them."""
    if not only:
        return wanted

    def fits(cell: Cell, text: str) -> bool:
        words = (cell.layout, cell.column, cell.kind)
        return all(re.fullmatch(pattern, word) for pattern, word in zip(text.split(":"), words, strict=False))

    return [cell for cell in wanted if any(fits(cell, text) for text in only)]
