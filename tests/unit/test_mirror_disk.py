"""A job's state on disk: what is written is read again bit for bit, or refused by name."""

import contextlib
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import present
from support.stores import free

from deadpool_plugin.core.types import Holding
from deadpool_plugin.errors import StorageError
from deadpool_plugin.mirror import disk
from deadpool_plugin.mirror.arena import SlotPair
from deadpool_plugin.mirror.disk import Manifest, Overtaken
from deadpool_plugin.mirror.store import SnapshotStore
from deadpool_plugin.mirror.wire import FRAME_BYTES

PAYLOAD_BYTES = FRAME_BYTES + 100
MUTATIONS = 2000
SEED = 28


def manifest(step: int = 7, node: int = 1, job: str = "job") -> Manifest:
    return Manifest(job, node, 3, step, 2, ["train.py", "--lr", "1"], {"torch": "2"})


def content(rank: int, step: int) -> bytes:
    return random.Random(f"{rank} {step}").randbytes(PAYLOAD_BYTES)


@pytest.fixture
def store():
    """Rank 0 runs here, with steps 7 and 8; rank 1 is mirrored, its header alone."""
    store = SnapshotStore()
    pair = store.create_own(0, 4096, PAYLOAD_BYTES)
    for step in (7, 8):
        pair.invalidate(step)
        pair.payload(step)[:] = content(0, step)
        pair.seal(step, 2, "layout", b"scalars of 0", paired=5)
        store.staged(0, step, 0, (0, 1))
    mirror = store.begin_mirror(1, 7, 0, 4096, 0)
    other = SlotPair.create(1, 4096, 0)
    other.seal(7, 2, "layout", b"scalars of 1", paired=6)
    encoded = present(other.sealed(7)).encoded
    other.close()
    store.finish_mirror(mirror, encoded, 0, Holding(1, 7, False, (0, 1), 6), [b"last"], ())
    for rank in (0, 1):
        store.recordings[rank] = b"recording of %d" % rank
        store.history(rank).append(8, *(b"record %d of %d" % (step, rank) for step in range(9)))
    yield store
    free(store)


def read_back(folder: Path) -> list[object]:
    """All that can be read of a folder. Raises: StorageError."""
    found, read = disk.load(folder), list[object]()
    read.append(found)
    with contextlib.ExitStack() as slots:
        pairs = [SlotPair.create(rank, 4096, PAYLOAD_BYTES) for rank in (0, 1)]
        for pair in pairs:
            slots.callback(pair.close)
        for one in found.snapshots:
            disk.read_snapshot(folder, one, pairs[one.rank])
            read.append(bytes(pairs[one.rank].payload(one.step)) if one.payload is not None else b"")
    for its in found.ranks:
        read += [disk.read_recording(folder, its), disk.read_history(folder, its)]
    return read


def test_what_is_written_is_read_again(store, tmp_path):
    written = disk.write(tmp_path, manifest(), store)
    folder = tmp_path / "job" / "3.7" / "node1.end"
    assert [(one.rank, one.step, one.payload is not None) for one in written.snapshots] == [
        (0, 7, True), (0, 8, True), (1, 7, False)
    ]  # fmt: skip
    found, *read = read_back(folder)
    assert found == written and written.nbytes == sum(path.stat().st_size for path in folder.glob("rank*"))
    records = [[b"record %d of %d" % (step, rank) for step in range(9)] for rank in (0, 1)]
    assert read == [content(0, 7), content(0, 8), b"", b"recording of 0", records[0], b"recording of 1", records[1]]
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o600"}
    assert folder.stat().st_mode & 0o777 == 0o700
    ([shelf], problems) = disk.shelves(tmp_path / "job")
    assert shelf.folder == folder and not problems


def test_only_the_committed_step_and_newer_ones_are_written(store, tmp_path):
    written = disk.write(tmp_path, manifest(step=8), store)
    assert [(one.rank, one.step) for one in written.snapshots] == [(0, 8)]


def test_what_is_overwritten_meanwhile_is_left_out(store, tmp_path):
    present(store.own(0)).invalidate(9)
    written = disk.write(tmp_path, manifest(), store)
    assert [(one.rank, one.step) for one in written.snapshots] == [(0, 8), (1, 7)]


def test_while_the_job_runs_a_step_is_written_alone_and_whole_or_not_at_all(store, tmp_path):
    written = disk.write(tmp_path, manifest(), store, of_ranks=(0, 1))
    assert [(one.rank, one.step) for one in written.snapshots] == [(0, 7), (1, 7)]
    assert disk.folder_of(tmp_path, manifest()).is_dir()
    check = store.check_read

    def overtaken(read, sums):
        present(store.own(0)).invalidate(9)
        check(read, sums)

    store.check_read = overtaken
    with pytest.raises(Overtaken, match="rank 0, step 7 was overwritten while it was read"):
        disk.write(tmp_path / "again", manifest(), store, of_ranks=(0, 1))
    assert not [path for path in (tmp_path / "again").rglob("*") if path.is_file()]


