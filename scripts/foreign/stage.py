"""stage.py [--no_local_rank] SCRIPT ARGUMENTS: an unedited script that trains with DeepSpeed, without GPU and hub.

Rules of this file: the script is run as it is. What it finds around it (data sets, metrics, torchvision) is a stand-in
from material.py; what it does is only looked at: every rank prints the exact numbers of each step and, after the last,
digests of its parameters and optimizer state, in the lines that compare_runs.py reads. `--no_local_rank` is what the
deepspeed launcher calls it: the script is not given a --local_rank.
"""

# ruff: noqa: E402 (the CPU is chosen before DeepSpeed is imported)
from __future__ import annotations

import functools
import os
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NO_LOCAL_RANK = "--no_local_rank"
SCRIPTS = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(SCRIPTS.parent), str(SCRIPTS)]

from patches.cpu import deepspeed as deepspeed_on_cpu

deepspeed_on_cpu.apply()

import deepspeed
import torch
from gpt.output import digest, write_line, write_metrics
from train_deepspeed import model_tensors, optimizer_tensors

from foreign import material


class Watch:
    """The engine that the script makes, and the losses since its newest update."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.losses: list[float] = []
        original = deepspeed.initialize

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.look_at(result[0])
            return result

        deepspeed.initialize = initialize

    def look_at(self, engine: Any) -> None:
        self.engine = engine
        _after(engine, "backward", lambda value, loss, *_, **__: self.losses.append(float(loss)))
        if hasattr(engine, "train_batch"):
            _after(engine, "train_batch", lambda value, *_, **__: self._stepped(engine, [float(value)]))
        else:
            _after(engine, "step", lambda value, *_, **__: self._stepped(engine, self.losses))

    def _stepped(self, engine: Any, losses: list[float]) -> None:
        if engine.micro_steps % engine.gradient_accumulation_steps() and not hasattr(engine, "train_batch"):
            return
        norm, rate = engine.get_global_grad_norm(), engine.get_lr()
        numbers = {"loss": sum(losses) / len(losses) if losses else None, "lr": rate[0] if rate else None}
        write_metrics(int(os.environ["RANK"]), engine.global_steps, {**numbers, "grad_norm": norm})
        self.losses.clear()

    def report(self) -> None:
        parameters, state = digest(model_tensors(self.engine)), digest(optimizer_tensors(self.engine))
        write_line("digest", {"rank": int(os.environ["RANK"]), "parameters": parameters, "optimizer": state})


def _after(owner: Any, name: str, look: Callable[..., None]) -> None:
    """`look` gets the result and the arguments of each call of `owner.name`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        value = original(*args, **kwargs)
        look(value, *args, **kwargs)
        return value

    setattr(owner, name, method)


def main() -> None:
    words = sys.argv[1:]
    if words[0] == NO_LOCAL_RANK:
        words = [word for word in words[1:] if not word.startswith("--local_rank")]
    script = Path(words[0]).resolve()
    torch.set_num_threads(1)
    torch.manual_seed(7)  # TRL draws the first weights of LoRA before it seeds, and torch begins at random
    random.seed(7)
    material.stand_in()
    watch = Watch()
    sys.argv = words
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    watch.report()


if __name__ == "__main__":
    main()
