"""Every process of a host is told to end (SIGTERM), as deepspeed's launcher and schedulers do: a script that handles it
itself saves and ends the job well; any other loses the host and goes on."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]

from support.zygote import in_zygote  # noqa: E402

pytest.importorskip("megatron.core")

from clusters import forked_node  # noqa: E402
from faults.job import Job  # noqa: E402
from gpt.layouts import LAYOUTS  # noqa: E402
from support import told  # noqa: E402

forked_node.import_all([name for name in forked_node.PRELOAD if name != "patches.cpu.applied"])  # for the forks


def job_of(folder, corpus, script):
    """Four ranks on two hosts, and a spare."""
    forked_node.preload()
    words = ["--data-path", corpus, "--train-iters", 100_000, "--eval-interval", 0]
    training = [*LAYOUTS["dp4"].arguments, *map(str, words)]
    return Job(folder, training, 4, 2, 1, [], script=script)


@in_zygote
def test_a_script_that_handles_it_saves_and_ends_the_job(tmp_path, corpus):
    os.environ["SAVED"] = str(tmp_path)
    job = job_of(tmp_path / "job", corpus, HERE / "saving_handler.py")
    assert told.tell_one(job, 1, 20, lambda codes: None not in codes) == [0, 0, 0]
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [f"rank{rank}.pt" for rank in range(4)]
    assert any("the script handles that itself" in event["text"] for event in job.tail.of("Note"))
    assert not job.tail.of("NodeLost") and not job.tail.of("RankLost")


@pytest.mark.slow
@in_zygote
def test_any_other_script_goes_on_without_the_host(tmp_path, corpus):
    job = job_of(tmp_path / "job", corpus, ROOT / "scripts" / "train_gpt.py")
    codes = told.tell_one(job, 1, 20, lambda codes: codes[1] and job.tail.of("SwapDone"))
    assert codes[0] is codes[2] is None
    assert [event["lost"] for event in job.tail.of("NodeLost")] == [[1]]
