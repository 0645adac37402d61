"""A DeepSpeed script of very short steps, without an end: what matters of a job of months is their number.

Rules of this file: the loop of a user, with one call of the plugin's, which makes a step one call.
"""

# ruff: noqa: E402 (the CPU is chosen before DeepSpeed is imported)
from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
warnings.filterwarnings("ignore")

import torch

from patches.cpu import deepspeed as deepspeed_on_cpu

deepspeed_on_cpu.apply()

import deepspeed

import deadpool_plugin

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 10**9,
}


@deadpool_plugin.step
def step(engine: Any) -> float:
    """One iteration on numbers that are drawn in it."""
    loss = engine(torch.randn(4, 8)).pow(2).mean()
    engine.backward(loss)
    engine.step()
    return float(loss)


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(int(os.environ["RANK"]))
    model = torch.nn.Linear(8, 8)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), config=CONFIG
    )
    while True:
        step(engine)


if __name__ == "__main__":
    main()
