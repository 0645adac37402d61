"""deadpool_plugin's side: the demonstration's cluster and script, figures from its event log and the common marks.

Variants: `default` (patience_s 10, nobody has rehearsed the node that is struck), `rehearsed` (a spare has: one spare
more stands by, so that it is not the first node), `tuned` (patience_s 5, against peers tuned to the same silence).
The first node is always the one that the first spare has rehearsed. `process` is struck the same in all variants.

Rules of this file: standard library only; the cluster is used through Cluster's own surface.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from clusters import demo_report
from clusters.events import Tail

from bench.peers.jobs import NODES, Job, Setting, Strike

HERE = Path(__file__).resolve().parent
PRELOAD = ["torch.distributed", "patches.cpu.applied", "megatron.core.models.gpt", "megatron.core.datasets.gpt_dataset"]
PHASES = {
    "unblock": "WorkerUnblocked",
    "groups": "GroupsRebuilt",
    "fetch": "SnapshotFetched",
    "restore": "StateRestored",
}
LOST = ("NodeLost", "RankLost")


class DeadpoolJob(Job):
    def __init__(self, setting: Setting, variant: str) -> None:
        self.spares = 2 if variant == "rehearsed" else 1
        self.nodes = NODES + self.spares
        super().__init__(setting, variant)
        self._output = setting.folder / "output"
        self._tail = Tail(self._output)

    def start(self) -> None:
        folder = self.setting.folder
        config = {
            "spares": self.spares,
            "patience_s": 5.0 if self.variant == "tuned" else 10.0,
            "secret_file": str(folder / "secret"),
            "output_dir": str(self._output),
            "interface_address": "127.0.0.1",
            "memory_headroom_gib": 0.25,
            "preload": PRELOAD,
        }
        secret = os.open(folder / "secret", os.O_CREAT | os.O_WRONLY, 0o600)
        os.write(secret, secrets.token_hex(32).encode())
        os.close(secret)
        lines = [f"{name}: {json.dumps(value)}\n" for name, value in config.items()]
        (folder / "deadpool.yaml").write_text("".join(lines))
        command = ["--module", "deadpool_plugin.run", str(HERE / "train_protected.py"), *self.setting.training_args]
        self.cluster.launch([*command, "--deadpool-config", str(folder / "deadpool.yaml")])

    def victim(self, fault: str) -> int:
        return 1 if self.variant == "rehearsed" and fault in ("node", "silent") else super().victim(fault)

    def stands(self) -> bool:
        self._tail.read()
        return len({event["spare"] for event in self._tail.of("SpareReady")}) == self.spares

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
            "lost_steps": max(0, strike.completed - plan["restore_step"]),
            "detect_s": lost and lost["time"] - strike.time,
            "plan_s": lost and plan["time"] - lost["time"],
            "step_s": first_step - ready,
            "rehearsed": self.variant == "rehearsed" or strike.fault == "first",
            "generations": max(event["generation"] for event in after),
        }
        for name, kind in PHASES.items():
            figures[f"{name}_s"] = demo_report.longest(demo_report.first_of_each_rank(after), kind)
        return figures

    def _first_steps(self, strike: Strike, resumed: dict[int, float]) -> dict[int, float]:
        """When each rank completed its first step after it was back; empty until all ranks are."""
        if len(resumed) < self.setting.world:
            return {}
        stepped: dict[int, float] = {}
        for line in self.marks.poll():
            if line["time"] >= resumed[line["rank"]] and line["pid"] not in strike.pids:
                stepped.setdefault(line["rank"], line["time"])
        return stepped
