"""Common parts of the peers' jobs: NVRx's (job_nvrx.py), torchft's (job_torchft.py), relaunches (job_relaunch.py);
each with its defaults and tuned as its script says.

All start their processes through `node.py` and Cluster.start, with as many nodes as the plugin's job has. What a real
operator would need time for is done here at once, in the peers' favour: a relaunch begins as soon as the first process
has been seen to end (looked for every 50 ms; the plugin's loop has the same), on a node that is there. Relaunched jobs
and torchft's are struck again once they are whole again; NVRx's ranks do not come back.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from bench.peers.jobs import Job

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

    def kill_rest(self, node: int) -> None:
        """Whatever still runs of a node, or stands still."""
        for pid in self.of_node(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def all_stand_by(go: Path, nodes: int) -> bool:
    """Return whether `nodes` nodes have imported everything and wait for the file `go` (node.py)."""
    return len(list(go.parent.glob(f"{go.name}.*"))) == nodes
