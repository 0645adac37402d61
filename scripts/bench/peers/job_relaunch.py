"""Kill what is left, and start the job again from its newest checkpoint on disk.

`defaults` starts the interpreter anew on all nodes. `tuned`: interpreters that have imported everything stand by on all
nodes, and process groups give up after 10 s instead of 30 min (the only end of a silent peer).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from clusters.launched import free_port

from bench.peers.jobs import NODES, Strike, after_restart
from bench.peers.theirs import PeerJob, all_stand_by


class RelaunchJob(PeerJob):
    """Launched again after each fault, as another life of the job."""

    nodes = NODES
    heals = True

    def start(self) -> None:
        self.cluster.extra["BENCH_GROUP_TIMEOUT_S"] = "10" if self.variant == "tuned" else "0"
        self._life, self._struck, self._noticed = 0, -1, 0.0
        self._launched = {0: self._launch(0)}
        self._stand_by()

    def _launch(self, life: int) -> list[Any]:
        self.cluster.extra["BENCH_LIFE"] = str(life)
        port, before = free_port(), len(self.cluster.launchers)
        waits = ["--go", str(self._go(life))] if life and self.variant == "tuned" else []
        for node in range(NODES):
            words = [*self.logs(life), "--until-first", *waits]
            ranks, where = self.ranks_of(node), life * NODES + node
            self.start_node(where, ranks, self.setting.world, port, "train_restarted.py", *words)
        return self.cluster.launchers[before:]

    def _stand_by(self) -> None:
        if self.variant == "tuned":
            self._launched[self._life + 1] = self._launch(self._life + 1)

    def _go(self, life: int) -> Path:
        return self.setting.folder / f"go{life}"

    def stands(self) -> bool:
        return self.variant != "tuned" or all_stand_by(self._go(self._life + 1), NODES)

    def victim(self, fault: str) -> int:
        return self._life * NODES + super().victim(fault)

    def rank_on(self, node: int) -> int:
        return super().rank_on(node % NODES)

    def strike(self, fault: str) -> Strike:
        self._struck = self._life
        return super().strike(fault)

    def tend(self, strike: Strike) -> None:
        if self._life > self._struck or not self._has_ended():
            return
        for node in range(NODES):
            self.kill_rest(self._life * NODES + node)
        self._life, self._noticed = self._life + 1, time.time()
        if self.variant == "tuned":
            self._go(self._life).touch()
        else:
            self._launched[self._life] = self._launch(self._life)

    def heal(self, strike: Strike) -> None:
        self._stand_by()

    def recovered(self, strike: Strike) -> dict[str, Any] | None:
        found = after_restart(self, strike)
        return found and found | {"detect_s": self._noticed - strike.time}

    def ended(self) -> bool:
        return self._life > self._struck and self._has_ended()

    def _has_ended(self) -> bool:
        return any(process.poll() is not None for process in self._launched[self._life])
