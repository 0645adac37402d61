"""train_deepspeed.py with a loop that gathers ZeRO 3's parameters itself: to look at them, and to evaluate others.

Not a test: the training script of test_gathering.py, run with and without the plugin.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import torch
import torch.distributed as dist
import train_deepspeed as script
from deepspeed.runtime.zero import GatheredParameters

plain_evaluate = script.evaluate


def evaluate(args, engine, data):
    """Losses with other weights, and with the present ones while some of them are looked at."""
    first, then = (of_half, of_whole) if engine.global_steps % 8 == 0 else (of_whole, of_half)
    return first(args, engine, data) + then(args, engine, data)


def of_half(args, engine, data):
    scale(engine, 0.5)
    loss = plain_evaluate(args, engine, data)
    scale(engine, 2.0)
    return loss


def of_whole(args, engine, data):
    weights = list(engine.module.parameters())[:3]
    with GatheredParameters(weights):
        loss = plain_evaluate(args, engine, data)
        return loss + sum(weight.norm() for weight in weights).item()


@torch.no_grad()
def scale(engine, factor):
    weights = list(engine.module.parameters())
    with GatheredParameters(weights, modifier_rank=0):
        if dist.get_rank() == 0:
            for weight in weights:
                weight.mul_(factor)


if __name__ == "__main__":
    script.evaluate = evaluate
    script.main()
