"""pretrain.py CHECKOUT/SCRIPT ARGUMENTS: an unedited script of a Megatron-LM checkout where there is no GPU, observed.

Rules of this file: the script is run as it is; what is hooked is hooked from outside, and only looked at: every rank
prints the exact numbers of each iteration and, after the last, digests of its parameters and optimizer state, in the
lines that compare_runs.py reads. Works on every tag that `patches.cpu.megatron_lm` works on.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]


def prepare(checkout: Path) -> None:
    """Make `megatron` that of the checkout and let it run on a CPU. Doing it twice is the same as once."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for path in (SCRIPTS.parent, SCRIPTS, checkout):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    warnings.filterwarnings("ignore")
    from patches import cpu

    cpu.apply()
    from patches.cpu import megatron_lm

    megatron_lm.apply()


def preload(checkout: Path) -> None:
    """Import all that the ranks of a job would import, before they are forked."""
    prepare(checkout)
    for name in ("megatron.training.training", "gpt_builders", "model_provider"):
        if importlib.util.find_spec(name) is not None:  # the last two are not in core_v0.14.0
            importlib.import_module(name)


def observe() -> None:
    """Print what compare_runs.py compares, and save what can be compared."""
    from megatron.training import training

    from patches.cpu import saving

    saving.results_by_pipe()
    saving.persistent_writers()
    saving.same_padding()
    after(training, "training_log", _numbers)
    after(training, "train", _digests)


def after(owner: Any, name: str, look: Any) -> None:
    """`look` gets what `owner.name` was given, by name, once that is done."""
    original = getattr(owner, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except SystemExit:  # of --exit-interval, say
            look(signature.bind(*args, **kwargs).arguments)
            raise
        look(signature.bind(*args, **kwargs).arguments)
        return result

    setattr(owner, name, wrapper)


def _numbers(given: dict[str, Any]) -> None:
    from gpt.output import write_metrics

    losses = {name: float(value) for name, value in sorted(given["loss_dict"].items())}
    numbers = {"loss": next(iter(losses.values()), None), "grad_norm": given["grad_norm"], "lr": given["learning_rate"]}
    write_metrics(int(os.environ["RANK"]), given["iteration"], numbers)


def _digests(given: dict[str, Any]) -> None:
    from gpt.output import digest, write_line
    from train_gpt import model_tensors, optimizer_tensors

    parameters = digest(model_tensors(given["model"]))
    state = digest(optimizer_tensors(given["optimizer"]))
    write_line("digest", {"rank": int(os.environ["RANK"]), "parameters": parameters, "optimizer": state})


def main() -> None:
    script = Path(sys.argv[1]).resolve()
    prepare(script.parent)
    observe()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
