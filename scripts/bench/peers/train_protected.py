"""The training script that BENCH_SCRIPT names as it is, for the plugin's runs, with the benchmark's marks: one line of
output more per step.

The plugin is not mentioned but for one thing: a spare that rehearses or follows runs this loop too, and its steps are
nobody's steps.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist

import deadpool_plugin
from bench.peers.marks import mark


def log_step(args: Any, step: int, duration_s: float, numbers: dict[str, float | None]) -> None:
    plain(args, step, duration_s, numbers)
    if not deadpool_plugin.is_rehearsal():
        mark("step", dist.get_rank(), step, loss=numbers["loss"])


script = importlib.import_module(os.environ["BENCH_SCRIPT"])
plain, script.log_step = script.log_step, log_step

if __name__ == "__main__":
    script.main()
