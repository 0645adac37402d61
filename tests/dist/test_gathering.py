"""A script that gathers ZeRO 3's parameters itself, with ranks killed while it evaluates: bit for bit alike."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]

from faults import deepspeed_hooks  # noqa: E402
from support import slow_but  # noqa: E402
from support.deepspeed_cpu import needs_deepspeed  # noqa: E402
from support.killed_ranks import assert_alike, run_with_kills, undisturbed  # noqa: E402
from support.zygote import in_zygote  # noqa: E402

pytestmark = needs_deepspeed


@pytest.mark.parametrize("hidden", slow_but([32, 160], 0), ids=["told", "too large to be told"])
@in_zygote
def test_two_losses_while_others_evaluate(tmp_path, corpus, hidden):
    """While some are gathered, and while they are changed."""
    argv = [
        str(HERE / "gathering_loop.py"), "--data-path", corpus, "--layers", "2", "--hidden", str(hidden),
        "--seq-length", "32", "--zero", "3", "--train-iters", "12", "--eval-interval", "4", "--samples", "24",
        "--log-all-ranks", "--digest",
    ]  # fmt: skip
    expected, run = undisturbed(tmp_path / "plain", argv, 2), tmp_path / "run"
    kills = [(1, 4, "evaluate"), (0, 8, "evaluate")]
    run_with_kills(run, argv, 2, kills, [1], deepspeed_hooks.install)
    assert_alike(expected, run)
