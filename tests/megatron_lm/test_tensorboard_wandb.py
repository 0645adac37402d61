"""pretrain_gpt.py logs to TensorBoard and W&B (offline), and the node that does is killed: one run, each step once."""

import os
from collections import Counter
from typing import Any

import pytest
from faults.plan import Kill
from megatron_lm import base_job, jobs
from support.zygote import in_zygote

STEPS = 10
ITS_OWN = ("local_rank/text_summary", "tensorboard_dir/text_summary", "wandb_save_dir/text_summary")
"""Arguments that differ between two runs."""


def values(folder):
    """(tag, step) -> every value that was logged for it, in all event files."""
    from tensorboard.compat.proto.event_pb2 import Event

    from deadpool_plugin.worker.trackers import last_records

    events = [Event.FromString(data) for path in folder.glob("events.*") for data in last_records(path)]
    logged: Counter[Any] = Counter()
    for event in events:
        for value in event.summary.value:
            logged[value.tag, event.step, "" if value.tag in ITS_OWN else value.SerializeToString()] += 1
    return logged


def run_ids(folder):
    return {path.name.rpartition("-")[2] for path in (folder / "wandb").glob("offline-run-*")}


def run(tmp_path, checkout, corpus, references, *more):
    jobs.preload(checkout)
    training = jobs.Training(checkout, base_job.arguments(corpus, STEPS, *more), references)
    verdict, job = training.protected(tmp_path / "job", [Kill(0, 3, 5, "forward", hold=4)])
    assert verdict.holds and verdict.bit_exact, f"{verdict.as_json()}\nsee {tmp_path}"
    return training.undisturbed(), job.folder


def test_every_value_is_in_tensorboard_once(tmp_path, checkout, corpus, references):
    pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed", exc_type=ImportError)
    tensorboard(tmp_path, checkout, corpus, references)


@in_zygote
def tensorboard(tmp_path, checkout, corpus, references):
    expected, ours = run(tmp_path, checkout, corpus, references, "--tensorboard-dir", "{folder}/tensorboard")
    logged, wanted = values(ours / "tensorboard"), values(expected / "tensorboard")
    assert wanted <= logged and set(logged.values()) == {1} and len(wanted) > STEPS * 4
    more = sorted(tag for tag, *_ in logged - wanted)  # of the last evaluation, which nobody flushes
    assert more in ([], ["lm loss validation", "lm loss validation vs samples"])
    assert len(list((ours / "tensorboard").glob("events.*"))) == 2  # the lost rank's and the newcomer's


def test_there_is_one_wandb_run(tmp_path, checkout, corpus, references):
    pytest.importorskip("wandb", reason="wandb is not installed", exc_type=ImportError)
    wandb(tmp_path, checkout, corpus, references)


@in_zygote
def wandb(tmp_path, checkout, corpus, references):
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    words = ["--wandb-project", "test", "--wandb-exp-name", "one run", "--wandb-save-dir", "{folder}"]
    expected, ours = run(tmp_path, checkout, corpus, references, *words)
    assert len(run_ids(expected)) == len(run_ids(ours)) == 1
    assert len(list((ours / "wandb").glob("offline-run-*"))) == 2  # `wandb sync` puts them together