def test_what_is_overtaken_before_it_is_looked_at_is_not_written_either(store, tmp_path):
    present(store.own(0)).invalidate(9)
    with pytest.raises(Overtaken, match=r"step 7 of rank\(s\) 0 is not in memory any more"):
        disk.write(tmp_path, manifest(), store, of_ranks=(0, 1))
    present(store.own(0)).invalidate(8, keep=9)
    store.release(1)
    with pytest.raises(Overtaken, match=r"rank\(s\) 0, 1"):
        disk.write(tmp_path, manifest(), store, of_ranks=(0, 1))
    assert disk.shelves(tmp_path / "job") == ([], [])


def test_what_was_written_while_the_job_ran_and_what_its_end_leaves_stand_side_by_side(store, tmp_path):
    disk.write(tmp_path, manifest(), store, of_ranks=(0, 1))
    ended = disk.write(tmp_path, manifest(), store)
    assert [(one.rank, one.step) for one in ended.snapshots] == [(0, 7), (0, 8), (1, 7)]
    assert len(disk.shelves(tmp_path / "job")[0]) == 2
    disk.remove(disk.folder_of(tmp_path, manifest()))
    (left,), _ = disk.shelves(tmp_path / "job")
    assert left.manifest == ended


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_of_what_cannot_be_written_nothing_is_left(store, tmp_path, monkeypatch, call):
    def fails(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path if call == "rename" else os, call, fails)
    with pytest.raises(StorageError, match="node1.end cannot be written: No space left on device"):
        disk.write(tmp_path, manifest(), store)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert disk.shelves(tmp_path / "job") == ([], [])


def test_a_writer_that_was_killed_leaves_nothing_that_counts(store, tmp_path):
    """Whatever it had written by then, the folder has not got its name; the next one begins anew."""
    disk.write(tmp_path, manifest(), store)
    folder = tmp_path / "job" / "3.7" / "node1.end"
    draft = folder.with_name(".node1.end.draft")
    folder.rename(draft)
    assert disk.shelves(tmp_path / "job") == ([], [])
    disk.write(tmp_path, manifest(), store)
    assert not draft.exists() and len(disk.shelves(tmp_path / "job")[0]) == 1


