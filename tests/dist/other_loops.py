"""train_gpt.py with loops that do more between the calls than plain scripts do. `other_loops.py MODE ARGUMENTS...`

Not a test: the training script of test_other_loops.py, run with and without the plugin.
"""

import sys
from pathlib import Path

MODE = sys.argv.pop(1)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import train_gpt as script  # noqa: E402

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
        if MODE == "shuffle" and step % 3 == 1:  # a new epoch: the permutation comes from the default generator
            data = script.torch.utils.data.DataLoader(LOADED[0], batch_size=args.micro_batch_size, shuffle=True)
            train_data = [iter(data)]
        model[0].zero_grad_buffer()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=MODE == "autocast"):
            losses = script.run_microbatches(args, model, train_data, forward_only=False)
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


LOADED = []
plain_iterator = script.data_iterator


def data_iterator(args, dataset, *options):
    LOADED.append(dataset)
    return plain_iterator(args, dataset, *options)


script.build_model, script.evaluate, script.train = build_model, evaluate, train
script.data_iterator = data_iterator
script.main()
