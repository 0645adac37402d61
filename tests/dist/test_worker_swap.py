"""Real training processes, real SIGKILL, no launcher and no agents: the worker's part of a swap, bit for bit.

Four ranks (TP 2, PP 2) train the script as it is; a rank is killed inside a phase of a step; another process takes
the rank, rehearsed beforehand or only then. Loss, gradient norm and validation loss of every rank and step, and the
digests of parameters and optimizer state at the end, must equal those of the plain script without the plugin.
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

from faults import inject  # noqa: E402
from support import slow_but  # noqa: E402
from support.killed_ranks import assert_alike, run_with_kills, undisturbed  # noqa: E402
from support.zygote import in_zygote  # noqa: E402

try:
    import megatron.core.datasets.blended_megatron_dataset_builder
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401
except ImportError:
    pytestmark = pytest.mark.skip(reason="megatron-core is not installed")

from deadpool_plugin.worker import follow  # noqa: E402

STEPS = 12


def arguments(corpus, dtype, distributed):
    optimizer = "--distributed-optimizer" if distributed else "--no-distributed-optimizer"
    return [
        str(ROOT / "scripts" / "train_gpt.py"), "--data-path", corpus, "--tp", "2", "--pp", "2", "--dtype", dtype,
        optimizer, "--train-iters", str(STEPS), "--eval-interval", "4", "--log-all-ranks", "--digest",
    ]  # fmt: skip


def reference(references, corpus, dtype, distributed):
    return undisturbed(Path(references) / f"{dtype}-{distributed}", arguments(corpus, dtype, distributed), 4)


CASES = [
    ("bf16", True, (3, 4, "forward"), True),
    ("bf16", True, (0, 5, "backward"), False),
    ("bf16", True, (1, 3, "optimizer"), True),
    ("bf16", True, (2, 5, "mirror"), False),
    ("bf16", False, (0, 4, "optimizer"), False),
    ("bf16", False, (3, 1, "between"), True),
    ("fp32", True, (1, 1, "forward"), True),
    ("fp32", False, (2, 6, "optimizer"), False),
]


@pytest.mark.parametrize(("dtype", "distributed", "kill", "rehearsed"), slow_but(CASES, 1, 4))
@in_zygote
def test_a_killed_rank_is_replaced_bit_for_bit(tmp_path, corpus, references, dtype, distributed, kill, rehearsed):
    expected = reference(references, corpus, dtype, distributed)
    argv = arguments(corpus, dtype, distributed)
    run_with_kills(tmp_path, argv, 4, [kill], rehearse=[kill[0]] if rehearsed else [])
    assert_alike(expected, tmp_path)


@pytest.mark.slow
@in_zygote
def test_ranks_whose_loaders_have_worker_processes(tmp_path, corpus, references):
    """Ranks 0 and 2 read the data; their newcomers' loaders are moved without reading."""
    expected = reference(references, corpus, "bf16", True)
    argv = [*arguments(corpus, "bf16", True), "--num-workers", "1"]
    run_with_kills(tmp_path, argv, 4, [(0, 5, "forward"), (2, 8, "backward")], rehearse=[])
    assert_alike(expected, tmp_path)


def always_says(injector):
    follow.MOVED_EVERY_S = 0.0
    inject.install(injector)


@pytest.mark.slow
@in_zygote
def test_a_process_says_how_far_it_has_come_through_past_steps(tmp_path, corpus, references):
    expected = reference(references, corpus, "bf16", True)
    outcome = run_with_kills(tmp_path, arguments(corpus, "bf16", True), 4, [(2, 8, "forward")], [], always_says)
    assert_alike(expected, tmp_path)
    moved = [fields["step"] for name, fields in outcome.events[2] if name == "Moved"]
    assert moved == sorted(moved) and len(set(moved)) > 4


@in_zygote
def test_three_losses_in_a_row(tmp_path, corpus, references):
    expected = reference(references, corpus, "bf16", True)
    kills = [(1, 2, "backward"), (2, 4, "optimizer"), (0, 6, "forward")]
    run_with_kills(tmp_path, arguments(corpus, "bf16", True), 4, kills, rehearse=[1])
    assert_alike(expected, tmp_path)
