"""Layouts and options of Megatron-core, each with two ranks killed in one job: bit for bit as if nothing had happened.

The first lost rank has been rehearsed beforehand, the second is rehearsed only then. Every job goes on for five steps
and more after its last fault; loss, gradient norm, validation loss, parameters, buffers and optimizer state of every
rank must equal those of the plain script. The layouts with eight ranks, and every layout in every phase, are the fault
matrix's.
"""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "dist"), str(ROOT / "tests"), str(ROOT / "scripts")]

import dist.test_worker_swap  # noqa: E402, F401 - imports megatron-core for the forks
from gpt import layouts  # noqa: E402
from support import slow_but  # noqa: E402
from support.killed_ranks import assert_alike, run_with_kills, undisturbed  # noqa: E402
from support.zygote import in_zygote  # noqa: E402

STEPS = 11

CASES = [
    ("tp4", (3, 3, "backward"), (0, 6, "optimizer")),
    ("pp4", (2, 3, "backward"), (0, 6, "forward")),
    ("interleaved-overlap", (1, 3, "backward"), (2, 6, "between")),
    ("sequence-parallel", (1, 3, "forward"), (2, 6, "optimizer")),
    ("cp2", (3, 3, "backward"), (0, 6, "forward")),
    ("ep2-alltoall", (1, 3, "forward"), (2, 6, "optimizer")),
    ("ep2-bias", (2, 3, "backward"), (1, 6, "between")),
    ("overlap", (2, 3, "backward"), (0, 6, "optimizer")),
    ("optimizer-instances-overlap", (0, 3, "optimizer"), (3, 6, "backward")),
    ("recompute-full", (1, 3, "backward"), (0, 6, "forward")),
    ("dp4-unclipped", (1, 3, "between"), (2, 6, "optimizer")),
]


def arguments(corpus, name):
    return [
        str(ROOT / "scripts" / "train_gpt.py"), "--data-path", corpus, "--train-iters", str(STEPS), "--eval-interval",
        "4", "--log-all-ranks", "--digest", *layouts.LAYOUTS[name].arguments,
    ]  # fmt: skip


def plain(corpus, references, name):
    argv, world_size = arguments(corpus, name), layouts.LAYOUTS[name].world_size
    return undisturbed(Path(references) / f"layout-{name}", argv, world_size)


def survives(tmp_path, corpus, references, name, first, second):
    """Run the layout with and without the two faults, and compare."""
    expected, world_size = plain(corpus, references, name), layouts.LAYOUTS[name].world_size
    run_with_kills(tmp_path, arguments(corpus, name), world_size, [first, second], rehearse=[first[0]])
    assert_alike(expected, tmp_path)


@pytest.mark.parametrize(("name", "first", "second"), slow_but(CASES, 2, 5), ids=[case[0] for case in CASES])
@in_zygote
def test_a_layout_survives_two_losses_bit_for_bit(tmp_path, corpus, references, name, first, second):
    survives(tmp_path, corpus, references, name, first, second)


@pytest.mark.slow
@in_zygote
def test_losses_in_steps_that_the_loss_scaler_skips(tmp_path, corpus, references):
    """Faults count updates: the forward of update n + 1 is first reached in the step after update n, skipped or not.

    Which steps are skipped depends on the processor's kernels.
    """
    log = plain(corpus, references, "fp16") / "rank0.log"
    updated = [line["grad_norm"] is not None for line in metrics(log)]
    assert not updated[0], "the first fault is meant for a skipped step"
    skipped = next(step for step in range(1, STEPS) if updated[step - 1] and not updated[step])  # after an update
    assert STEPS - skipped > 4 and sum(updated[skipped:]) > 2, "training goes on for a while"
    survives(tmp_path, corpus, references, "fp16", (1, 1, "backward"), (2, sum(updated[:skipped]) + 1, "forward"))


def metrics(log):
    return [
        json.loads(line.removeprefix("metrics ")) for line in log.read_text().splitlines() if line[:8] == "metrics "
    ]
