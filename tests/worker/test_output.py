"""worker/mute.py: what a rehearsal prints where nothing can be written, and that it is heard of all the same; files
of a follower before and after it takes over."""

from __future__ import annotations

import asyncio
import builtins
import errno
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stand_in import fake

from deadpool_plugin.host.output import LogFile, Pipe, Writer
from deadpool_plugin.worker import saving
from deadpool_plugin.worker.mute import Mute

REHEARSES = """
import os, sys
from types import SimpleNamespace
from deadpool_plugin.launch.worker import run_script, tell_failing
from deadpool_plugin.worker.mute import Mute
heard = os.dup(1)
mute = Mute(int(sys.argv[1]))
agent = SimpleNamespace(send=lambda message: os.write(heard, message.reason.encode() + b"\\n"))
code = run_script(sys.argv[2:], None, lambda error: tell_failing(agent, 0, error))
mute.lift()
print("heard again", file=sys.__stdout__)
print("heard again", flush=True)
os._exit(code)
"""
PRINTS = """
import ctypes, os, subprocess, sys
for _ in range(100):
    print("a line of the script")
    print("another one", file=sys.stderr, flush=True)
sys.stdout.buffer.write(b"bytes")
os.write(1, b"past Python's streams")
os.write(2, b"-" * (1 << 18))
subprocess.run(["sh", "-e", "-c", "echo of a child; echo and another >&2"], check=True)
c = ctypes.CDLL(None)
assert c.puts(b"of C") >= 0 and c.fflush(None) == 0
"""
TEES = (
    PRINTS
    + """
sys.stderr = open("tee", "w", buffering=1)
"""
)
FAILS = "raise RuntimeError('of the script')"


def is_not_there():
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize("script", [PRINTS, TEES], ids=["streams", "a_stream_of_its_own"])
@pytest.mark.parametrize("opened", [lambda: LogFile("/dev/full", "w"), is_not_there], ids=["full", "read_only"])
def test_no_disk_hinders_what_a_rehearsal_prints_and_its_own_reason_is_heard(tmp_path, script, opened):
    (tmp_path / "s.py").write_text(script + FAILS)
    ran, said = asyncio.run(rehearse(tmp_path, opened))
    assert ran.splitlines() == ["RuntimeError: of the script", "heard again", "heard again"]
    assert len(said) == 1 and ("No space left" in said[0] or "Read-only" in said[0]), said


async def rehearse(folder, opened):
    """A rehearsal of s.py whose output a real agent's pipe takes. Returns: what it printed, and what the agent said."""
    read_end, write_end = os.pipe()
    terminal = os.memfd_create("terminal")
    writer = Writer(terminal)
    pipe = Pipe(read_end, writer)
    writer.open = lambda path: opened()
    pipe.assign(folder / "out", forward=False)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-B", "-u", "-c", REHEARSES, str(write_end), "s.py", cwd=folder, pass_fds=[write_end],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    os.close(write_end)
    out, _ = await process.communicate()
    await pipe.ended.wait()
    writer.close()
    assert process.returncode == 1
    return out.decode(), os.pread(terminal, 1 << 16, 0).decode().splitlines()


def test_the_scripts_own_stream_stays_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", before := sys.stdout)
    mute = Mute(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT))
    own = sys.stderr = open(tmp_path / "own", "w")  # noqa: SIM115
    try:
        print("private")
    finally:
        mute.lift()
    assert sys.stdout is before and sys.stderr is own and (tmp_path / "out").read_text() == "private\n"
    sys.stderr = mute._streams[1]
    own.close()


@pytest.fixture
def mute(tmp_path):
    mute = Mute(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT))
    try:
        yield mute
    finally:
        mute.release_files()
        mute.lift()


def test_a_temporary_file_is_the_followers_own_before_and_after_it_takes_over(tmp_path, mute):
    mute.keep_files()
    with tempfile.NamedTemporaryFile("w+", dir=tmp_path) as file:
        file.write("first")
        file.seek(0)
        assert file.read() == "first"
        mute.release_files()
        file.write(", then")
        file.flush()
        assert Path(file.name).read_text() == "first, then"
    assert not os.path.exists(file.name)


def test_a_file_that_cannot_be_gone_on_with_ends_no_take_over_and_is_said(tmp_path, capfd):
    log, replaced = tmp_path / "log", tmp_path / "replaced"
    mute = Mute(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT))
    try:
        mute.keep_files()
        with open(replaced, "w") as lost, open(log, "w") as file:
            os.mkdir(replaced)
            mute.release_files()
            print("of the loop", file=lost)
            print("of the loop", file=file)
    finally:
        mute.release_files()
        mute.lift()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"[deadpool] the script's output to {replaced}") and "Is a directory" in line
    assert log.read_text() == "of the loop\n"


def test_who_holds_on_to_what_a_follower_was_given_writes_after_it_has_taken_over(tmp_path, mute):
    """As logging.FileHandler does, and every module first imported in the loop."""
    file, moved, folder = tmp_path / "file", tmp_path / "moved", tmp_path / "folder"
    mute.keep_files()
    from os import makedirs, replace

    opens, (told, tell) = open, os.pipe()
    child = os.fork()
    if child == 0:
        os.read(told, 1)
        with opens(tmp_path / "of a child", "w") as written:
            written.write("forked in the loop")
        os._exit(0)
    with opens(file, "w") as silent:
        silent.write("silent")
    assert not file.exists()
    mute.release_files()
    os.write(tell, b".")
    with opens(file, "w") as written:
        written.write("heard")
    replace(file, moved)
    makedirs(folder)
    assert os.waitpid(child, 0) == (child, 0)
    assert moved.read_text() == "heard" and folder.is_dir() and not file.exists()
    assert (tmp_path / "of a child").read_text() == "forked in the loop"


