"""train_gpt.py with a handler for SIGTERM, as Megatron-LM's --exit-signal-handler: all agree, save, and end.

Not a test: the training script of test_told_to_end.py. SAVED (environment) is the folder it saves into.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import torch
import torch.distributed as dist
import train_gpt as script

told: list[bool] = []
plain_log_step = script.log_step


def log_step(args, step, *others):
    plain_log_step(args, step, *others)
    wanted = torch.tensor([len(told)])
    dist.all_reduce(wanted)
    if wanted.item():
        torch.save({"step": step}, Path(os.environ["SAVED"], f"rank{dist.get_rank()}.pt"))
        dist.barrier()
        sys.exit()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    script.log_step = log_step
    script.main()