class PowerCuts:
    """What a disk may hold after a power cut: of a file, what it had when it was last synced, and any part of what was
    written since; of a folder, the entries that it had then, and any of the changes since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, top: Path) -> None:
        self.top, self.ops = top, list[tuple[str, Path, Any]]()
        self._names: dict[int, Path] = {}
        open_, write, fsync, rename, mkdir = os.open, os.write, os.fsync, Path.rename, Path.mkdir

        def opened(path, flags, *mode):
            descriptor = open_(path, flags, *mode)
            self._names[descriptor] = Path(path)
            if flags & os.O_CREAT:
                self.ops.append(("enter", Path(path), b""))
            return descriptor

        def written(descriptor, data):
            count = write(descriptor, data)
            self.ops.append(("write", self._names[descriptor], bytes(data[:count])))
            return count

        def synced(descriptor):
            fsync(descriptor)
            self.ops.append(("sync", self._names[descriptor], None))

        def renamed(path, target):
            rename(path, target)
            self.ops.append(("rename", path, target))

        def made(path, mode=0o777, parents=False, exist_ok=False):
            if not path.exists():
                self.ops.append(("enter", path, None))
            mkdir(path, mode, parents=parents, exist_ok=exist_ok)

        for owner, name, function in (
            (os, "open", opened), (os, "write", written), (os, "fsync", synced), (Path, "rename", renamed),
            (Path, "mkdir", made),
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, function)

    def after(self, count: int, draw: random.Random, into: Path) -> None:
        """Lay out in `into` what the disk may hold if power fails after `count` operations."""
        data, kept = dict[Path, bytes](), dict[Path, bytes]()  # by the name under which it was made
        pending, entries = list[tuple[str, Path, Any]](), dict[Path, Path | None]()  # name -> file, None: a folder
        for kind, path, what in self.ops[:count]:
            if kind == "write":
                data[path] = data.get(path, b"") + what
            elif kind == "sync" and path in data:
                kept[path] = data[path]
            elif kind == "sync":
                done = [op for op in pending if path in (op[1].parent, op[2] if op[0] == "rename" else None)]
                pending = [op for op in pending if op not in done]
                for op in done:
                    self._apply(op, entries)
            else:
                pending.append((kind, path, what))
        for op in pending:
            if draw.random() < 0.5:
                self._apply(op, entries)
        for name, inode in sorted(entries.items()):
            place = into / name.relative_to(self.top)
            if not all((into / parent.relative_to(self.top)).is_dir() for parent in name.parents if parent > self.top):
                continue
            if not place.parent.is_dir():
                continue
            if inode is None:
                place.mkdir(exist_ok=True)
                continue
            some = data.get(inode, b"")
            least = len(kept.get(inode, b""))
            place.write_bytes(some[: draw.choice([least, len(some), draw.randint(least, len(some))])])
            place.chmod(0o600)

    @staticmethod
    def _apply(op: tuple[str, Path, Any], entries: dict[Path, Path | None]) -> None:
        kind, path, what = op
        if kind == "enter":
            entries[path] = path if what is not None else None
            return
        for name in [name for name in entries if name == path or path in name.parents]:
            entries[what / name.relative_to(path)] = entries.pop(name)


def test_a_power_cut_at_any_moment_leaves_nothing_that_is_read_wrong(store, tmp_path, monkeypatch):
    """And once it is said to be written it is there, whatever the disk had not been asked to sync."""
    top = tmp_path / "disk"
    top.mkdir()
    with monkeypatch.context() as patch:
        cuts = PowerCuts(patch, top)
        disk.write(top, manifest(), store)
    expected, draw = read_back(top / "job" / "3.7" / "node1.end"), random.Random(SEED)
    counts = [*(draw.randrange(len(cuts.ops)) for _ in range(60)), *[len(cuts.ops)] * 20]
    found = 0
    for number, count in enumerate(counts):
        folder = tmp_path / f"cut{number}"
        folder.mkdir()
        cuts.after(count, draw, folder)
        whole, problems = disk.shelves(folder / "job")
        for shelf in whole:
            try:
                assert read_back(shelf.folder) == expected, f"cut {number} of seed {SEED}"
                found += 1
            except StorageError as error:
                problems.append(str(error))
        assert count < len(cuts.ops) or (len(whole) == 1 and not problems), f"cut {number} of seed {SEED}: {problems}"
        shutil.rmtree(folder)
    assert found >= 20


def test_mutated_files_are_refused_by_name_or_read_right(store, tmp_path):
    disk.write(tmp_path, manifest(), store)
    folder, foreign = tmp_path / "job" / "3.7" / "node1.end", tmp_path / "other"
    shutil.copytree(folder, foreign)
    expected = read_back(folder)
    (foreign / "rank0.recording").write_bytes(b"recording of X")
    (foreign / "rank0.history").write_bytes(b"\xff" * 10)
    (foreign / "rank0.step7.payload").write_bytes(content(1, 7))
    draw, refused = random.Random(SEED), 0
    names = sorted(path.name for path in folder.iterdir())
    kept = {name: (folder / name).read_bytes() for name in names}
    for number in range(MUTATIONS):
        name = draw.choice(names)
        path, data = folder / name, bytearray(kept[name])
        match draw.choice(["flip", "flip", "cut", "add", "swap", "gone", "foreign", "zero"]):
            case "flip":
                for _ in range(draw.choice([1, 1, 8])):
                    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                path.write_bytes(data)
            case "cut":
                path.write_bytes(data[: draw.randrange(len(data) + 1)])
            case "add":
                path.write_bytes(data + draw.randbytes(draw.randint(0, 9)))
            case "swap":
                path.write_bytes(kept[draw.choice(names)])
            case "gone":
                path.unlink()
            case "foreign":
                path.write_bytes((foreign / name).read_bytes())
            case "zero":
                start = draw.randrange(len(data))
                data[start : start + 64] = bytes(len(data[start : start + 64]))
                path.write_bytes(data)
        try:
            assert read_back(folder) == expected, f"mutation {number} of seed {SEED} is read wrong"
        except StorageError as error:
            assert name in str(error), f"mutation {number} of seed {SEED}: {error}"
            refused += 1
        path.write_bytes(kept[name])
        path.chmod(0o600)
    assert refused > MUTATIONS / 2


def test_a_file_of_another_version_is_named(store, tmp_path):
    disk.write(tmp_path, manifest(), store)
    path = tmp_path / "job" / "3.7" / "node1.end" / "manifest"
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(data)
    _, [problem] = disk.shelves(tmp_path / "job")
    assert "manifest has format 9; expected format 1" in problem


def test_a_file_that_others_could_have_written_is_refused(store, tmp_path):
    disk.write(tmp_path, manifest(), store)
    folder = tmp_path / "job" / "3.7" / "node1.end"
    (folder / "rank0.recording").chmod(0o622)
    with pytest.raises(StorageError, match="mode 622.* may have been written by others"):
        read_back(folder)
    (folder / "rank0.recording").unlink()
    (folder / "rank0.recording").symlink_to("/etc/hostname")
    with pytest.raises(StorageError, match="rank0.recording cannot be read"):
        read_back(folder)
