"""The peers' side: NVRx, torchft, and plain kill-and-relaunch, each with the defaults and tuned as its script says.

All start their processes through `node.py` and Cluster.start, with as many nodes as the plugin's job has. What a real
operator would need time for is done here at once, in the peers' favour: a relaunch begins as soon as the first process
has been seen to end (looked for every 50 ms; the plugin's loop has the same), on a node that is there.

relaunch: `defaults` starts the interpreter anew on all nodes. `tuned`: interpreters that have imported everything stand
by on all nodes, and process groups give up after 10 s instead of 30 min (the only end of a silent peer).
torchft: a lost replica is started again at once; for a silent one, when the lighthouse's heartbeat time-out is over.
`tuned`: that replica has imported everything before. `spare`: see train_torchft.py; nobody is started again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from clusters.launched import free_port

from bench.peers.jobs import NODES, Job, Setting, Strike, after_restart

HERE = Path(__file__).resolve().parent
CHECKPOINT_STEPS = 10
OUTSIDE = 99
"""Node number of what runs on none of the job's nodes (a lighthouse, a store)."""


class PeerJob(Job):
    """Starts nodes by node.py in the peers' environment."""

    def start_node(self, node: int, ranks: list[int], world: int, port: int, script: str, *options: str) -> None:
        words = [str(self.setting.python), "-W", "ignore", str(HERE / "node.py")]
        words += ["--ranks", ",".join(map(str, ranks)), "--world", str(world), "--port", str(port), *options]
        self.cluster.start(node, [*words, "--", str(HERE / script), *self.setting.training_args, *self.more_args()])

    def more_args(self) -> list[str]:
        """Checkpoints, for systems that go back to one."""
        folder = str(self.setting.folder / "checkpoints")
        return ["--save", folder, "--load", folder, "--ckpt-format", "torch", "--save-interval", str(CHECKPOINT_STEPS)]

    def logs(self, life: int) -> list[str]:
        return ["--logs", str(self.setting.folder / f"logs{life}")]

    def ranks_of(self, node: int) -> list[int]:
        return list(range(node * self.setting.per_node, (node + 1) * self.setting.per_node))


class NvrxJob(PeerJob):
    def start(self) -> None:
        ports = [free_port(), free_port()]
        self.cluster.extra |= {
            "BENCH_NVRX": self.variant,
            "TORCH_CPP_LOG_LEVEL": "error",
            "BENCH_ACTIVE": str(self.setting.world),
            "BENCH_PER_NODE": str(self.setting.per_node),
            "BENCH_PORTS": ",".join(map(str, ports)),
            "BENCH_FOLDER": str(self.setting.folder),
            "BENCH_GROUP_TIMEOUT_S": "10" if self.variant == "tuned" else "0",
        }
        if self.variant == "tuned":
            self.cluster.start(OUTSIDE, [str(self.setting.python), str(HERE / "store_host.py"), *map(str, ports)])
        world, port = self.nodes * self.setting.per_node, free_port()
        for node in range(self.nodes):
            preload = ["--preload", "nvidia_resiliency_ext.inprocess"]
            self.start_node(node, self.ranks_of(node), world, port, "train_nvrx.py", *self.logs(0), *preload)

    def recovered(self, strike: Strike) -> dict[str, Any] | None:
        return after_restart(self, strike)

    def ended(self) -> bool:
        """Monitor processes may outlive their ranks; a job without as many nodes as it needs cannot go on."""
        alive = [code is None for code in self.cluster.exit_codes()[-self.nodes :]]
        return sum(alive) < NODES


class RelaunchJob(PeerJob):
    nodes = NODES

    def start(self) -> None:
        self.cluster.extra |= {
            "BENCH_GROUP_TIMEOUT_S": "10" if self.variant == "tuned" else "0",
        }
        self._go = self.setting.folder / "go"
        self._first = self._start_life(0)
        self._second = self._start_life(1, "--go", str(self._go)) if self.variant == "tuned" else []
        self._relaunched = False

    def _start_life(self, life: int, *options: str) -> list[Any]:
        self.cluster.extra["BENCH_LIFE"] = str(life)
        port, before = free_port(), len(self.cluster.launchers)
        for node in range(self.nodes):
            ranks, where = self.ranks_of(node), node if life == 0 else NODES + node
            words = [*self.logs(life), "--until-first", *options]
            self.start_node(where, ranks, self.setting.world, port, "train_restarted.py", *words)
        return self.cluster.launchers[before:]

    def tend(self, strike: Strike) -> None:
        if self._relaunched or all(process.poll() is None for process in self._first):
            return
        for node in range(NODES):
            for pid in self.of_node(node):
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
        self._relaunched, self.noticed = True, time.time()
        if self.variant == "tuned":
            self._go.touch()
        else:
            self._second = self._start_life(1)

    def recovered(self, strike: Strike) -> dict[str, Any] | None:
        found = after_restart(self, strike)
        return found and found | {"detect_s": self.noticed - strike.time}

    def ended(self) -> bool:
        return bool(self._relaunched) and any(process.poll() is not None for process in self._second)


class TorchftJob(PeerJob):
    nodes = NODES

    def __init__(self, setting: Setting, variant: str) -> None:
        self.nodes = NODES + 1 if variant == "spare" else NODES
        super().__init__(setting, variant)
        self._replaced = False
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
        self._go = self.setting.folder / "go"
        for node in range(self.nodes):
            self._start_replica(node, 0)
        if self.variant == "tuned":
            self._start_replica(2, 1, "--go", str(self._go))  # stands by with a node number that faults do not find

    def _start_replica(self, node: int, life: int, *options: str) -> None:
        self.cluster.extra |= {"BENCH_LIFE": str(life), "BENCH_REPLICA": str(node)}
        where = node if life == 0 else NODES + 1 + node
        words = [*self.logs(life * 10 + node), "--preload", "torchft", *options]
        self.start_node(where, [0], 1, free_port(), "train_torchft.py", *words)

    def tend(self, strike: Strike) -> None:
        waited = strike.fault != "silent" or time.time() > strike.time + self._heartbeat_s
        if self._replaced or self.variant == "spare" or not waited:
            return
        self._replaced = True
        if self.variant == "tuned" and strike.fault != "first":
            self._go.touch()
        else:
            self._start_replica(strike.node, 1)

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
        troubled = next((n for n, line in enumerate(lines) if _troubled(line, strike)), None)
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

    def ended(self) -> bool:
        return sum(process.poll() is None for process in self.cluster.launchers[1:]) == 0


def _troubled(line: dict[str, Any], strike: Strike) -> bool:
    if line["kind"] == "discarded":
        return True
    if line["kind"] != "step":  # a replica that is started again says first that it is in training
        return False
    fewer_or_new = line["replicas"] != NODES or line["life"] > 0
    return bool(fewer_or_new or (line["rank"] == NODES and line["participates"]))


JOBS: dict[str, type[Job]] = {"nvrx": NvrxJob, "relaunch": RelaunchJob, "torchft": TorchftJob}
