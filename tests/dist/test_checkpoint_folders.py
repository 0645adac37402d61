"""Scripts that look for their newest checkpoint, or name their folder by the clock: whole checkpoints in one place."""

import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from dist import test_deepspeed  # noqa: E402
from faults import deepspeed_hooks  # noqa: E402
from support.killed_ranks import run_with_kills  # noqa: E402
from support.zygote import in_zygote  # noqa: E402

pytestmark = getattr(test_deepspeed, "pytestmark", [])
INSTALLED = {each.version for each in metadata.distributions(name="deepspeed")}
STAGE = 3 if "0.18.9" in INSTALLED else 1
"""ZeRO 1 and 2 of 0.18.9 do not train over gloo, with the plugin or without."""
KILLS = [(1, 6, "backward"), (0, 9, "forward")]


def run(folder, corpus, mode, kills):
    words = [*test_deepspeed.arguments(corpus, f"--zero {STAGE} --save-interval 4")[1:], "--save", str(folder / "out")]
    argv = [str(HERE / "checkpoint_folders.py"), mode, *words]
    return run_with_kills(folder, argv, 2, kills, [], deepspeed_hooks.install)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
@in_zygote
def test_a_replacement_finds_the_folders_its_script_looks_into_as_they_were_at_the_start(tmp_path, corpus):
    """Neither rank has been rehearsed when it is lost, and checkpoints have been saved by then."""
    run(tmp_path, corpus, "resume", KILLS)
    out = tmp_path / "out"
    assert names(out) == ["checkpoint-12", "checkpoint-4", "checkpoint-8", "last.pt"]
    assert torch.load(out / "last.pt") == {"step": 12}


@in_zygote
def test_a_replacement_that_names_another_folder_or_checkpoint_saves_where_the_others_do(tmp_path, corpus):
    """The second one is lost in the middle of a save, which is done again: no process from the start is left then."""
    outcome = run(tmp_path, corpus, "clock", [(1, 6, "backward"), (0, 12, "write")])
    (folder,) = (tmp_path / "out").iterdir()
    tags = ["first-12", "first-4", "first-8"]
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == tags
    assert {"rank0.pt", "rank1.pt"} <= set(names(folder)) and (folder / "latest").read_text() == "first-12"
    assert names(folder / "first-4") == names(folder / "first-8") == names(folder / "first-12")
    # The weights (each rank's part of them in ZeRO 3), and each rank's part of the optimizer.
    assert len(names(folder / "first-12")) == {1: 3, 3: 4}[STAGE]
    assert [len(whole(folder, tag)) for tag in tags] == [len(whole(folder, tags[0]))] * 3
    assert [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)] == [{"step": 12}] * 2
    said = [fields["text"] for events in outcome.events.values() for kind, fields in events if kind == "Note"]
    assert sum(f"saves to {folder}" in text for text in said) == 2, said
    assert sum("rank(s) 1 name a checkpoint" in text and "it as first-8" in text for text in said) == 1, said


def whole(folder, tag):
    """The weights in it, put together from every rank's part."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(folder), tag)


@pytest.mark.slow
@in_zygote
def test_a_checkpoint_in_two_folders_ends_the_job_before_it_is_written(tmp_path, corpus):
    with pytest.raises(AssertionError, match=r"cannot be loaded: rank\(s\) 0 to .*run.0; rank\(s\) 1 to .*run.1"):
        run(tmp_path, corpus, "apart", [])
    assert not (tmp_path / "out").exists()
