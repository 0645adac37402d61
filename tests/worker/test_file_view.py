"""A rehearsal's view of files that came to be after the start-up of the rank it rehearses."""

import glob
import os
import shutil

import pytest
from support.stand_in import fake

from deadpool_plugin.errors import Divergence
from deadpool_plugin.worker import codec
from deadpool_plugin.worker.calls import Call, CallKind
from deadpool_plugin.worker.file_view import FileView, Looks
from deadpool_plugin.worker.follow import Follow


@pytest.fixture
def rehearsed(tmp_path):
    """`rehearsed(start_up, training)`: a view of files after both, by what the first has looked for."""
    views = []

    def view(start_up, training):
        looks = Looks()
        try:
            start_up()
        finally:
            recorded = codec.decode(codec.encode(looks.finish()))
        training()
        views.append(FileView(recorded))
        return views[-1]

    yield view
    for one in views:
        one.lift()


LOOKS = {
    "exists": lambda path: os.path.exists(path),
    "isdir": lambda path: os.path.isdir(path / "below"),
    "pathlib": lambda path: path.is_dir() or (path / "state.json").is_file(),
    "link": lambda path: os.path.lexists(path),
    "access": lambda path: os.access(path, os.R_OK),
    "listdir": lambda path: path.name in os.listdir(path.parent),
    "scandir": lambda path: path.name in [entry.name for entry in os.scandir(path.parent)],
    "glob": lambda path: glob.glob(f"{path.parent}/ch*"),
    "rglob": lambda path: [one for one in path.parent.rglob("*") if one.name != "was there"],
    "walk": lambda path: [name for _, folders, _ in os.walk(path.parent) for name in folders],
    "relative": lambda path: os.path.exists(os.path.relpath(path)),
    "bytes": lambda path: os.fsencode(path.name) in os.listdir(os.fsencode(path.parent)),
}


def reads(path):
    try:
        return (path / "state.json").read_text()
    except FileNotFoundError:
        return ""


LOOKS["open"] = reads


def save(path):
    (path / "below").mkdir(parents=True)
    (path / "state.json").write_text("{}")


LISTS = ("listdir", "scandir", "bytes")
"""Looks that need the folder itself."""


@pytest.mark.parametrize(
    ("look", "folder"), [(look, "") for look in LOOKS] + [(look, "runs/first") for look in LOOKS if look not in LISTS]
)
def test_a_checkpoint_saved_since_is_hidden_until_the_loop_begins(tmp_path, rehearsed, look, folder):
    path = tmp_path / folder / "checkpoint-4"
    (tmp_path / "was there").touch()
    sees = LOOKS[look]
    view = rehearsed(lambda: sees(path), lambda: save(path))
    assert not sees(path)
    assert os.path.exists(tmp_path / "was there")
    view.lift()
    assert sees(path)


def test_functions_that_a_script_has_kept_hide_nothing_from_its_loop(tmp_path, rehearsed):
    """`from os import listdir, stat` in a module that was imported during start-up."""
    path = tmp_path / "checkpoint-4"
    view = rehearsed(lambda: (os.path.exists(path), os.listdir(tmp_path)), lambda: save(path))
    stat, listdir = os.stat, os.listdir
    with pytest.raises(FileNotFoundError):
        stat(path)
    assert listdir(tmp_path) == []
    view.lift()
    assert stat(path) and listdir(tmp_path) == [path.name]


def test_what_start_up_itself_made_is_seen_as_it_is(tmp_path, rehearsed):
    """Else a rehearsal would build a cache again that others have mapped into memory."""
    cache = tmp_path / "cache" / "index.npy"

    def start_up():
        if not cache.exists():
            cache.parent.mkdir()
            cache.write_text("built")

    rehearsed(start_up, lambda: None)
    assert cache.exists() and os.listdir(cache.parent) == ["index.npy"]


def test_what_nobody_looked_for_is_seen_as_it_is(tmp_path, rehearsed):
    rehearsed(lambda: os.path.exists(tmp_path / "other"), lambda: save(tmp_path / "checkpoint-4"))
    assert (tmp_path / "checkpoint-4").is_dir() and os.listdir(tmp_path) == ["checkpoint-4"]


def test_another_hosts_directory_of_the_same_name_is_seen_as_it_is(tmp_path, rehearsed):
    local, other = tmp_path / "local", tmp_path / "other"
    local.mkdir()

    def replaced():
        os.rename(local, other)
        save(local / "checkpoint-4")

    rehearsed(lambda: [os.listdir(local), os.path.exists(local / "checkpoint-4")], replaced)
    assert os.listdir(local) == ["checkpoint-4"] and (local / "checkpoint-4").is_dir()


