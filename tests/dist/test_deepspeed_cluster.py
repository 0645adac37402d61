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


@pytest.mark.slow
@in_zygote
def test_a_process_and_then_a_node_of_a_pipeline_are_lost(tmp_path, corpus, references):
    kills = [Kill(0, -1, 4, "forward", "rank", 3, hold=3), Kill(1, 1, 8, "backward", hold=7)]
    run(tmp_path, corpus, references, "--zero 1 --pipeline 2", 4, 2, kills)


TWO_ENGINES = """
import sys
sys.path.insert(0, {scripts!r})
import train_deepspeed as script
build = script.build_engine
def two(args):
    script.discriminator = build(args)[0]
    return build(args)
script.build_engine = two
script.main()
"""


@pytest.mark.slow
@in_zygote
def test_a_script_with_two_engines_is_told_the_way_out_before_its_first_step(tmp_path, corpus):
    forked_node.preload(forked_node.DEEPSPEED)
    os.environ["DS_ACCELERATOR"] = "cpu"
    script = tmp_path / "two_engines.py"
    script.write_text(TWO_ENGINES.format(scripts=str(SCRIPT.parent)))
    words = ["--data-path", corpus, "--train-iters", "3", "--layers", "1", "--hidden", "32", "--seq-length", "32"]
    job = Job(tmp_path / "job", [*words, "--zero", "2"], 2, 1, 0, [], stops=78, script=script, framework="deepspeed")
    verdict = job.run(None)
    assert verdict.holds and verdict.exit_codes == [78, 78], f"{verdict.as_json()}\nsee {tmp_path}"
    assert "the script has 2 DeepSpeed engines" in verdict.stopped and "torch.no_grad()" in verdict.stopped
    assert not job.tail.of("StepDone")
