"""train_deepspeed.py that goes on from a checkpoint. `loading.py FOLDER KEPT ARGUMENTS...`

KEPT: what it keeps of the loaded parameters: `nothing`; a `copy` of the first, a number of it that is logged with every
step; a `buffer` that is not persistent, computed from it.
Not a test: the training script of test_light_starts.py.
"""

import functools
import sys
from pathlib import Path

FOLDER, KEPT = sys.argv.pop(1), sys.argv.pop(1)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import torch  # noqa: E402
import train_deepspeed as script  # noqa: E402

forward, train = script.forward, script.train


def changed_forward(kept, args, engine, batch):
    loss = forward(args, engine, batch)
    return loss + 1e-3 * (engine.module.of_the_start if KEPT == "buffer" else kept).norm()


def loading_train(args, engine, schedule):
    path, client_state = engine.load_checkpoint(FOLDER)
    assert path and client_state["seed"] == args.seed
    first = next(engine.module.parameters())
    kept = first.detach().clone()
    if KEPT == "buffer":
        engine.module.register_buffer("of_the_start", kept.float() * 2, persistent=False)
        kept = torch.zeros(())
    if KEPT != "nothing":
        script.forward = functools.partial(changed_forward, kept)
    del kept
    train(args, engine, schedule)


script.train = loading_train
script.main()
