"""deadpool_plugin's side: the demonstration's cluster and script, figures from its event log and the common marks.

Variants: `default` (patience_s 10; nobody has rehearsed the node that is struck, but for the first node), `tuned`
(patience_s 1.5, as torchft's tuned heart beats; two spares, and it is a rehearsed node that is struck, not the first).
A host that was lost comes back as another one, by `deadpool join`, and stands by. StartupJob takes long to its first
step, and is struck late.

Rules of this file: standard library only; the cluster is used through Cluster's own surface.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import compare_runs
from clusters import demo_report, references
from clusters.demo_jobs import JOBS
from clusters.events import Tail
from clusters.launched import configure

from bench.peers.jobs import NODES, Job, Setting, Strike

HERE = Path(__file__).resolve().parent
PHASES = {
    "unblock": "WorkerUnblocked",
    "groups": "GroupsRebuilt",
    "fetch": "SnapshotFetched",
    "restore": "StateRestored",
}
LOST = ("NodeLost", "RankLost")
VARIANTS = {"default": (1, 10.0), "tuned": (2, 1.5), "two spares": (2, 10.0)}
"""Spares and patience_s of each."""


STEP_S = 0.08
"""A step of the layout `dp8` takes no fewer seconds under the plugin on two cores: it uses 0.26 s of CPU time, of all
processes, measured."""


def name_of(pid: int) -> str:
    """Return "agent", "rank3", "spare3" (which rehearses that rank, has rehearsed it or has taken it over) or ""."""
    with contextlib.suppress(OSError):  # it has ended
        if b"deadpool_plugin.launch.agent" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return "agent"
        head, _, name = Path(f"/proc/{pid}/comm").read_text().strip().partition("python-")
        return name if not head and name.startswith(("rank", "spare")) else ""
    return ""


class DeadpoolJob(Job):
    runs = dict.fromkeys(("first", "node", "process", "silent"), 10)
    """How often each fault is measured, unless --runs says so."""
    heals = True
    one_first = True
    script = "train_protected.py"
    preload = list(JOBS["megatron"].preload)
    trains = "train_gpt"
    """Name of the training script that `script` runs."""
    loads = 0
    """Steps that the script loads from a checkpoint: the plugin counts from there."""

    def __init__(self, setting: Setting, variant: str) -> None:
        self.spares, self.patience_s = VARIANTS[variant]
        self.nodes = NODES + self.spares
        super().__init__(setting, variant)
        self.cluster.extra |= {"BENCH_SCRIPT": self.trains}
        self._config = setting.folder / "deadpool.yaml"
        self._output = setting.folder / "output"
        self._tail = Tail(self._output, recurring=False)

    def start(self) -> None:
        configure(
            self._config, self._output, spares=self.spares, patience_s=self.patience_s, preload=self.preload,
            restarts_max=1000,
        )  # fmt: skip
        command = ["--module", "deadpool_plugin.run", str(HERE / self.script), *self.setting.training_args]
        self.cluster.launch([*command, *self.more_args(), "--deadpool-config", str(self._config)])

    def more_args(self) -> list[str]:
        return []

    def heal(self, strike: Strike) -> None:
        if strike.fault == "process":
            return
        for pid in self.of_node(strike.node):  # of a node that was only silent
            os.kill(pid, signal.SIGKILL)
        words = [sys.executable, "-m", "deadpool_plugin", "join", "--job", str(self._output)]
        self.cluster.start(self.nodes, [*words, "--deadpool-config", str(self._config)])
        self.nodes += 1

    def victim(self, fault: str) -> int:
        """The first node that has ranks, or one of the others that the variant means."""
        nodes = list(dict.fromkeys(self._node_of()))
        if fault == "first":
            return nodes[0]
        rehearsed = {event["spare"]: event["ranks"] for event in self._tail.of("SpareReady")}
        gone = {node for event in self._tail.of("NodeLost") for node in event["lost"]}
        known = {self._node_of()[rank] for spare in rehearsed.keys() - gone - {*nodes} for rank in rehearsed[spare]}
        wanted = [node for node in nodes[1:] if (node in known) == (self.variant == "tuned")]
        return wanted[len(wanted) // 2]

    def rank_on(self, node: int) -> int:
        return self._node_of().index(node)

    def _node_of(self) -> list[int]:
        """Rank -> node, after all swaps so far."""
        world = list(self._tail.of("WorldFormed")[0]["node_of"])
        for plan in self._tail.of("SwapPlanned"):
            world = [int(plan["takers"].get(str(node), node)) for node in world]
        return world

    def stands(self) -> bool:
        self._tail.read()
        return self._tail.spares_ready() == self.spares and self._tail.mirrored

    def ended(self) -> bool:
        return bool(self._tail.of("JobStopped")) or super().ended()

    def recovered(self, strike: Strike) -> dict[str, Any] | None:
        self._tail.read()
        after = [event for event in self._tail.events if event["time"] >= strike.time]
        plan = next((event for event in after if event["event"] == "SwapPlanned"), None)
        lost = next((event for event in after if event["event"] in LOST), None)
        if plan is None:
            return None
        generation = demo_report.plan_generation(plan, after)
        mine = demo_report.first_of_each_rank([event for event in after if event["generation"] >= generation])
        resumed = {event["rank"]: event["time"] for event in mine if event["event"] == "WorkerResumed"}
        stepped = self._first_steps(strike, resumed)
        if len(stepped) < self.setting.world:
            return None
        ready, first_step = max(resumed.values()), max(stepped.values())
        figures: dict[str, Any] = {
            "ready_s": ready - strike.time,
            "first_step_s": first_step - strike.time,
            "lost_steps": max(0, strike.completed - self.loads - plan["restore_step"]),
            "detect_s": lost and lost["time"] - strike.time,
            "plan_s": lost and plan["time"] - lost["time"],
            "step_s": first_step - ready,
            "covered": demo_report.covered(mine),
            "swaps": len({event["generation"] for event in after if event["event"] == "WorkerResumed"}),
        }
        for name, kind in PHASES.items():
            figures[f"{name}_s"] = demo_report.longest(demo_report.first_of_each_rank(after), kind)
        return figures

    def _first_steps(self, strike: Strike, resumed: dict[int, float]) -> dict[int, float]:
        """When each rank completed its first step after it was back; empty until all ranks are."""
        if len(resumed) < self.setting.world:
            return {}
        stepped: dict[int, float] = {}
        for line in reversed(self.marks.poll()):
            if line["time"] < strike.time:
                break
            if line["time"] >= resumed[line["rank"]] and line["pid"] not in strike.pids:
                stepped[line["rank"]] = line["time"]
        return stepped


class StartupJob(DeadpoolJob):
    """A job whose script takes `startup_s` to its first step, and that is struck after `past_steps` steps.

    Three quarters of the start-up are a checkpoint's tensors, which are read slowly. The holders of two ranks each are
    struck in turn: the nodes that the job began with, or the hosts that have taken over from them. After a node's loss
    its successor has the time to go through the start of every host's script, one after another. The job ends by
    itself. Then every value is compared with that of a run without faults and without the slow start.
    """

    per_job, loads = 20, 10
    runs = {"node": 3 * NODES, "process": 2 * NODES}

    def __init__(self, setting: Setting, variant: str) -> None:
        super().__init__(setting, variant)
        self.first_step, self.gap = setting.past_steps, math.ceil(NODES * setting.startup_s / STEP_S)
        self._steps = setting.past_steps + sum((self.gap_after(fault) + 20) * n for fault, n in self.runs.items())

    def gap_after(self, fault: str) -> int:
        """After a process almost none: the spare keeps all that it has rehearsed."""
        return Job.gap if fault == "process" else self.gap

    def more_args(self) -> list[str]:
        load_s = 0.75 * self.setting.startup_s
        slow = ["--startup-s", str(self.setting.startup_s - load_s), "--load-s", str(load_s)]
        return ["--train-iters", str(self._steps), *self._same(), *slow]

    def _same(self) -> list[str]:
        """Words that the undisturbed run has, too."""
        saved = self._undisturbed("--save", "{folder}/saved", "--exit-interval", str(self.loads)) / "saved"
        return ["--load", str(saved), "--log-all-ranks", "--digest"]

    def _undisturbed(self, *words: str) -> Path:
        """Return the folder of a run without the plugin, made now unless there is one."""
        words = (*self.setting.training_args, "--train-iters", str(self._steps), *words)
        return references.reference(references.DATA / "reference", [*words], self.setting.world, deadline_s=86400.0)

    def victim(self, fault: str) -> int:
        return self._node_of()[self.number % NODES * self.setting.per_node]

    def differs(self, limit_s: float) -> str:
        deadline = time.monotonic() + limit_s + self.step_limit_s * (self._steps - self.completed())
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(0.5)
        self.close()
        return compare_runs.compare(self._undisturbed(*self._same()), self._output)["difference"] or ""


class EngineJob(DeadpoolJob):
    """The same with an engine of DeepSpeed."""

    preload = ["torch.distributed", "patches.cpu.applied_to_deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"]
    trains = "train_deepspeed"
