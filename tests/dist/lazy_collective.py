"""train_gpt.py whose optimizer finds something out by a collective, once, and keeps it, as megatron-core 0.19 does.

    lazy_collective.py DTYPE MARKER ARGUMENTS...

Survivors of a swap keep the answer; a process that takes a rank over asks again, and nobody asks with it. Beside the
file MARKER each process that asks leaves a line. Not a test: the training script of test_pairing.py.
"""

import os
import sys
from pathlib import Path
from typing import Any

DTYPE, MARKER = sys.argv.pop(1), Path(sys.argv.pop(1))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import train_gpt as script  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.optimizer import optimizer  # noqa: E402

ANSWERS: list[Any] = []


def asking(plain):
    def prepare_grads(self):
        if not ANSWERS:
            with MARKER.open("a") as marker:
                marker.write(f"{os.environ['RANK']}\n")
            answer = torch.ones((), dtype=getattr(torch, DTYPE))
            dist.all_reduce(answer, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            ANSWERS.append(answer.item())
        return plain(self)

    return prepare_grads


for kind in (optimizer.FP32Optimizer, optimizer.MixedPrecisionOptimizer):
    kind.prepare_grads = asking(kind.prepare_grads)
script.main()
