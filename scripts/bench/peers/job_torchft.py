"""torchft: a lost replica is started again at once; for a silent one, when the lighthouse's heartbeat time-out is over.

`tuned`: that replica has imported everything before. `spare`: see train_torchft.py; a lost replica comes back only when
the job has recovered.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from clusters.launched import free_port

from bench.peers.jobs import NODES, Setting, Strike
from bench.peers.theirs import OUTSIDE, PeerJob, all_stand_by

STRUCK = (0, 2)
"""The replicas that faults strike: the first node's, and the one of every other fault."""


class TorchftJob(PeerJob):
    """One replica a node; `_lives`: how often each has been started again."""

    nodes = NODES
    heals = True

    def __init__(self, setting: Setting, variant: str) -> None:
        self.nodes = NODES + 1 if variant == "spare" else NODES
        super().__init__(setting, variant)
        self._heartbeat_s = 5.0 if variant == "defaults" else 1.5

    def more_args(self) -> list[str]:
        return []

    def start(self) -> None:
        port = free_port()
        lighthouse = [str(self.setting.python.with_name("torchft_lighthouse")), "--bind", f"127.0.0.1:{port}"]
        lighthouse += ["--min_replicas", str(NODES if self.variant == "spare" else 1)]
        if self.variant != "defaults":
            lighthouse += ["--heartbeat_timeout_ms", "1500", "--join_timeout_ms", "10000"]
        self.cluster.extra |= {
            "BENCH_TORCHFT": self.variant,
            "BENCH_ACTIVE": str(NODES),
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        }
        self.cluster.start(OUTSIDE, lighthouse)
        self._lives = dict.fromkeys(range(self.nodes), 0)
        self._before, self._idle = dict(self._lives), set[int]()
        for node in range(self.nodes):
            self._start_replica(node, 0)
        self._stand_by(*STRUCK)

    def _start_replica(self, node: int, life: int, *options: str) -> None:
        self.cluster.extra |= {"BENCH_LIFE": str(life), "BENCH_REPLICA": str(node)}
        words = [*self.logs(life * 10 + node), "--preload", "torchft", *options]
        self.start_node(self._where(node, life), [0], 1, free_port(), "train_torchft.py", *words)

    def _where(self, node: int, life: int) -> int:
        """The node number that faults find it by."""
        return life * (OUTSIDE + 1) + node

    def _stand_by(self, *nodes: int) -> None:
        for node in nodes if self.variant == "tuned" else ():
            life = self._lives[node] + 1
            self._start_replica(node, life, "--go", str(self._go(node, life)))

    def _go(self, node: int, life: int) -> Path:
        return self.setting.folder / f"go{node}-{life}"

    def stands(self) -> bool:
        """Those that are to take a lost one's place stand by; with `spare` all replicas make steps."""
        if self.variant == "tuned":
            return all(all_stand_by(self._go(node, self._lives[node] + 1), 1) for node in STRUCK)
        return self.variant != "spare" or all(self._newest(node) is not None for node in self._lives)

    def _newest(self, node: int) -> dict[str, Any] | None:
        """The newest step of a replica in its newest life."""
        mine = (line for line in reversed(self.marks.poll()) if line["rank"] == node and line["kind"] == "step")
        return next((line for line in mine if line["life"] == self._lives[node]), None)

    def victim(self, fault: str) -> int:
        node = STRUCK[fault != "first"]
        return self._where(node, self._lives[node])

    def rank_on(self, node: int) -> int:
        return node % (OUTSIDE + 1)

    def strike(self, fault: str) -> Strike:
        newest = {node: self._newest(node) for node in self._lives}
        self._before = dict(self._lives)
        self._idle = {node for node, line in newest.items() if line is not None and not line["participates"]}
        return super().strike(fault)

    def tend(self, strike: Strike) -> None:
        waited = strike.fault != "silent" or time.time() > strike.time + self._heartbeat_s
        if self.variant != "spare" and waited and self._lives == self._before:
            self._start_again(strike)

    def _start_again(self, strike: Strike) -> None:
        node = self.rank_on(strike.node)
        self._lives[node] += 1
        if self.variant == "tuned":
            self._go(node, self._lives[node]).touch()
        else:
            self._start_replica(node, self._lives[node])

    def heal(self, strike: Strike) -> None:
        self.kill_rest(strike.node)
        if self.variant == "spare":
            self._start_again(strike)
        else:
            self._stand_by(self.rank_on(strike.node))

    def completed(self) -> int:
        """The newest step committed by all replicas that take part."""
        steps = [line["step"] for line in self.marks.poll() if line["kind"] == "step" and line["replicas"] == NODES]
        return max(steps, default=0)

    def recovered(self, strike: Strike) -> dict[str, Any] | None:
        """first_step_s: NODES replicas have committed a step; ready_s: began it; survivors_s: some have committed one.
        skipped_steps: discarded ones, whose samples are not trained on again.

        A step that was nearly over when the fault came may still be committed after it: a step counts once one has been
        discarded, or fewer replicas are said to take part, or a newcomer does.
        """
        lines = [line for line in self.marks.poll() if line["time"] > strike.time and line["pid"] not in strike.pids]
        troubled = next((n for n, line in enumerate(lines) if self._is_troubled(line)), None)
        if troubled is None:
            return None
        later = [line for line in lines[troubled:] if line["kind"] == "step"]
        survivors = next((line["time"] for line in later), None)
        whole: dict[int, float] = {}
        for line in later:
            if line["replicas"] == NODES and line["participates"]:
                whole.setdefault(line["rank"], line["time"])
        if len(whole) < NODES or survivors is None:
            return None
        before: dict[int, list[dict[str, Any]]] = {}
        for line in self.marks.lines:
            before.setdefault(line["rank"], []).append(line)
        discarded = {line["step"] for line in lines if line["kind"] == "discarded"}
        began = [max(line["time"] for line in before[rank] if line["time"] < end) for rank, end in whole.items()]
        return {
            "ready_s": max(0.0, max(began) - strike.time),
            "first_step_s": max(whole.values()) - strike.time,
            "survivors_s": survivors - strike.time,
            "lost_steps": 0,
            "skipped_steps": len(discarded),
        }

    def _is_troubled(self, line: dict[str, Any]) -> bool:
        if line["kind"] == "discarded":
            return True
        if line["kind"] != "step":  # a replica that is started again says first that it is in training
            return False
        fewer_or_new = line["replicas"] != NODES or line["life"] > self._before[line["rank"]]
        return bool(fewer_or_new or (line["rank"] in self._idle and line["participates"]))

    def ended(self) -> bool:
        return sum(process.poll() is None for process in self.cluster.launchers[1:]) == 0
