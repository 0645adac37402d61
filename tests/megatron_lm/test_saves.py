"""pretrain_gpt.py saves every fifth step and is struck inside a save: no checkpoint is torn, none differs by a bit."""

import pytest
from faults.plan import Kill
from megatron_lm import base_job, jobs
from support.checkpoints import content, equal
from support.zygote import in_zygote

STEPS = 12
BEHIND = ["--async-save", "--use-persistent-ckpt-worker"]
"""Without the second one, core_v0.16.1 takes the first one back (arguments.py, `validate_args`)."""
SAVED = ["iter_0000005", "iter_0000010", "iter_0000012"]


def contents(run, name):
    """All that is in one of the run's checkpoints but the path it was to be saved in."""
    found = content(run / "checkpoints" / name)
    found["common.pt"]["args"].save = ""
    return found


def complete(run):
    return sorted(path.parent.name for path in (run / "checkpoints").glob("iter_*/.metadata"))


def schedules_writers(run):
    return any("scheduled an async checkpoint save" in line for line in jobs.printed(run, 0))


@pytest.mark.parametrize(
    ("more", "step", "rank", "phase"),
    [
        ([], 5, 2, "write"),
        ([], 5, 0, "finishing"),
        (BEHIND, 5, 2, "write"),
        (BEHIND, 5, 0, "finishing"),
        (BEHIND, STEPS, 2, "waiting"),
    ],
    ids=["writing", "about to complete", "writing behind", "about to complete behind", "all wait for the last one"],
)
@in_zygote
def test_a_node_is_killed_inside_a_save(tmp_path, checkout, corpus, references, more, step, rank, phase):
    jobs.preload(checkout)
    words = base_job.arguments(corpus, STEPS, "--save", "{folder}/checkpoints", "--save-interval", "5", *more)
    training = jobs.Training(checkout, words, references)
    verdict, job = training.protected(tmp_path / "job", [Kill(0, -1, step, phase, rank=rank, hold=4)])
    assert verdict.holds and verdict.bit_exact, f"{verdict.as_json()}\nsee {tmp_path}"
    assert not job.tail.of("RankLost"), "who was not killed survives"
    expected = training.undisturbed()
    assert complete(expected) == SAVED
    assert schedules_writers(expected) == schedules_writers(job.cluster.output) == bool(more)
    cancelled = {event["step"] for event in job.tail.of("CheckpointCancelled")}
    assert cancelled in ({step}, set()) and (more or not cancelled)
    given_up = SAVED[:1] if cancelled and job.tail.of("SwapPlanned")[0]["restore_step"] > step else []
    assert [name for name in SAVED if name not in given_up] == complete(job.folder)
    for name in complete(job.folder):
        ours, theirs = contents(job.folder, name), contents(expected, name)
        assert [key for key in theirs if not equal(theirs[key], ours.get(key))] == [] and ours.keys() == theirs.keys()
    assert (job.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
