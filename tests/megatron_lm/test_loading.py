"""pretrain_gpt.py goes on from a checkpoint of an earlier job and loses a node: bit for bit as if it had not."""

import pytest
from faults.plan import Kill
from megatron_lm import jobs
from support.zygote import in_zygote

FIRST, STEPS = 4, 12


@pytest.mark.parametrize("more", [(), ("--async-save",)], ids=["", "async"])
@in_zygote
def test_a_node_is_killed_in_a_job_that_loaded_a_checkpoint(tmp_path, checkout, corpus, references, more):
    jobs.preload(checkout)
    saving = ("--save", "{folder}/checkpoints", "--save-interval", str(FIRST), "--lr-decay-iters", str(STEPS))
    earlier = jobs.Training(checkout, jobs.arguments(corpus, FIRST, *saving), references).undisturbed()
    loading = ("--override-opt_param-scheduler", "--load")
    words = jobs.arguments(corpus, STEPS, *saving, *more, *loading, str(earlier / "checkpoints"))
    verdict, job = jobs.Training(checkout, words, references).protected(
        tmp_path / "job", [Kill(0, 2, FIRST + 3, "backward", hold=FIRST + 2)]
    )
    assert verdict.holds and verdict.bit_exact, f"{verdict.as_json()}\nsee {tmp_path}"
    lines = jobs.iterations(job.cluster.output, 7)
    assert "iteration        5/" in lines[0] and "iteration       12/" in " ".join(lines)
