"""train_gpt.py with loops that do more between the calls than plain scripts do. `other_loops.py MODE ARGUMENTS...`

Not a test: the training script of test_other_loops.py, run with and without the plugin.
"""

import os
import sys
from pathlib import Path
from typing import Any

MODE = sys.argv.pop(1)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import train_gpt as script  # noqa: E402

import deadpool_plugin  # noqa: E402
from deadpool_plugin.data import resumable  # noqa: E402

plain_build, plain_batch, plain_evaluate = script.build_model, script.get_batch, script.evaluate


def build_model(args, config, vocab_size):
    model = plain_build(args, config, vocab_size)
    if MODE == "buffer":  # changes in every forward, as router biases and running means do
        model[0].module.register_buffer("seen", torch.zeros(1))
        model[0].module.register_forward_hook(count)
    return model


def count(module, inputs, output):
    if module.training:
        module.seen += 1
        return output * (1 + 1e-3 * module.seen)
    return output


def evaluate(*args):
    with torch.inference_mode(MODE == "inference_mode"):
        return plain_evaluate(*args)


def train(args, model, optimizer, scheduler, train_data, valid_data, do_valid, checkpoints):
    model[0].train()
    for step in range(1, args.train_iters + 1):
        if MODE == "edited":
            numbers = edited(args, model, optimizer, scheduler, step)
            numbers["eval"] = None
            script.log_step(args, step, 0.0, numbers)
            continue
        if MODE == "urandom" and step == 1:
            train_data = [noisy(train_data[0])]
        if MODE == "shuffle" and step % 3 == 1:  # a new epoch: the permutation comes from the default generator
            train_data = [iter(shuffled(args, LOADED[0]))]
        model[0].zero_grad_buffer()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=MODE == "autocast"):
            data = [None] if MODE in LOADERS else train_data
            losses = script.run_microbatches(args, model, data, forward_only=False)
        if MODE == "gradients":
            for buffer in model[0].buffers:
                dist.all_reduce(buffer.grad_data)
        _, grad_norm, _ = optimizer.step()
        if MODE == "draws":
            torch.rand(3)
        if MODE == "own_schedule":
            for group in optimizer.param_groups:
                group["lr"] = args.lr / (1 + step)
        else:
            scheduler.step(increment=script.global_batch_size(args))
        # Without this one a rank meets the others only in the next reduction of gradients: it runs ahead till then.
        loss = losses[0]["lm loss"].item() if MODE == "unreduced" else script.average_loss(losses)
        numbers = {"loss": loss, "grad_norm": grad_norm, "lr": optimizer.param_groups[0]["lr"]}
        numbers["eval"] = None
        if do_valid and step % args.eval_interval == 0:
            numbers["eval"] = script.evaluate(args, model, valid_data)
        script.log_step(args, step, 0.0, numbers)


@deadpool_plugin.step
def edited(args, model, optimizer, scheduler, step):
    """An iteration that changes gradients between backward and update."""
    model[0].zero_grad_buffer()
    optimizer.zero_grad()
    losses = script.run_microbatches(args, model, [None], forward_only=False)
    for buffer in model[0].buffers:
        buffer.grad_data.mul_(1 + 0.1 * (step % 3))
    _, grad_norm, _ = optimizer.step()
    scheduler.step(increment=script.global_batch_size(args))
    return {"loss": script.average_loss(losses), "grad_norm": grad_norm, "lr": optimizer.param_groups[0]["lr"]}


LOADED: list[Any] = []
plain_iterator = script.data_iterator


def data_iterator(args, dataset, *options):
    LOADED.append(dataset)
    if MODE in LOADERS and len(LOADED) == 1:
        return Closed(LOADERS[MODE](args, torch.utils.data.Subset(dataset, range(10))))
    return plain_iterator(args, dataset, *options)


def get_batch(data):
    return plain_batch(LOADED[0] if data is None and MODE in LOADERS else data)


class Closed:
    """An endless iterator that a training call reads although it was not given it: not to be seen as one."""

    def __init__(self, loader):
        self.loader, LOADED[0] = resumable(loader), self
        self.items = iter(self.loader)

    def __next__(self):
        try:
            return next(self.items)
        except StopIteration:
            self.items = iter(self.loader)
            return next(self.items)


def shuffled(args, dataset):
    return torch.utils.data.DataLoader(dataset, args.micro_batch_size, shuffle=True)


def noisy(items):
    """Batches that no process reads again."""
    for item in items:
        yield {**item, "loss_mask": item["loss_mask"] * (1 + os.urandom(1)[0] / 1e3)}


class Stateful:
    """Orders of its own, which a process that replaces this one would draw otherwise."""

    def __init__(self, args, dataset):
        self.chance = torch.Generator().manual_seed(99 if deadpool_plugin.is_rehearsal() else 1)
        self.dataset, self.size = dataset, args.micro_batch_size
        self.order, self.resumes = [], False

    def state_dict(self):
        return {"chance": self.chance.get_state(), "order": self.order}

    def load_state_dict(self, state):
        self.chance.set_state(state["chance"])
        self.order, self.resumes = list(state["order"]), True

    def __iter__(self):
        if not self.resumes:
            self.order = torch.randperm(len(self.dataset), generator=self.chance).tolist()
        self.resumes = False
        while self.order:
            batch, self.order = self.order[: self.size], self.order[self.size :]
            yield torch.utils.data.default_collate([self.dataset[index] for index in batch])


LOADERS = {"closure": shuffled, "stateful": Stateful, "edited": shuffled}


script.build_model, script.evaluate, script.train = build_model, evaluate, train
script.data_iterator, script.get_batch = data_iterator, get_batch
script.main()
