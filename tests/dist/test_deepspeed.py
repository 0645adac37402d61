"""DeepSpeed engines in a script's own loop: real training processes, real SIGKILL, bit for bit.

Two ranks train scripts/train_deepspeed.py as it is; ranks are killed inside a phase of a step, the first one rehearsed
beforehand, later ones only then. Loss, gradient norm, learning rate and validation loss of every rank and step, and
the digests of parameters and optimizer state at the end, must equal those of the plain script without the plugin.
"""

import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]

from faults import deepspeed_hooks  # noqa: E402
from support import slow_but  # noqa: E402
from support.deepspeed_cpu import needs_deepspeed  # noqa: E402
from support.killed_ranks import assert_alike, run_with_kills, undisturbed  # noqa: E402
from support.zygote import in_zygote  # noqa: E402

from deadpool_plugin.worker.trackers import last_records  # noqa: E402

pytestmark = needs_deepspeed
STEPS = 12


def split(words):
    """At spaces, but for a JSON object at the end."""
    words, brace, options = words.partition("{")
    return [*words.split(), *([brace + options] if brace else [])]


def arguments(corpus, words):
    return [
        str(ROOT / "scripts" / "train_deepspeed.py"), "--data-path", corpus, "--train-iters", str(STEPS),
        "--eval-interval", "4", "--samples", "24", "--log-all-ranks", "--digest", *split(words),
    ]  # fmt: skip


def survives(tmp_path, corpus, references, words, kills, ranks=2):
    argv = arguments(corpus, words)
    expected = undisturbed(Path(references) / hashlib.sha256(words.encode()).hexdigest()[:16], argv, ranks)
    run_with_kills(tmp_path, argv, ranks, kills, [kills[0][0]], deepspeed_hooks.install)
    assert_alike(expected, tmp_path)


SMALL_BUCKETS = json.dumps({"overlap_comm": True, "reduce_bucket_size": 8000, "round_robin_gradients": True})
FEW_AT_A_TIME = json.dumps({"stage3_param_persistence_threshold": 100, "stage3_prefetch_bucket_size": 5000})
CASES = [
    ("--zero 0", [(0, 3, "backward"), (1, 6, "optimizer")]),
    ("--zero 0 --dtype bf16 --decay-groups", [(1, 4, "forward"), (0, 7, "mirror")]),
    ("--zero 1", [(1, 3, "forward"), (0, 6, "optimizer")]),
    (
        "--zero 1 --dtype bf16 --fp32-gradients --decay-groups --inference-mode",
        [(1, 4, "backward"), (0, 8, "evaluate")],
    ),
    ("--zero 2 --dtype bf16 --freeze mixed", [(0, 3, "backward"), (1, 6, "between")]),
    ("--zero 2 --loss-outside --scheduler script", [(1, 4, "before"), (0, 7, "backward")]),
    ("--zero 2 --direct-backward --zero-options " + SMALL_BUCKETS, [(1, 4, "backward"), (0, 7, "forward")]),
    ("--zero 3 --zero-options " + FEW_AT_A_TIME, [(0, 4, "evaluate"), (1, 7, "backward")]),
    ("--zero 3 --dtype bf16 --zero-init --recompute", [(1, 3, "forward"), (0, 6, "optimizer")]),
]


@pytest.mark.parametrize(
    ("words", "kills"), slow_but(CASES, 3, 6, 8), ids=[case[0].partition(" {")[0] for case in CASES]
)
@in_zygote
def test_two_losses_in_a_row(tmp_path, corpus, references, words, kills):
    survives(tmp_path, corpus, references, words, kills)


def built(name):
    """Return whether DeepSpeed's C++ is compiled here, for this torch: that takes a minute, which no test has."""
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    compiled = [so.with_name("build.ninja") for so in Path(folder).rglob(f"{name}.so")]
    return any(str(Path(torch.__file__).parent) in rules.read_text() for rules in compiled)


