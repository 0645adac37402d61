"""Saves as calls: gated, done again from what they were given, cancelled in flight; a follower leaves files alone."""

import dataclasses
import io
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from deadpool_plugin.errors import CheckpointLost, Unsupported
from deadpool_plugin.transport import local
from deadpool_plugin.worker import calls, dcp, processes, saving
from deadpool_plugin.worker.adapter import CallKind
from deadpool_plugin.worker.output import Mute


class Link:
    """Keeps what a worker says."""

    def __init__(self):
        self.sent, self.events = [], []

    def send(self, message):
        self.sent.append(message)

    def event(self, kind, **fields):
        self.events.append((kind, fields))

    def wake(self):
        pass

    def wait_until(self, done):
        assert done(), "the test would wait for ever"


@pytest.fixture
def saves(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    return saving.Saves(Link(), SimpleNamespace(generation=0), lambda name, kind, call, args, kwargs: call())


@dataclasses.dataclass
class Shard:
    data: torch.Tensor
    replica: int
    parts: list


def test_what_a_save_was_given_survives_what_saving_does_to_it():
    tensor = torch.ones(2)
    given = {"a": [Shard(tensor, 1, [1])], "b": (tensor, {"c": 1})}
    kept = saving.structure(given)
    given["a"][0].replica, given["b"][1]["c"] = 9, 9
    given["a"][0].parts.append(2)
    given["a"].clear()
    assert kept["a"][0].replica == 1 and kept["a"][0].parts == [1] and kept["b"][1]["c"] == 1
    assert kept["a"][0].data is tensor and kept["b"][0] is tensor


def test_torch_save_replaces_a_file_only_when_the_new_one_is_whole(tmp_path, saves):
    path = tmp_path / "rank3.pt"
    torch.save({"old": 1}, path)

    def fails_half_way(obj, f):
        with open(f, "wb") as file:
            file.write(b"half")
        raise OSError("disk full")

    saves.step = 7
    with pytest.raises(OSError):
        saving.TorchSave(saves, fails_half_way, ({"new": 2}, str(path)), {})()
    assert torch.load(path) == {"old": 1}
    saving.TorchSave(saves, torch.save, ({"new": 2}, str(path)), {})()
    assert torch.load(path) == {"new": 2} and os.listdir(tmp_path) == ["rank3.pt"]
    assert saves._link.sent == [local.Saved(3, 7, str(path))]
    plain = tmp_path / "plain" / "rank3.pt"
    plain.parent.mkdir()
    torch.save({"new": 2}, plain)
    assert plain.read_bytes() == path.read_bytes()


def test_a_flight_is_stopped_settled_and_its_own_files_removed(tmp_path, saves):
    folder = tmp_path / "iter"
    folder.mkdir()
    (folder / "mine").touch()
    order = []

    class Slow(saving.Flight):
        def stop(self):
            order.append("stop")

        def settle(self):
            order.append("settle")
            assert (folder / "mine").exists()

    saves.step = 4
    saves.on_cancel.append(lambda: order.append("forget"))
    saves.launch(Slow(saves, str(folder), [str(folder / "mine")]))
    saves.abort()
    (flight,) = saves.cancel()
    assert order == ["stop", "stop", "settle", "forget"] and not folder.exists() and flight.cancelled
    assert saves.cancel() == []
    saves.report_cancelled([flight], 5)
    assert saves._link.events[0][0] == "CheckpointCancelled" and "from step 5" in saves._link.events[0][1]["reason"]


def test_files_of_a_checkpoint_that_may_be_complete_are_kept(tmp_path, saves):
    (tmp_path / "mine").touch()
    flight = saving.Flight(saves, str(tmp_path), [str(tmp_path / "mine")])
    flight.keep_files = True
    saves.launch(flight)
    saves.cancel()
    assert (tmp_path / "mine").exists()


def test_the_future_of_a_lost_save_is_done_and_says_why(saves):
    future = dcp.SaveFuture(saves)
    assert not future.done()
    future.lose("cancelled")
    assert future.done() and future.result() is None and isinstance(future.exception(), CheckpointLost)
    future.restart()
    assert not future.done()
    future.succeed("metadata")
    assert future.result() == "metadata" and future.exception() is None


def test_a_writing_thread_ends_at_its_next_collective_or_in_its_writing(tmp_path, saves):
    writing = threading.Event()

    def original(state_dict, checkpoint_id):
        from torch.distributed.checkpoint import _async_thread_executor as executor

        def save_wrapper():
            return executor.save_wrapper()

        pool = executor.ThreadPoolExecutor(1)
        return pool.submit(executor.save_wrapper)

    def endless():
        writing.set()
        while True:
            pass

    from torch.distributed.checkpoint import _async_thread_executor as executor

    before, executor.save_wrapper = executor.save_wrapper, endless
    try:
        call = dcp.AsyncSave(saves, original, (), {"state_dict": {}, "checkpoint_id": str(tmp_path / "none")})
        future = call()
        assert writing.wait(20)
        saves.cancel()
        assert isinstance(future.exception(), CheckpointLost)
    finally:
        executor.save_wrapper = before


def test_killing_a_writer_kills_what_it_has_forked():
    script = "import os,time\nif os.fork()==0: os.fork()\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(600)"
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    pids = [int(writer.stdout.readline()) for _ in range(3)]
    processes.kill_tree(writer.pid)
    writer.wait()
    assert len(set(pids)) == 3 and not any(is_running(pid) for pid in pids)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_follower_leaves_files_as_they_are_until_it_takes_over(tmp_path):
    latest = tmp_path / "latest"
    latest.write_text("20")
    mute = Mute(tmp_path / "private" / "out")
    try:
        mute.keep_files()
        with open(latest, "w") as file:
            file.write("10")
        (tmp_path / "draft").write_text("10")
        os.replace(tmp_path / "draft", latest)
        latest.unlink()
        kept = latest.read_text()
        mute.release_files()
        latest.write_text("30")
    finally:
        mute.release_files()
        mute.lift()
    assert kept == "20" and latest.read_text() == "30" and not (tmp_path / "draft").exists()


def test_saving_into_memory_is_no_save(saves):
    original = torch.save
    try:
        saving.install(saves)
        buffer = io.BytesIO()
        torch.save({"a": 1}, buffer)
        assert buffer.getvalue() and not saves._link.sent
    finally:
        saving.replace(torch.save, original)
    assert torch.save is original


def test_the_log_of_one_segment_is_bounded(monkeypatch):
    monkeypatch.setattr(calls, "CALLS_MAX", 3)
    log = calls.CallLog()
    with pytest.raises(Unsupported, match="at most 3 between two optimizer steps"):
        for _ in range(4):
            log.add(calls.Call("f", CallKind.PLAIN, 0, lambda: None, lambda: None), None)
