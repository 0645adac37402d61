"""train_deepspeed.py with iterations that cannot be redone call by call. `own_steps.py MODE ARGUMENTS...`

edited     the script changes gradients between backward and step
penalty    the loss uses parameters of the engine's model outside its forward
gathered   the loss is computed with communication outside the engine
urandom    batches that no process reads again
Not a test: the training script of test_own_steps.py, run with and without the plugin, with and without the decorator.
"""

import os
import sys
import time
from pathlib import Path

MODE = sys.argv.pop(1)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import torch  # noqa: E402
import torch.distributed.nn as differentiable  # noqa: E402
import train_deepspeed as script  # noqa: E402

import deadpool_plugin  # noqa: E402
from deadpool_plugin.data import resumable  # noqa: E402

DECORATED = "--undecorated" not in sys.argv
if not DECORATED:
    sys.argv.remove("--undecorated")


class Batches:
    """Without an end; the order of each epoch comes from the default generator."""

    def __init__(self, args):
        dataset = script.Windows(args.data_path, args.samples, args.seq_length, 0)
        self.loader = resumable(torch.utils.data.DataLoader(dataset, args.micro_batch_size, shuffle=True))
        self.items = iter(self.loader)

    def next(self):
        try:
            return next(self.items)
        except StopIteration:
            self.items = iter(self.loader)
            return next(self.items)


def iteration(args, engine, batches):
    """One step; the mean loss."""
    losses = []
    for _ in range(args.num_microbatches):
        loss = script.forward(args, engine, batches.next())
        if MODE == "penalty":
            loss = loss + 1e-3 * sum(parameter.pow(2).sum() for parameter in engine.module.parameters())
        if MODE == "gathered":
            loss = torch.stack(differentiable.all_gather(loss)).mean() + loss
        engine.backward(loss)
        if MODE == "edited" and engine.is_gradient_accumulation_boundary():
            for number, parameter in enumerate(engine.module.parameters()):
                parameter.grad.mul_(1 + 0.1 * (number % 3))
        engine.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


class Noisy(script.Windows):
    def __getitem__(self, index):
        return {name: value ^ (os.urandom(1)[0] & 1) for name, value in super().__getitem__(index).items()}


def train(args, engine, schedule):
    step = deadpool_plugin.step(iteration) if DECORATED else iteration
    batches, valid = Batches(args), script.loader(args, engine, 16, 10**6, False)
    while engine.global_steps < args.train_iters:
        began = time.perf_counter()
        numbers = {"loss": step(args, engine, batches), "grad_norm": engine.get_global_grad_norm()}
        numbers |= {"lr": engine.get_lr()[0], "eval": None}
        if schedule is not None:
            schedule.step()
        if args.eval_interval and engine.global_steps % args.eval_interval == 0:
            numbers["eval"] = script.evaluate(args, engine, valid)
        script.log_step(args, engine.global_steps, time.perf_counter() - began, numbers)


if MODE == "urandom":  # with the loop of the script itself, which reads its batches between the calls
    script.Windows = Noisy  # type: ignore[misc]  # the script makes its data sets of what bears this name
else:
    script.train = train
script.main()
