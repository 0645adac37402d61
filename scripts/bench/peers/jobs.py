"""Interface between the driver and a system, and what all systems share: faults, the clock, when a job is ready.

    job = SomeJob(setting, variant); job.start(); job.wait_until(step, limit_s); strike = job.strike(fault)
    while not (figures := job.recovered(strike)) and not job.ended(): job.tend(strike)
    job.close()

Rules of this file: standard library only. Every fault is made from outside, by the same function for every system, and
its instant is read right before the first signal. A node is every process with its tag (clusters/launched.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusters.launched import Cluster
from megatron_lm import base_job

from bench.peers.marks import VARIABLE, Reader

FAULTS = ("process", "node", "silent", "first")
"""SIGKILL of one worker; SIGKILL of all of a node's processes; SIGSTOP of them; SIGKILL of the first node's."""

MODEL = ["--layers", "2", "--hidden", "64", "--seq-length", "64", "--num-microbatches", "2", "--eval-interval", "0"]
MODEL += ["--train-iters", "2000"]
SMALLEST = ["--layers", "1", "--hidden", "16", "--heads", "1", "--seq-length", "8", "--num-microbatches", "1"]
SMALLEST += ["--dtype", "bf16", "--distributed-optimizer"]
LAYOUTS = {
    "tp2pp2dp2": ["--tp", "2", "--pp", "2", "--dtype", "bf16", "--distributed-optimizer"],
    "dp4": ["--dtype", "fp32"],
    "dp8": SMALLEST,
    "dp32": SMALLEST,
}  # fmt: skip
ENGINES = {f"zero{stage}": ["--zero", str(stage), "--dtype", "bf16"] for stage in (1, 3)}
"""Layouts of train_deepspeed.py."""
PRETRAIN = "pretrain_gpt"
"""The layout of Megatron-LM's own script: that of base_job.py."""
NODES = 4


@dataclass(frozen=True)
class Setting:
    """One measurement's surroundings. `data`: prefix of the corpus; `cache`: sample indices; `python`: the peers';
    `checkout`: of Megatron-LM; `startup_s`: seconds from the script's start to its first step; `past_steps`: before the
    first fault."""

    folder: Path
    data: Path
    cache: Path
    python: Path
    layout: str
    checkout: Path | None = None
    startup_s: float = 0.0
    past_steps: int = 0

    @property
    def per_node(self) -> int:
        return {**dict.fromkeys(("dp4", *ENGINES), 1), "dp32": 8}.get(self.layout, 2)

    @property
    def world(self) -> int:
        return NODES * self.per_node

    @property
    def training_args(self) -> list[str]:
        if self.layout == PRETRAIN:
            assert self.checkout is not None
            script = str(self.checkout / "pretrain_gpt.py")
            return [script, *base_job.arguments(str(self.data), 2000, "--eval-interval", "100000")]
        if self.layout in ENGINES:
            return [*MODEL, *ENGINES[self.layout], "--data-path", str(self.data)]
        return [*MODEL, *LAYOUTS[self.layout], "--data-path", str(self.data), "--data-cache-path", str(self.cache)]


class BenchCluster(Cluster):
    """A cluster whose processes get `extra` in their environment."""

    extra: dict[str, str] = {}

    def environment(self, node: int) -> dict[str, str]:
        return super().environment(node) | self.extra


@dataclass
class Strike:
    """A fault that has happened."""

    fault: str
    node: int
    time: float
    pids: set[int] = field(default_factory=set)
    completed: int = 0
    """The newest step that every rank had completed."""


