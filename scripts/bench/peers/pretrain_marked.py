"""pretrain_marked.py CHECKOUT/pretrain_gpt.py ARGUMENTS: the script as it is, on a CPU, with the benchmark's marks.

Runs in the project's environment (under the plugin) and in the peers' (--inprocess-restart, where two things have
stand-ins: the thread that finalizes is given no CUDA device, and, tuned, the abort cuts gloo's connections as
train_nvrx.py's does, since the one shipped aborts NCCL only).
"""

from __future__ import annotations

import functools
import inspect
import os
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from faults.plan import is_rehearsal
from megatron_lm import pretrain

from bench.peers.marks import mark


class Life:
    """Return how often the training function was started before (NVRx's iteration)."""

    number = 0


def say(kind: str, step: int) -> None:
    """Nothing in a spare that follows: it runs this loop too, and its steps are nobody's steps."""
    if not is_rehearsal():
        import torch.distributed as dist

        mark(kind, dist.get_rank(), step, life=Life.number)


def hook() -> None:
    import megatron.training as package
    from megatron.training import get_args, training

    original_train, original_pretrain = training.train, training.pretrain
    signature = inspect.signature(original_pretrain)

    @functools.wraps(original_train)
    def train(*args: Any, **kwargs: Any) -> Any:
        say("training", get_args().iteration)
        return original_train(*args, **kwargs)

    @functools.wraps(original_pretrain)
    def whole(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments.get("inprocess_call_wrapper")
        Life.number = call.iteration if call is not None else 0
        return original_pretrain(*args, **kwargs)

    pretrain.after(training, "training_log", lambda given: say("step", given["iteration"]))
    training.train = train
    training.pretrain = package.pretrain = whole


def stand_ins() -> None:
    """Replace what nvidia-resiliency-ext needs a GPU for, and make checkpoints as quick and good as they can be."""
    from nvidia_resiliency_ext import inprocess

    from patches.cpu import saving

    saving.results_by_pipe()
    loads_over_torchs_adam()

    def finalize(self: Any, state: Any) -> Any:
        self.fn(*self.args, **(self.kwargs or {}))
        return state

    inprocess.finalize.ThreadedFinalize.__call__ = finalize
    if os.environ["BENCH_NVRX"] == "tuned":
        from bench.peers.cut import CutConnections

        shipped, cut = inprocess.abort.AbortTorchDistributed.__call__, CutConnections(ports())
        inprocess.abort.AbortTorchDistributed.__call__ = lambda self, state: shipped(self, cut(state))


def loads_over_torchs_adam() -> None:
    """Megatron-core 0.16.1 asks an optimizer that is to be loaded for its count of steps (distrib_optimizer.py 640),
    which apex's and Transformer Engine's Adam have from the start, and torch's from its first step on."""
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.state_dict

    def state_dict(self: Any) -> Any:
        if not self.optimizer.state:
            self.init_state_fn(self.optimizer, self.config)
        for state in self.optimizer.state.values():
            state.setdefault("step", torch.zeros(()))
        return original(self)

    DistributedOptimizer.state_dict = state_dict


def ports() -> set[int]:
    """Return where Megatron-LM's integration has its stores (inprocess_restart.py), and the job's own."""
    first = int(os.environ["MASTER_PORT"])
    return {first, first + 1, first + 2}


def main() -> None:
    place = next(index for index, word in enumerate(sys.argv[1:], 1) if word.endswith(".py"))  # behind --local_rank
    script = Path(sys.argv[place]).resolve()
    pretrain.prepare(script.parent)
    hook()
    if "--inprocess-restart" in sys.argv:
        stand_ins()
    sys.argv = [str(script), *sys.argv[1:place], *sys.argv[place + 1 :]]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
