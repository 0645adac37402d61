"""NVIDIA resiliency extension's in-process restart; its settings: train_nvrx.py. A lost rank does not come back."""

from __future__ import annotations

from typing import Any

from clusters.launched import free_port

from bench.peers.jobs import NODES, Strike, after_restart
from bench.peers.theirs import HERE, OUTSIDE, PeerJob


class NvrxJob(PeerJob):
    script = "train_nvrx.py"
    preload = ["nvidia_resiliency_ext.inprocess"]

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
        self.start_nodes()

    def start_nodes(self) -> None:
        world, port = self.nodes * self.setting.per_node, free_port()
        preload = [word for name in self.preload for word in ("--preload", name)]
        for node in range(self.nodes):
            self.start_node(node, self.ranks_of(node), world, port, self.script, *self.logs(0), *preload)

    def recovered(self, strike: Strike) -> dict[str, Any] | None:
        return after_restart(self, strike)

    def ended(self) -> bool:
        """Monitor processes may outlive their ranks; a job without as many nodes as it needs cannot go on."""
        alive = [code is None for code in self.cluster.exit_codes()[-self.nodes :]]
        return sum(alive) < NODES