class Job:
    """Base of all systems' jobs. `variant` is the system's own choice of settings."""

    nodes = NODES + 1
    heals = False
    """True if one job can be struck again and again."""
    one_first = False
    """True if its first node is another one once that has been lost."""
    per_job = 9
    """Faults that one job meets, besides that of its first node."""
    first_step, gap = 21, 10
    """The earliest step that is struck, and the fewest steps between a recovery and the next fault (gap_after)."""
    step_limit_s = 0.5
    """Seconds that a step may take where many are waited for."""

    def __init__(self, setting: Setting, variant: str) -> None:
        self.setting, self.variant = setting, variant
        self.number = 0  # of the fault that comes next, among those of its kind
        self._newest: dict[int, int] = {}  # rank -> the newest step that it has completed
        self._counted = 0  # lines of `marks` that are in it
        self.cluster = BenchCluster(setting.folder, self.nodes, setting.per_node)
        self.marks = Reader(setting.folder / "marks.jsonl")
        self.cluster.extra = {VARIABLE: str(self.marks.path)}

    def start(self) -> None:
        raise NotImplementedError

    def recovered(self, strike: Strike) -> dict[str, Any] | None:
        """The figures once every rank has completed a step after the fault; None until then."""
        raise NotImplementedError

    def tend(self, strike: Strike) -> None:
        """Do what somebody outside the job has to do after a fault (a relaunch). Called again and again."""

    def heal(self, strike: Strike) -> None:
        """Bring back what a fault has taken, once the job has recovered."""

    def differs(self, limit_s: float) -> str | None:
        """Wait for the job's end and compare it with an undisturbed run: "" if all values are equal, else where they
        part first. None of jobs that are not compared."""
        return None

    def gap_after(self, fault: str) -> int:
        """The fewest steps between the recovery from `fault` and the next fault."""
        return self.gap

    def stands(self) -> bool:
        """Everything is there that the job has when nothing has happened for a while (spares)."""
        return True

    def ended(self) -> bool:
        """No process can go on any more."""
        return all(code is not None for code in self.cluster.exit_codes())

    def victim(self, fault: str) -> int:
        """The node that is struck."""
        return 0 if fault == "first" else 2

    def rank_on(self, node: int) -> int:
        """The first rank that runs on `node`."""
        return node * self.setting.per_node

    # ---- the same for all

    def wait_until(self, step: int, limit_s: float) -> None:
        """Raises: TimeoutError if the job ended, or not every rank has completed `step` within `limit_s` and
        `step_limit_s` for each step that is left."""
        deadline = time.monotonic() + limit_s + self.step_limit_s * (step - self.completed())
        while time.monotonic() < deadline and not self.ended():
            if self.completed() >= step and self.stands():
                return
            time.sleep(0.1)
        raise TimeoutError(f"step {step} was not reached ({self.completed()}; ended: {self.ended()})")

    def completed(self) -> int:
        lines = self.marks.poll()
        for line in lines[self._counted :]:
            if line["kind"] == "step":
                self._newest[line["rank"]] = max(self._newest.get(line["rank"], 0), line["step"])
        self._counted = len(lines)
        return min(self._newest.values()) if len(self._newest) == self.setting.world else 0

    def strike(self, fault: str) -> Strike:
        node = self.victim(fault)
        if fault == "process":
            rank = self.rank_on(node)
            targets = {next(line["pid"] for line in reversed(self.marks.poll()) if line["rank"] == rank)}
        else:
            targets = self.of_node(node)
        strike = Strike(fault, node, time.time(), completed=self.completed())
        strike.time = time.time()
        number = signal.SIGSTOP if fault == "silent" else signal.SIGKILL
        while targets - strike.pids:
            for pid in targets - strike.pids:
                strike.pids.add(pid)
                _signal(pid, number)
            targets = set() if fault == "process" else self.of_node(node)
        return strike

    def of_node(self, node: int) -> set[int]:
        return {pid for pid, its in self.cluster.processes().items() if its == node}

    def close(self) -> None:
        self.cluster.close()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def after_restart(job: Job, strike: Strike) -> dict[str, Any] | None:
    """Figures of a system that starts the training function again: from the first life that all reach."""
    lines = [line for line in job.marks.poll() if line["time"] > strike.time and line["life"] > 0]
    for life in sorted({line["life"] for line in lines}):
        entered = {line["rank"]: line for line in lines if line["life"] == life and line["kind"] == "training"}
        firsts: dict[int, float] = {}
        for line in lines:
            if line["life"] == life and line["kind"] == "step":
                firsts.setdefault(line["rank"], line["time"])
        if len(firsts) == len(entered) == job.setting.world:
            restored = min(line["step"] for line in entered.values())
            return {
                "ready_s": max(line["time"] for line in entered.values()) - strike.time,
                "first_step_s": max(firsts.values()) - strike.time,
                "lost_steps": max(0, strike.completed - restored),
                "lives": life,
            }
    return None
