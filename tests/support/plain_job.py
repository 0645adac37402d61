"""A training script without the plugin, one forked process a rank."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.forked import Fleet


def nothing() -> None:
    """Nothing has to be done in a rank's process before its script begins."""


def run(argv: list[str], world_size: int, folder: Path, before_script: Callable[[], None] = nothing) -> None:
    """All ranks, to their end. Output goes to `folder`/rank<r>.log."""
    with Fleet(deadline_s=120) as fleet:
        ranks = [fleet.fork(_run_rank, rank, world_size, argv, folder, before_script) for rank in range(world_size)]
        fleet.values(ranks)


def _run_rank(rank: int, world_size: int, argv: list[str], folder: Path, before_script: Callable[[], None]) -> None:
    """Run `argv` as `__main__`; ranks meet in a file."""
    import torch.distributed as dist

    before_script()
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    original = dist.init_process_group

    def init_process_group(backend: str | None = None, **kwargs: Any) -> None:
        original(backend, init_method=f"file://{folder / 'store'}", rank=rank, world_size=world_size)

    dist.init_process_group = init_process_group  # type: ignore[assignment]  # scripts give the rest by name
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
    sys.stdout.flush()
