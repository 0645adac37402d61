"""One rank of several on the same card: does a collective of theirs give what it should? Exit code 0 if so.

Rules of this file: torch only; started by run_plain.run_ranks.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist


def main() -> int:
    device = sys.argv[1]
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    tensor = torch.full((1 << 20,), dist.get_rank() + 1.0, device=device)
    for _ in range(3):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    found, expected = tensor.unique().tolist(), [float(dist.get_world_size())]
    print(f"{found}, expected {expected}")
    dist.barrier()  # who leaves earlier takes its connections along
    dist.destroy_process_group()
    return int(found != expected)


if __name__ == "__main__":
    sys.exit(main())
