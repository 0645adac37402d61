"""pretrain_gpt.py goes on from a checkpoint of an earlier job and loses a node: bit for bit as if it had not.

So it does if it saves where it would have loaded from, and a process is replaced after the first save.
The model is loaded, the optimizer is not: over torch's Adam, Megatron-core 0.16.1 cannot load what it has saved
(distrib_optimizer.py 640: it asks a new optimizer for its count of steps), with or without the plugin.
"""

from faults.plan import Kill
from megatron_lm import base_job, jobs
from support.zygote import in_zygote

FIRST, STEPS = 4, 14


@in_zygote
def test_a_node_is_killed_in_a_job_that_loaded_a_checkpoint(tmp_path, checkout, corpus, references):
    jobs.preload(checkout)
    saving = ("--save", "{folder}/checkpoints", "--save-interval", str(FIRST))
    earlier = jobs.Training(checkout, base_job.arguments(corpus, FIRST, *saving), references).undisturbed()
    loading = ("--no-load-optim", "--load", str(earlier / "checkpoints"))
    training = jobs.Training(checkout, base_job.arguments(corpus, STEPS, *loading), references)
    verdict, job = training.protected(tmp_path / "job", [Kill(0, 2, 4, "backward", hold=3)])
    assert verdict.holds and verdict.bit_exact, f"{verdict.as_json()}\nsee {tmp_path}"
    lines = jobs.iterations(job.cluster.output, 7)
    assert lines == jobs.iterations(training.undisturbed(), 7) and "iteration        5/" in lines[0]


@in_zygote
def test_a_process_is_replaced_in_a_job_that_has_saved_where_it_found_nothing_to_load(
    tmp_path, checkout, corpus, references
):
    jobs.preload(checkout)
    folder = "{folder}/checkpoints"
    words = base_job.arguments(corpus, STEPS, "--load", folder, "--save", folder, "--save-interval", str(FIRST))
    training = jobs.Training(checkout, words, references)
    verdict, job = training.protected(tmp_path / "job", [Kill(0, -1, 6, "backward", kind="rank", rank=5, hold=5)])
    assert verdict.holds and verdict.bit_exact, f"{verdict.as_json()}\nsee {tmp_path}"
    assert not job.tail.of("RehearsalFailed")
