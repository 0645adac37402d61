"""pretrain_gpt.py goes on from a checkpoint of an earlier job and loses a node: bit for bit as if it had not.

The second job saves nothing: over torch's Adam, Megatron-core 0.16.1 cannot save what it has loaded (its parameters
share one count of steps then, distrib_optimizer.py 830).
"""

from faults.plan import Kill
from megatron_lm import jobs
from support.zygote import in_zygote

FIRST, STEPS = 4, 28


@in_zygote
def test_a_node_is_killed_in_a_job_that_loaded_a_checkpoint(tmp_path, checkout, corpus, references):
    jobs.preload(checkout)
    decay = ("--lr-decay-iters", str(STEPS))
    saving = ("--save", "{folder}/checkpoints", "--save-interval", str(FIRST))
    earlier = jobs.Training(checkout, jobs.arguments(corpus, FIRST, *decay, *saving), references).undisturbed()
    loading = ("--override-opt_param-scheduler", "--load", str(earlier / "checkpoints"))
    training = jobs.Training(checkout, jobs.arguments(corpus, STEPS, *decay, *loading), references)
    verdict, job = training.protected(
        tmp_path / "job", [Kill(0, 2, 0, "driver", hold=1)]
    )  # as soon as a spare is ready
    assert verdict.holds and verdict.bit_exact, f"{verdict.as_json()}\nsee {tmp_path}"
    lines = jobs.iterations(job.cluster.output, 7)
    assert lines == jobs.iterations(training.undisturbed(), 7) and "iteration        5/" in lines[0]
