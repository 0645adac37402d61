"""Megatron-LM's unedited pretrain_gpt.py: under the plugin, and under its own --inprocess-restart (NVRx).

Both sides run `pretrain_marked.py CHECKOUT/pretrain_gpt.py` with the same arguments; the peer's have checkpoints, too.
Its variants: `defaults`, Megatron-LM's own intervals; `tuned`, those of train_nvrx.py as far as Megatron-LM has options
for them, and its abort of gloo (there is no option for stores outside of the first node).
"""

from __future__ import annotations

import os

from clusters.launched import REPOSITORY

from bench.peers.job_nvrx import NvrxJob
from bench.peers.jobs import Setting
from bench.peers.ours import DeadpoolJob
from bench.peers.theirs import CHECKPOINT_STEPS

MARKED = "pretrain_marked.py"
TUNED = """
    --inprocess-monitor-thread-interval 0.1 --inprocess-monitor-process-interval 0.1
    --inprocess-progress-watchdog-interval 0.1 --inprocess-heartbeat-interval 0.25 --inprocess-heartbeat-timeout 5
    --inprocess-last-call-wait 0.1 --inprocess-soft-timeout 10 --inprocess-hard-timeout 15
    --inprocess-termination-grace-time 0.5 --inprocess-barrier-timeout 60 --inprocess-completion-timeout 60
    --distributed-timeout-minutes 1
"""


def environment(setting: Setting) -> dict[str, str]:
    """Return the variables that all processes need to find Megatron-LM, and to run it without a GPU."""
    paths = [str(setting.checkout), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


class PretrainJob(DeadpoolJob):
    script = MARKED
    preload = ["patches.cpu.applied_to_megatron_lm"]

    def __init__(self, setting: Setting, variant: str) -> None:
        super().__init__(setting, variant)
        self.cluster.extra |= environment(setting)


class InprocessRestartJob(NvrxJob):
    script = MARKED
    preload = [*PretrainJob.preload, *NvrxJob.preload]

    def start(self) -> None:
        self.cluster.extra |= environment(self.setting) | {"TORCH_CPP_LOG_LEVEL": "error", "BENCH_NVRX": self.variant}
        self.start_nodes()

    def more_args(self) -> list[str]:
        folder = str(self.setting.folder / "checkpoints")
        words = ["--save", folder, "--load", folder, "--save-interval", str(CHECKPOINT_STEPS)]
        words += ["--inprocess-restart", "--inprocess-granularity", "rank"]
        words += ["--inprocess-active-world-size", str(self.setting.world)]
        return [*words, *(TUNED.split() if self.variant == "tuned" else [])]
