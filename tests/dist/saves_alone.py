"""train_gpt.py, whose rank 0 alone writes a file into $ALONE after every third step, while the others go on."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import train_gpt  # noqa: E402
from gpt import checkpoint  # noqa: E402

EVERY = 3


class SavesAlone(checkpoint.Checkpoints):
    def after_step(self, step: int) -> bool:
        if dist.get_rank() == 0 and step % EVERY == 0:
            torch.save(self.rank_state(step), Path(os.environ["ALONE"], f"step{step}.pt"))
        return super().after_step(step)


if __name__ == "__main__":
    checkpoint.Checkpoints = SavesAlone  # type: ignore[misc]
    train_gpt.main()