IN_CPP = [
    ("cpu_adam", "--zero 2 --dtype bf16 --offload --optimizer cpu", [(1, 3, "backward"), (0, 6, "optimizer")]),
    ("cpu_adam", "--zero 3 --dtype bf16 --offload --optimizer cpu --decay-groups",
     [(0, 4, "optimizer"), (1, 7, "forward")]),
    ("fused_adam", "--zero 1 --optimizer fused", [(1, 4, "forward"), (0, 7, "between")]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words", "kills"), IN_CPP, ids=[case[1] for case in IN_CPP])
def test_two_losses_with_an_optimizer_in_cpp(tmp_path, corpus, references, name, words, kills):
    if not built(name):
        pytest.skip(f"DeepSpeed's {name} is not compiled here: train once with scripts/train_deepspeed.py {words}")
    test_two_losses_in_a_row(tmp_path, corpus, references, words, kills)


PIPELINES = [
    ("--zero 0 --num-microbatches 4", [(1, 3, "forward"), (2, 6, "optimizer")]),
    ("--zero 1 --dtype bf16 --num-microbatches 4", [(3, 3, "backward"), (0, 6, "between")]),
    ("--zero 1 --scheduler script --decay-groups", [(1, 4, "backward"), (2, 7, "forward")]),
]


@pytest.mark.parametrize(("words", "kills"), slow_but(PIPELINES, 1), ids=[case[0] for case in PIPELINES])
@in_zygote
def test_two_losses_in_a_pipeline(tmp_path, corpus, references, words, kills):
    """Two stages with a tied embedding, two replicas of each."""
    survives(tmp_path, corpus, references, f"--pipeline 2 {words}", kills, ranks=4)


def saved(folder):
    """Every file of every checkpoint: what is in it, but for the configuration, which names the run's folders."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.pt"))
    found = {str(path): torch.load(folder / path, weights_only=False) for path in files}
    for content in found.values():
        content.pop("ds_config", None)
    return found


def written(folder):
    """Read DeepSpeed's monitors: the CSV files, and every value in TensorBoard's, however many files it has."""
    found = {path.name: path.read_text() for path in folder.rglob("*.csv")}
    events = sorted(folder.rglob("events.*"))
    if events:
        from tensorboard.compat.proto.event_pb2 import Event

        values = [
            value for path in events for data in last_records(path) for value in Event.FromString(data).summary.value
        ]
        found["tensorboard"] = sorted(value.SerializeToString() for value in values)
    return found


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and (
        left == right or not hasattr(type(left), "__eq__") or vars(left) == vars(right)
    )


@pytest.mark.parametrize("words", slow_but(["--zero 1", "--zero 3 --dtype bf16"], 0))
def test_a_save_that_is_interrupted_is_done_again_as_a_whole_and_monitors_write_once(tmp_path, corpus, words):
    an_interrupted_save(tmp_path, corpus, words)
    for name in ("tensorboard", "wandb"):  # the rest was compared without them
        pytest.importorskip(name, reason=f"{name} is not installed: what DeepSpeed gives it was not compared")


@in_zygote
def an_interrupted_save(tmp_path, corpus, words):
    os.environ["WANDB_MODE"] = "offline"
    argv = arguments(corpus, f"{words} --save-interval 4 --save")
    expected, run = tmp_path / "plain", tmp_path / "run"
    undisturbed(expected, [*argv, str(expected / "saved"), "--monitor", str(expected / "monitor")], 2)
    kills = [(1, 4, "write"), (0, 9, "mirror")]
    more = [str(run / "saved"), "--monitor", str(run / "monitor")]
    run_with_kills(run, [*argv, *more], 2, kills, [1], deepspeed_hooks.install)
    assert_alike(expected, run)
    assert written(run / "monitor") == written(expected / "monitor") and written(run / "monitor")
    if importlib.util.find_spec("tensorboard"):
        assert written(run / "monitor")["tensorboard"]
    if importlib.util.find_spec("wandb"):  # `wandb sync` puts the parts of a run together
        parts = [path.name.rpartition("-")[2] for path in (run / "monitor" / "wandb").glob("offline-run-*")]
        assert len(parts) == 2 and len(set(parts)) == 1
    assert (run / "saved" / "latest").read_text() == "global_step12"
    want, have = saved(expected / "saved"), saved(run / "saved")
    assert len(want) >= 3 * 3 and want.keys() == have.keys()
    for name in want:
        assert same(want[name], have[name]), name
