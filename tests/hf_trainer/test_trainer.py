"""Hugging Face's Trainer with a DeepSpeed configuration, unedited: real training processes, real SIGKILL, bit for bit.

Two ranks train train.py as it is; ranks are killed inside a phase of a step, the first one rehearsed beforehand, later
ones only then; and four ranks on whole emulated hosts, agents and all. The whole log history of every rank, the digests
of parameters and optimizer state at the end, and every file that is left must equal those of the plain script.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]

from support import slow_but  # noqa: E402
from support.killed_ranks import assert_alike, run_with_kills, undisturbed  # noqa: E402
from support.zygote import in_zygote  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
try:
    import accelerate  # noqa: F401 - without it the Trainer cannot be used

    from patches.cpu import deepspeed as deepspeed_on_cpu

    deepspeed_on_cpu.apply()
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - preloaded for the forks: 5 CPU seconds
    import transformers.trainer  # noqa: F401 - and 6 more
except ImportError as missing:
    pytestmark = pytest.mark.skip(reason=f"Hugging Face's Trainer with DeepSpeed is not installed: {missing}")

from clusters import forked_node  # noqa: E402
from clusters.references import reference  # noqa: E402
from faults import deepspeed_hooks  # noqa: E402
from faults.job import Job  # noqa: E402
from faults.plan import Kill  # noqa: E402

NOT_COMPARED = ("runtime", "per_second", "total_flos")  # see train.py
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # DeepSpeed wants to see them; nobody connects there
os.environ.setdefault("MASTER_PORT", "1")


GATHERED = {"stage3_gather_16bit_weights_on_model_save": True}
FEW_AT_A_TIME = {"stage3_param_persistence_threshold": 100, "stage3_prefetch_bucket_size": 5000}


def configuration(folder, zero, **more):
    """A DeepSpeed configuration as people write it for the Trainer: what that knows is "auto"."""
    path = folder / "deepspeed.json"
    automatic = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    path.write_text(json.dumps({**dict.fromkeys(automatic, "auto"), "zero_optimization": zero, **more}))
    return path


def arguments(folder, corpus, config, words=(), more=None):
    return [
        str(HERE / "train.py"), "--corpus", corpus, "--deepspeed", str(config), "--output-dir", str(folder / "out"),
        "--arguments", json.dumps(more or {}), *words,
    ]  # fmt: skip


def survives(tmp_path, corpus, config, kills, words=(), more=None):
    """All of it, and what is left on disk, as without the plugin and undisturbed."""
    plain, run = tmp_path / "plain", tmp_path / "run"
    undisturbed(plain, arguments(plain, corpus, config, words, more), 2)
    run_with_kills(run, arguments(run, corpus, config, words, more), 2, kills, [kills[0][0]], deepspeed_hooks.install)
    assert_alike(plain, run)
    want, have = on_disk(plain / "out"), on_disk(run / "out")
    assert want.keys() == have.keys() and "checkpoint-12/trainer_state.json" in want
    for name in want:
        assert want[name] == have[name], name


def on_disk(folder):
    """Every file a Trainer has left: what is in it."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.name != "training_args.bin"):
        name = str(path.relative_to(folder))
        if path.suffix in (".pt", ".pth"):
            found[name] = comparable(torch.load(path, weights_only=False))
        elif path.name == "trainer_state.json":
            found[name] = compared(json.loads(path.read_text()), str(folder))
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def compared(value, folder):
    if isinstance(value, dict):
        kept = {name: one for name, one in value.items() if not any(part in name for part in NOT_COMPARED)}
        return {name: compared(one, folder) for name, one in kept.items()}
    if isinstance(value, str):
        return value.replace(folder, "")
    return [compared(one, folder) for one in value] if isinstance(value, list) else value


def comparable(value):
    """Plain data; tensors by their bytes."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        tensor = torch.as_tensor(value).contiguous()
        return [str(tensor.dtype), list(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()]
    if isinstance(value, dict):
        return {str(name): comparable(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [comparable(one) for one in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


AUTO = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
OF_DEEPSPEED = {
    "optimizer": {"type": "AdamW", "params": AUTO},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
}
BF16 = {"bf16": {"enabled": "auto"}}
LARGE = ["--vocabulary", "6000"]  # an evaluation's logits are above a record's limit
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[int, int, str]], list[str], dict[str, Any]]] = {
    "zero0": ({"stage": 0}, {}, [(0, 3, "backward"), (1, 6, "optimizer")], [], {}),
    "zero1": ({"stage": 1}, OF_DEEPSPEED, [(1, 3, "forward"), (0, 6, "optimizer")], [], {}),
    "zero2": ({"stage": 2}, {}, [(0, 4, "backward"), (1, 7, "between")], [], {"load_best_model_at_end": True}),
    "zero2-bf16": (
        {"stage": 2}, BF16, [(1, 4, "mirror"), (0, 8, "write")], [], {"bf16": True, "gradient_checkpointing": True},
    ),
    "zero2-loss-outside": (
        {"stage": 2}, {}, [(1, 4, "forward"), (0, 7, "backward")], [],
        {"label_smoothing_factor": 0.1, "dataloader_num_workers": 1},
    ),
    "zero3": ({"stage": 3, **GATHERED, **FEW_AT_A_TIME}, {}, [(1, 4, "evaluate"), (0, 8, "write")], [], {}),
    "zero3-bf16": (
        {"stage": 3}, BF16, [(0, 3, "backward"), (1, 6, "optimizer")], [], {"bf16": True, "eval_on_start": True},
    ),
    "zero3-metrics": ({"stage": 3}, {}, [(0, 3, "forward"), (1, 9, "between")], [*LARGE, "--metrics"], {}),
}  # fmt: skip


@pytest.mark.parametrize("case", slow_but(list(CASES), 1))
@in_zygote
def test_two_losses_in_a_row(tmp_path, corpus, case):
    zero, more, kills, words, training = CASES[case]
    survives(tmp_path, corpus, configuration(tmp_path, zero, **more), kills, words, training)


@pytest.mark.parametrize("stage", slow_but([2, 3]))
@in_zygote
def test_a_node_and_then_a_process_are_lost(tmp_path, corpus, stage):
    """The node of the first two ranks, in the backward; then one of the processes that took over, in the update."""
    forked_node.preload(forked_node.DEEPSPEED)
    config = configuration(tmp_path, {"stage": stage})
    script, *words = arguments(Path("{folder}"), corpus, config, ["--samples", "32"])
    undisturbed_run = reference(tmp_path / "references", words, 4, Path(script))
    kills = [Kill(0, 0, 4, "backward", hold=3), Kill(1, -1, 8, "optimizer", "rank", 1, hold=7)]
    folder = tmp_path / "job"
    training = [word.replace("{folder}", str(folder)) for word in words]
    verdict = Job(folder, training, 4, 2, 1, kills, script=Path(script), framework="deepspeed").run(undisturbed_run)
    assert verdict.holds and verdict.bit_exact, f"{verdict.as_json()}\nsee {tmp_path}"
    assert [one.lost_steps for one in verdict.outcomes] == [0, 0]
