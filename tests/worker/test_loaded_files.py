"""What a rank has read of a checkpoint is shown to a process that follows it, also if it is gone or another one."""

import glob
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from deadpool_plugin.errors import Divergence
from deadpool_plugin.worker import codec
from deadpool_plugin.worker.file_view import FileView, Looks
from deadpool_plugin.worker.loaded_files import Loads

BIG = (300, 100)
LIMIT = 1 << 20


@pytest.fixture
def recorded():
    """`recorded(start_up)`: what is recorded of it, and the files that are too large; `view` shows that."""
    views = []

    def record(start_up, limit=LIMIT):
        looks, loads = Looks(), Loads()
        try:
            start_up()
        finally:
            folders = looks.finish()
            files, too_large = loads.finish(looks.opened, limit)
        return codec.decode(codec.encode([folders, files])), too_large

    def view(said):
        views.append(FileView(*said))

    record.view = view  # type: ignore[attr-defined]
    yield record
    for one in views:
        one.lift()


@pytest.fixture
def folder(tmp_path):
    """A folder with a checkpoint of `torch.save` in it, and other files."""
    folder = tmp_path / "all" / "step5"
    folder.mkdir(parents=True)
    torch.save({"big": torch.ones(BIG), "step": torch.tensor(5), "name": "first"}, folder / "state.pt")
    (folder.parent / "latest").write_text("step5\n")
    (folder.parent / "unread").write_text("nobody reads this")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "table").write_text("data")
    return folder


def start_up(folder):
    """Find and load the newest checkpoint. Returns: its file, and all that is not large in it."""
    name = (folder.parent / "latest").read_text().strip()
    (folder.parent.parent / "elsewhere" / "table").read_text()
    found = folder.parent / name
    assert found.is_dir() and os.access(found, os.R_OK) and glob.glob(f"{folder.parent}/step*") == [str(found)]
    assert os.listdir(found) == ["state.pt"] and [one.name for one in os.scandir(found)] == ["state.pt"]
    return found / "state.pt"


def lose(folder):
    shutil.rmtree(folder)


def move_on(folder):
    shutil.rmtree(folder)
    (folder.parent / "latest").write_text("step9\n")


def write_another(folder):
    torch.save({"big": torch.zeros(BIG), "step": torch.tensor(9), "name": "other"}, folder / "state.pt")


@pytest.mark.parametrize("change", [lose, move_on, write_another])
def test_a_follower_sees_the_objects_that_the_rank_saw(recorded, folder, change):
    from deadpool_plugin.worker.light import Unread

    said, too_large = recorded(lambda: torch.load(start_up(folder)))
    assert not too_large
    change(folder)
    recorded.view(said)
    unread = Unread(lambda text: None)
    try:
        loaded = torch.load(start_up(folder), mmap=True)
        assert loaded["name"] == "first" and loaded["step"] == 5 and loaded["big"].shape == BIG
        with pytest.raises(Divergence, match=r"a tensor is needed of .*state\.pt, which (is gone|was changed) since"):
            loaded["big"].sum()
    finally:
        unread.finish([])


def test_a_copy_of_the_file_on_another_host_is_as_good(recorded, folder):
    from deadpool_plugin.worker.light import Unread

    said, _ = recorded(lambda: torch.load(start_up(folder)))
    os.utime(folder / "state.pt", (5, 5))
    recorded.view(said)
    unread = Unread(lambda text: None)
    try:
        assert torch.load(start_up(folder))["big"].sum() == 300 * 100
        assert unread.read_bytes == 4 * 300 * 100
    finally:
        unread.finish([])


def test_only_what_belongs_to_a_checkpoint_and_was_read_is_recorded(recorded, folder):
    (_, files), _ = recorded(lambda: torch.load(start_up(folder)))
    paths = {Path(os.fsdecode(record[0])) for record in files if len(record) > 2}
    assert paths == {folder / "state.pt", folder.parent / "latest"}
    assert sum(len(record[-1]) for record in files) < 20_000 < (folder / "state.pt").stat().st_size
    (_, none), _ = recorded(lambda: (folder.parent / "latest").read_text())
    assert none == []


def test_a_file_whose_record_would_be_too_large_is_named_and_must_stay(recorded, folder):
    with open(folder / "vocabulary", "wb") as file:
        file.write(os.urandom(300_000))

    def load():
        (folder / "vocabulary").read_bytes()
        torch.load(folder / "state.pt")

    said, too_large = recorded(load, limit=100_000)
    assert too_large == [str(folder / "vocabulary")]
    lose(folder)
    recorded.view(said)
    with pytest.raises(FileNotFoundError):
        (folder / "vocabulary").read_bytes()


def test_of_a_distributed_checkpoint_the_objects_this_rank_asked_for_are_recorded(recorded, tmp_path):
    from deadpool_plugin.worker.light import Unread

    def state():
        return {"big": torch.zeros(BIG), "small": torch.zeros(4), "iteration": 0, "other": torch.zeros(4)}

    def load():
        mine = state()
        del mine["other"]
        dcp.load(mine, checkpoint_id=tmp_path / "saved", no_dist=True)
        return mine

    full = {"big": torch.ones(BIG), "small": torch.ones(4), "iteration": 7, "other": torch.ones(4)}
    dcp.save(full, checkpoint_id=tmp_path / "saved", no_dist=True)
    said, too_large = recorded(load)
    assert not too_large and sum(len(record[-1]) for record in said[1]) < 20_000
    shutil.rmtree(tmp_path / "saved")
    recorded.view(said)
    unread = Unread(lambda text: None)
    mine = load()
    assert mine["iteration"] == 7 and mine["small"].all() and unread.read_bytes == 0
    unread.finish([mine["big"]])
