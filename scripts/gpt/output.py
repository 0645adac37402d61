"""Output of the training scripts: a line per step, and digests of the state at the end.

Rules of this file: torch only; values are exact for programs and rounded for people.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def log_step(args: argparse.Namespace, step: int, duration_s: float, numbers: dict[str, Any]) -> None:
    """Every rank for programs, exactly; rank 0 for people."""
    if args.log_all_ranks:
        write_metrics(dist.get_rank(), step, numbers)
    if dist.get_rank() == 0:
        known = " | ".join(f"{name} {value:.5g}" for name, value in numbers.items() if value is not None)
        print(f"step {step:4d}/{args.train_iters} | {known} | {1e3 * duration_s:.0f} ms", flush=True)


def write_metrics(rank: int, step: int, numbers: dict[str, Any]) -> None:
    """Numbers to their last bit; None where a rank has none."""
    exact = {name: None if value is None else float(value).hex() for name, value in numbers.items()}
    write_line("metrics", {"rank": rank, "step": step, **exact})


def write_line(kind: str, fields: dict[str, Any]) -> None:
    """One line in one write, so that ranks sharing a file do not interleave."""
    os.write(sys.stdout.fileno(), f"{kind} {json.dumps(fields)}\n".encode())


def digest(tensors: Iterator[tuple[str, torch.Tensor]]) -> str:
    state = hashlib.sha256()
    for name, tensor in tensors:
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