def test_what_a_rehearsal_makes_itself_it_sees(tmp_path, rehearsed):
    """A file that the rank made, and removed again before its start-up ended, above all."""
    draft, folder, moved = tmp_path / "draft", tmp_path / "a" / "b", tmp_path / "moved"
    rehearsed(lambda: [os.listdir(tmp_path), draft.exists(), folder.exists(), moved.exists()], lambda: None)
    draft.write_text("of the rehearsal")
    folder.mkdir(parents=True)
    assert draft.read_text() and folder.is_dir() and sorted(os.listdir(tmp_path)) == ["a", "draft"]
    draft.replace(moved)
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT))
    assert moved.exists() and draft.exists()


def last_checkpoint(output):
    """As most training scripts of transformers 4 resume."""
    if not os.path.isdir(output):
        return None
    found = [name for name in os.listdir(output) if name.startswith("checkpoint-")]
    if not found and any(os.scandir(output)):
        raise ValueError("the output folder is not empty")
    return max(found, default=None)


@pytest.mark.parametrize("was_there", [True, False], ids=["empty_before", "not_there_before"])
@pytest.mark.parametrize("logs", [True, False], ids=["logs", "no_logs"])
def test_a_folder_that_start_up_makes_or_fills_looks_empty_as_it_did(tmp_path, rehearsed, was_there, logs):
    output, index = tmp_path / "out", tmp_path / "out" / "index.npy"
    if was_there:
        output.mkdir()

    def start_up():
        assert last_checkpoint(output) is None
        output.mkdir(exist_ok=True)
        index.touch()
        if logs:  # as a monitor does once training begins
            (output / "runs").mkdir()

    rehearsed(start_up, lambda: save(output / "checkpoint-4"))
    assert last_checkpoint(output) is None
    assert not glob.glob(f"{output}/checkpoint-*/state.json") and not (output / "checkpoint-4").exists()
    assert index.exists(), "what start-up made is there for whoever knows its name"
    (output / "checkpoint-0").mkdir()
    assert last_checkpoint(output) == "checkpoint-0"


def test_a_checkpoint_that_start_up_found_in_a_listing_is_found_again(tmp_path, rehearsed):
    for before in ("checkpoint-4", "notes"):
        (tmp_path / before).mkdir()
    rehearsed(lambda: last_checkpoint(tmp_path), lambda: save(tmp_path / "checkpoint-8"))
    assert last_checkpoint(tmp_path) == "checkpoint-4" and sorted(os.listdir(tmp_path)) == ["checkpoint-4", "notes"]


def test_a_walk_through_data_is_forgotten_and_the_short_listings_are_not(tmp_path, rehearsed, monkeypatch):
    """A tree of a million files costs the rank, and all who rehearse it, no memory."""
    monkeypatch.setattr("deadpool_plugin.worker.file_view.LISTED_MAX", 40)
    output, later = tmp_path / "out", tmp_path / "logs"
    data = [tmp_path / "data" / str(number) for number in range(20)]
    for folder in (output, later, *data):
        folder.mkdir(parents=True)
    for folder in data:
        for name in "abcdefgh":
            (folder / name).touch()

    def start_up():
        assert os.listdir(output) == []
        assert sum(len(files) for _, _, files in os.walk(tmp_path / "data")) == 160
        assert os.listdir(later) == []

    view = rehearsed(start_up, lambda: [save(folder / "checkpoint-4") for folder in (output, later)])
    assert sum(len(listed or ()) for *_, listed in view._folders.values()) <= 40
    assert os.listdir(output) == os.listdir(later) == [] and len(os.listdir(data[0])) == 8


def test_a_rehearsal_that_misses_a_deleted_checkpoint_says_so(tmp_path, rehearsed):
    """Scripts delete old checkpoints (save_total_limit), also the one that they went on from."""

    def differs(*_):
        raise Divergence("it read other data", "the same batches", "make no random data")

    def rotate():
        shutil.rmtree(tmp_path / "checkpoint-4")
        save(tmp_path / "checkpoint-8")

    def start_up():
        last_checkpoint(tmp_path)
        (tmp_path / "of start-up only").unlink()

    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "of start-up only").touch()
    view = rehearsed(start_up, rotate)
    following = Follow(fake(groups=fake(fact=differs)), 2, "", fake(), view, fake())
    following._context.mode = following
    assert last_checkpoint(tmp_path) is None and view.gone == [str(tmp_path / "checkpoint-4")]
    with pytest.raises(Divergence, match="missed .*/checkpoint-4, deleted since.*save_total_limit"):
        following.call(Call("a fact", CallKind.FACT, last_checkpoint, (tmp_path,)))
