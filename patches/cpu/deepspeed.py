"""DeepSpeed where there is no GPU: it has a CPU accelerator of its own, which must be asked for, and asked for less."""

from __future__ import annotations

import os

import torch


def apply() -> None:
    """Before `import deepspeed`. Two places of it need this on a machine without a GPU.

    accelerator/real_accelerator.py takes the CPU only if told to, and asks `LOCAL_SIZE` how many devices there are.
    comm/torch.py compiles an all-reduce over shared memory at initialisation, which goes past the process groups.
    """
    if torch.cuda.is_available():
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_SIZE", "1")
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
