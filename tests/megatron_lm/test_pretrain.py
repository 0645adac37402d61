"""NVIDIA/Megatron-LM's pretrain_gpt.py, unedited: 8 ranks (TP2 PP2 DP2 SP, bf16, distributed optimizer), real text.

Whole emulated clusters of four nodes and a spare. Every rank's loss, gradient norm and learning rate of every
iteration and its final parameters and optimizer state must equal those of the run without the plugin, bit for bit,
and the job's log must have every line about an iteration or a validation once.
"""

import os
import random

import pytest
from faults.plan import Kill
from megatron_lm import base_job, jobs
from support.zygote import in_zygote

STEPS = 12
SEED = int(os.environ.get("MEGATRON_LM_SEED", random.randrange(1 << 30)))
LAST_RANK = 7


def killed(node, step, phase="backward", rank=-1):
    return Kill(0, node, step, phase, rank=rank, hold=step - 1)


def run(tmp_path, checkout, corpus, references, kills, *more):
    """Runs the job twice; the folders of the undisturbed and of the protected run."""
    jobs.preload(checkout)
    training = jobs.Training(checkout, base_job.arguments(corpus, STEPS, *more), references)
    verdict, job = training.protected(tmp_path / "job", kills)
    assert verdict.holds and verdict.bit_exact, f"{verdict.as_json()}\nsee {tmp_path}"
    assert all(one.fired is not None and one.lost_steps == 0 for one in verdict.outcomes)
    expected, output = training.undisturbed(), job.cluster.output
    assert jobs.iterations(output, LAST_RANK) == jobs.iterations(expected, LAST_RANK)
    return expected, output


@in_zygote
def test_without_a_failure_the_logs_are_the_same(tmp_path, checkout, corpus, references):
    expected, output = run(tmp_path, checkout, corpus, references, [])
    for rank in range(LAST_RANK + 1):  # in start-up, parameters are listed in the order of a set
        assert from_the_loop_on(jobs.printed(output, rank)) == from_the_loop_on(jobs.printed(expected, rank))


def from_the_loop_on(lines):
    """Rank 0 says when it begins, the other ranks say next to nothing before."""
    return lines[lines.index("training ...") :] if "training ..." in lines else sorted(lines)


@pytest.mark.parametrize("node", [0, 1, 3], ids=["first node", "some node", "logging node"])
@in_zygote
def test_a_node_is_killed_at_a_random_step(tmp_path, checkout, corpus, references, node):
    draw = random.Random(SEED + node)
    kill = killed(node, draw.randrange(3, STEPS - 5), draw.choice(["forward", "backward", "optimizer", "between"]))
    print(f"MEGATRON_LM_SEED={SEED} gives {kill}")
    run(tmp_path, checkout, corpus, references, [kill])
