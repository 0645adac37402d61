"""pretrain_gpt.py --exit-signal-handler: a whole host is told to end (SIGTERM), and the job saves and ends well."""

import re
import signal

from clusters import processes
from compare_runs import read_run
from faults.job import Hang, Job
from megatron_lm import jobs
from support.zygote import in_zygote


@in_zygote
def test_a_host_that_is_told_to_end_ends_the_job_behind_a_checkpoint(tmp_path, checkout, corpus):
    jobs.preload(checkout)
    folder = tmp_path / "job"
    words = jobs.arguments(
        corpus, 400, "--save", f"{folder}/checkpoints", "--save-interval", "1000", "--exit-signal-handler"
    )
    job = Job(folder, [str(checkout / "pretrain_gpt.py"), *words], 8, 2, 1, [], script=jobs.PRETRAIN)
    cluster, tail = job.cluster, job.tail
    try:
        cluster.start()
        job.until("steps", lambda: tail.protected and len(tail.of("StepDone")) > 40)
        leader = cluster.nodes[2].leader
        for pid in processes.living(leader) - {leader}:
            processes.send(pid, signal.SIGTERM)
        job.until("the end", lambda: len(tail.of("NodeEnded")) == 5)
        assert cluster.close(grace_s=5.0) == []
    except Hang as hang:
        cluster.dump_stacks(folder / "stacks")
        raise AssertionError(f"{hang}; see {folder}") from hang
    finally:
        cluster.close(grace_s=0.0)
    tail.read()
    assert [event["exit_code"] for event in tail.of("NodeEnded")] == [0] * 5
    assert not tail.of("NodeLost") and not tail.of("RankLost")
    saved = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert (folder / "checkpoints" / f"iter_{saved:07d}" / ".metadata").exists()
    assert all(max(lines) == saved for lines in read_run(cluster.output).metrics.values())
    assert any(re.search("exiting program after receiving", line) for line in jobs.printed(cluster.output, 0))
