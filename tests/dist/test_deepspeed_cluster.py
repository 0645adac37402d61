"""DeepSpeed jobs on whole emulated clusters, agents and supervisors included: losses that must leave no bit changed."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]

from support.zygote import in_zygote  # noqa: E402

pytest.importorskip("deepspeed")

from clusters import forked_node  # noqa: E402
from clusters.references import reference  # noqa: E402
from faults.job import Job  # noqa: E402
from faults.plan import Kill  # noqa: E402

forked_node.import_all(forked_node.DEEPSPEED)  # for the forks
SCRIPT = ROOT / "scripts" / "train_deepspeed.py"


def run(tmp_path, corpus, references, words, world, slots, kills):
    forked_node.preload(forked_node.DEEPSPEED)
    os.environ["DS_ACCELERATOR"] = "cpu"
    common = ["--data-path", corpus, "--train-iters", "12", "--eval-interval", "4", "--samples", "24"]
    training = [*common, *words.split(), "--log-all-ranks", "--digest"]
    undisturbed = reference(Path(references), training, world, SCRIPT)
    job = Job(tmp_path / "job", training, world, slots, 1, kills, script=SCRIPT, framework="deepspeed")
    verdict = job.run(undisturbed)
    assert verdict.holds and verdict.bit_exact, f"{verdict.as_json()}\nsee {tmp_path}"
    assert [one.lost_steps for one in verdict.outcomes] == [0] * len(kills)


@in_zygote
def test_a_node_and_then_a_process_are_lost(tmp_path, corpus, references):
    """The node of the first two ranks, in the backward; then one of the processes that took over, in the update."""
    kills = [Kill(0, 0, 4, "backward", hold=3), Kill(1, -1, 8, "optimizer", "rank", 1, hold=7)]
    run(tmp_path, corpus, references, "--zero 2 --dtype bf16", 4, 2, kills)


@in_zygote
def test_a_process_and_then_a_node_of_a_pipeline_are_lost(tmp_path, corpus, references):
    kills = [Kill(0, -1, 4, "forward", "rank", 3, hold=3), Kill(1, 1, 8, "backward", hold=7)]
    run(tmp_path, corpus, references, "--zero 1 --pipeline 2", 4, 2, kills)
