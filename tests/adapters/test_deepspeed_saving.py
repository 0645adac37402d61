"""Saves of an engine: `latest` comes last, and files stay whole while they are written again; followers are told."""

import contextlib

import pytest
import torch
from support.stand_in import fake

from deadpool_plugin.adapters.deepspeed import checkpoints
from deadpool_plugin.adapters.deepspeed.checkpoints import Gathering
from deadpool_plugin.worker import codec


def test_a_follower_gets_zeros_of_the_same_shapes_under_the_same_names():
    calls = fake(inside=contextlib.nullcontext)
    tied = torch.ones(3, 2, dtype=torch.bfloat16)
    weights = {"input": tied, "norm": torch.ones(2), "output": tied}
    gathering = Gathering(calls, fake(), lambda engine: weights, (fake(),), {})
    value = gathering()
    assert value is weights and not gathering.gated
    followed = gathering.skipped(codec.decode(codec.encode(gathering.outcome(value))))
    assert followed.keys() == weights.keys() and followed["input"] is followed["output"]
    assert all(followed[name].dtype == one.dtype and followed[name].shape == one.shape for name, one in weights.items())
    assert not any(one.any() for one in followed.values())


def test_on_other_ranks_there_are_none():
    gathering = Gathering(fake(inside=contextlib.nullcontext), fake(), lambda engine: None, (fake(),), {})
    assert gathering() is None and gathering.skipped(gathering.outcome(None)) is None


@pytest.fixture
def save(monkeypatch, tmp_path):
    """Makes a save of rank `rank`, whose part is `part`; `seen` has what `latest` said whenever all ranks met."""
    folders = fake(one_folder=str, one_tag=lambda folder, tag: f"agreed-{tag}")
    saves = fake(folders=folders, written=lambda *_, **__: None)
    calls = fake(inside=contextlib.nullcontext)
    engine = fake(use_node_local_storage=lambda: False)
    latest = tmp_path / "latest"

    seen: list[str] = []

    def meet():
        seen.append(latest.read_text() if latest.exists() else "")

    def make(rank, part, **more):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(checkpoints, "dist", fake(get_rank=lambda: rank, barrier=meet))

        def save_checkpoint(self, save_dir, tag=None, save_latest=True):
            """As DeepSpeed's, which names the checkpoint before all ranks meet."""
            (tmp_path / tag).mkdir(exist_ok=True)
            torch.save(part, f"{save_dir}/{tag}/part{rank}.pt", _use_new_zipfile_serialization=False)
            if save_latest and rank == 0:
                latest.write_text(tag)
            meet()
            return True

        return checkpoints.CheckpointSave(calls, saves, save_checkpoint, (engine, str(tmp_path)), {"tag": "8", **more})

    return fake(make=make, seen=seen)


@pytest.mark.parametrize(("rank", "said"), [(0, ["", "agreed-8"]), (1, ["", ""])])
def test_a_checkpoint_is_named_the_latest_when_all_ranks_have_written_it(save, tmp_path, rank, said):
    plain = torch.save
    assert save.make(rank, 1)() is True and save.seen == said and torch.save is plain
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agreed-8", *(["latest"] if rank == 0 else [])]


def test_a_script_that_names_the_latest_itself_may(save, tmp_path):
    assert save.make(0, 1, save_latest=False)() is True and save.seen == [""] and not (tmp_path / "latest").exists()


class Unwritable:
    def __reduce__(self):
        raise RuntimeError("the process is killed here")


def test_a_complete_checkpoint_stays_whole_while_it_is_saved_again(save, tmp_path):
    save.make(0, {"step": 8})()
    with pytest.raises(RuntimeError, match="killed here"):
        save.make(0, {"step": 8, "state": Unwritable()})()
    assert torch.load(tmp_path / "agreed-8" / "part0.pt") == {"step": 8}
    assert (tmp_path / "latest").read_text() == "agreed-8"
