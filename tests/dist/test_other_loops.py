"""Scripts that draw random numbers, set learning rates, reduce gradients, change buffers or read data of their own."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import dist.test_worker_swap  # noqa: E402, F401 - imports megatron-core for the forks
from support.killed_ranks import assert_alike, run_with_kills, undisturbed  # noqa: E402
from support.zygote import in_zygote  # noqa: E402

pytestmark = pytest.mark.long
SCRIPT = str(HERE / "other_loops.py")
MODES = [
    ("draws", (1, 5, "forward")),
    ("shuffle", (0, 6, "backward")),
    ("own_schedule", (1, 4, "optimizer")),
    ("gradients", (0, 5, "optimizer")),
    ("buffer", (1, 5, "backward")),
    ("autocast", (0, 4, "optimizer")),
    ("inference_mode", (1, 4, "mirror")),
    ("closure", (1, 4, "forward")),
    ("closure", (0, 5, "optimizer")),
    ("stateful", (1, 5, "backward")),
    ("stateful", (0, 3, "between")),
    ("edited", (1, 4, "optimizer")),
    ("edited", (0, 5, "backward")),
    ("unreduced", (1, 5, "between")),
    ("unreduced", (0, 5, "optimizer")),
]


@pytest.mark.parametrize(("mode", "kill"), MODES, ids=[mode for mode, _ in MODES])
@in_zygote
def test_what_a_script_does_between_calls_is_kept(tmp_path, corpus, mode, kill):
    argv = [
        SCRIPT, mode, "--data-path", corpus, "--layers", "1", "--hidden", "32", "--seq-length", "32",
        "--train-iters", "12", "--eval-interval", "4", "--log-all-ranks", "--digest",
    ]  # fmt: skip
    expected, run = undisturbed(tmp_path / "plain", argv, 2), tmp_path / "run"
    run_with_kills(run, argv, 2, [kill], rehearse=[kill[0]])
    assert_alike(expected, run)


@pytest.mark.parametrize("rehearsed", [True, False])
@in_zygote
def test_who_reads_other_data_is_refused_before_it_joins(tmp_path, corpus, rehearsed):
    argv = [
        SCRIPT, "urandom", "--data-path", corpus, "--layers", "1", "--hidden", "32", "--seq-length", "32",
        "--train-iters", "12",
    ]  # fmt: skip
    with pytest.raises(
        AssertionError, match="rank 1 read other data than the rank itself for forward_backward.* step "
    ):
        run_with_kills(tmp_path, argv, 2, [(1, 5, "forward")], rehearse=[1] if rehearsed else [])
