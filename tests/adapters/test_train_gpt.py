"""Options of scripts/train_gpt.py that stand for a larger job: a checkpoint that takes long to read, and its making."""

import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.stand_in import fake


def test_reading_slowly_takes_time_for_the_bytes_of_tensors_and_for_nothing_else(train_gpt, tmp_path, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(train_gpt.checkpoint, "time", fake(sleep=slept.append))
    monkeypatch.setattr(dcp.DefaultLoadPlanner, "commit_tensor", dcp.DefaultLoadPlanner.commit_tensor)  # put back
    state = {"a": torch.ones(100), "b": torch.ones(300, dtype=torch.bfloat16), "text": "x" * 5000}
    dcp.save(state, checkpoint_id=tmp_path)
    train_gpt.checkpoint.read_slowly(0.01)
    assert slept == []
    dcp.load({name: state[name] for name in ("b", "text")}, checkpoint_id=tmp_path)
    assert slept == [pytest.approx(6.0)]
    dcp.load(state, checkpoint_id=tmp_path)
    assert sorted(slept[1:]) == [pytest.approx(4.0), pytest.approx(6.0)]


def test_a_run_ends_with_a_checkpoint_at_its_exit_interval(train_gpt, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--data-path", "x", "--save", "y", "--exit-interval", "10"])
    args = train_gpt.parse_args()
    saves = train_gpt.checkpoint.Checkpoints(args, [], fake(), fake())
    saved: list[int] = []
    monkeypatch.setattr(saves, "save", saved.append)
    monkeypatch.setattr(saves, "finish", lambda wait: None)
    assert [step for step in range(1, 13) if saves.after_step(step)] == saved == [10]
    args.save, args.exit_interval, args.train_iters = None, 0, 12
    assert [step for step in range(1, 13) if saves.after_step(step)] == [12] and saved == [10]
