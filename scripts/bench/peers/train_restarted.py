"""The small GPT of train_gpt.py with its own checkpoints on disk: what is killed and relaunched.

Script, loop and checkpoints (`--save --load --ckpt-format torch`: torch.save, a file a rank) are train_gpt.py's own.
Added from outside: the benchmark's marks, and the store and time-out of process groups, which a restart may bring.
`train_nvrx.py` calls `run` again in the same process.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist
import train_gpt
from megatron.core import parallel_state

from bench.peers.marks import mark

TIMEOUT_S = float(os.environ.get("BENCH_GROUP_TIMEOUT_S", "0"))
"""Timeout of process groups; 0: torch's default of 30 minutes."""

_init_process_group = dist.init_process_group
_initialize_model_parallel = parallel_state.initialize_model_parallel
_load = train_gpt.checkpoint.Checkpoints.load


class Surroundings:
    """Facts of this start of the training function that train_gpt.py does not ask for."""

    life = 0
    store: Any = None


def init_process_group(*args: Any, **kwargs: Any) -> None:
    timeout = {"timeout": datetime.timedelta(seconds=TIMEOUT_S)} if TIMEOUT_S else {}
    _init_process_group(*args, store=Surroundings.store, **timeout, **kwargs)


def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
    timeout = {"distributed_timeout_minutes": TIMEOUT_S / 60} if TIMEOUT_S else {}
    _initialize_model_parallel(*args, **timeout, **kwargs)


def load(checkpoints: train_gpt.checkpoint.Checkpoints) -> int:
    """train_gpt.train calls it last before its first step."""
    done = _load(checkpoints)
    mark("training", dist.get_rank(), done, life=Surroundings.life)
    return done


def log_step(args: Any, step: int, duration_s: float, numbers: dict[str, float | None]) -> None:
    mark("step", dist.get_rank(), step, life=Surroundings.life, loss=numbers["loss"])


def run(life: int, store: Any = None) -> None:
    """Set up, restore the latest checkpoint if there is one, train to the end."""
    Surroundings.life, Surroundings.store = life, store
    dist.init_process_group = init_process_group
    parallel_state.initialize_model_parallel = initialize_model_parallel
    train_gpt.checkpoint.Checkpoints.load = load  # type: ignore[method-assign]
    train_gpt.log_step = log_step
    train_gpt.main()


if __name__ == "__main__":
    run(life=int(os.environ.get("BENCH_LIFE", "0")))