class Cached(torch.utils.data.Dataset[Any]):
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 2

    def __getitem__(self, index):
        with open(self.folder / f"{index}.part", "w") as file:
            file.write(str(index))
        os.replace(self.folder / f"{index}.part", self.folder / str(index))
        torch.save(index, self.folder / f"{index}.pt")
        return int((self.folder / str(index)).read_text()) + torch.load(self.folder / f"{index}.pt")


def test_the_cache_that_a_followers_loader_fills_is_there_to_be_read(tmp_path, mute, monkeypatch):
    saves = fake(foreign=lambda: True)
    monkeypatch.setattr(torch, "save", saving.save_file(saves, "torch.save", torch.save))
    mute.keep_files()
    loader = torch.utils.data.DataLoader(Cached(tmp_path), num_workers=1)
    assert [int(item) for item in loader] == [0, 2]


def test_a_file_that_a_thread_opens_while_files_are_released_is_written(tmp_path, monkeypatch):
    """A logger that rotates: it was about to be given /dev/null, and nobody would have let it go on."""
    opening, released = threading.Event(), threading.Event()
    plain = builtins.open

    def slow(file, *args, **kwargs):
        if file == os.devnull:
            opening.set()
            assert not released.wait(0.2), "released while a file is opened"
        return plain(file, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", slow)
    mute = Mute(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT))
    mute.keep_files()
    kept = []

    def opens():
        kept.append(open(tmp_path / "log", "a"))  # noqa: SIM115

    thread = threading.Thread(target=opens)
    thread.start()
    assert opening.wait(20)
    mute.release_files()
    mute.lift()
    released.set()
    thread.join()
    with kept[0] as file:
        file.write("of the thread")
    assert (tmp_path / "log").read_text() == "of the thread"


def test_a_file_that_a_thread_closes_meanwhile_ends_no_take_over(tmp_path, mute):
    class Closing(io.FileIO):
        """Closed by another thread between the two questions."""

        closed = False

    mute.keep_files()
    file = Closing(os.open(os.devnull, os.O_WRONLY), "w")
    io.FileIO.close(file)
    mute._silent[file] = str(tmp_path / "log")
    mute.release_files()
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"])
def test_a_compiler_reads_what_it_has_just_written_to_its_cache(tmp_path, mute, monkeypatch, variable):
    cache = tmp_path / "cache"
    monkeypatch.setenv(variable, str(cache))
    mute.keep_files()
    os.makedirs(cache / "ab")
    (cache / "ab" / "draft").write_text("compiled")
    os.replace(cache / "ab" / "draft", cache / "ab" / "kernel")
    assert (cache / "ab" / "kernel").read_text() == "compiled"
    (tmp_path / "elsewhere").write_text("of the script")
    assert not (tmp_path / "elsewhere").exists()


def test_what_a_script_changes_may_be_named_in_any_order(tmp_path, mute):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "one").touch()
    mute.keep_files()
    shutil.rmtree(ignore_errors=True, path=kept)
    os.replace(dst=tmp_path / "other", src=kept / "one")
    os.makedirs(exist_ok=True, name=tmp_path / "made")
    assert sorted(os.listdir(tmp_path)) == ["kept", "out"]
    assert os.listdir(kept) == ["one"]


def test_a_log_that_the_rank_appends_to_gets_nothing_from_start_up_and_goes_on_after_it(tmp_path, mute):
    log, made = tmp_path / "progress.txt", tmp_path / "made"
    mute.release_files()
    log.write_text("of the rank\n")
    (tmp_path / "lock").touch()
    again = Mute(os.open(tmp_path / "private", os.O_WRONLY | os.O_CREAT))
    try:
        with open(log, "a") as once, open(log, "a") as handler, open(made, "a") as first, open(tmp_path / "lock", "a"):
            once.write("Starting job\n")
            first.write("of the ")
            first.flush()
            with open(made, "a") as second:
                second.write("rehearsal")
            again.keep_files()
            handler.write("a line of the loop that the rank has written\n")
            handler.flush()
            again.release_files()
            handler.write("of the replacement\n")
    finally:
        again.release_files()
        again.lift()
    assert log.read_text() == "of the rank\nof the replacement\n"
    assert made.read_text() == "of the rehearsal"


def test_a_folder_that_tensorboard_logs_to_is_left_alone_in_start_up(tmp_path, mute):
    """accelerate's tracker makes one of its own in it, named by the time."""
    mute._trackers.folders = lambda: {str(tmp_path / "logs")}
    (tmp_path / "cache").mkdir()
    os.mkdir(tmp_path / "logs")
    os.makedirs(tmp_path / "logs" / "1763900000.0", exist_ok=True)
    with open(tmp_path / "logs" / "1763900000.0" / "hparams.yml", "w") as file:
        file.write("lr: 0.1")
    (tmp_path / "cache" / "indices").write_text("built")
    assert os.listdir(tmp_path / "logs") == [] and (tmp_path / "cache" / "indices").read_text() == "built"
