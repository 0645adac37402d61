"""pretrain_gpt.py --exit-signal-handler: a whole host is told to end (SIGTERM), and the job saves and ends well."""

import re

from compare_runs import read_run
from faults.job import Job
from megatron_lm import base_job, jobs
from support import told
from support.zygote import in_zygote


@in_zygote
def test_a_host_that_is_told_to_end_ends_the_job_behind_a_checkpoint(tmp_path, checkout, corpus):
    jobs.preload(checkout)
    folder = tmp_path / "job"
    words = base_job.arguments(
        corpus, 400, "--save", f"{folder}/checkpoints", "--save-interval", "1000", "--exit-signal-handler"
    )
    job = Job(folder, [str(checkout / "pretrain_gpt.py"), *words], 8, 2, 1, [], script=jobs.PRETRAIN)
    tail, output = job.tail, job.cluster.output
    told.tell_one(job, 2, 40, lambda codes: None not in codes)
    assert [event["exit_code"] for event in tail.of("NodeEnded")] == [0] * 5
    assert not tail.of("NodeLost") and not tail.of("RankLost")
    saved = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert (folder / "checkpoints" / f"iter_{saved:07d}" / ".metadata").exists()
    assert all(max(lines) == saved for lines in read_run(output).metrics.values())
    assert any(re.search("exiting program after receiving", line) for line in jobs.printed(output, 0))
