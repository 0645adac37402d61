"""A training script without the plugin, one forked process a rank."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from support.forked import Fleet


def run(argv: list[str], world_size: int, folder: Path) -> None:
    """All ranks, to their end. Output goes to `folder`/rank<r>.log."""
    store = folder / "store"
    with Fleet(deadline_s=120) as fleet:
        ranks = [fleet.fork(run_rank, rank, world_size, argv, str(store), str(folder)) for rank in range(world_size)]
        fleet.values(ranks)


def run_rank(rank: int, world_size: int, argv: list[str], store: str, folder: str) -> None:
    """Run `argv` as `__main__`; ranks meet in a file; output goes to `folder`/rank<r>.log."""
    import torch.distributed as dist

    log = os.open(Path(folder) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    original = dist.init_process_group

    def init_process_group(backend, **kwargs):
        original(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)

    dist.init_process_group = init_process_group
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
    sys.stdout.flush()
