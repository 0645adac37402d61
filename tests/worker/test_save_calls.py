"""Saves as calls: gated, done again from what they were given, cancelled in flight; a follower leaves files alone."""

import dataclasses
import errno
import fcntl
import functools
import importlib
import inspect
import io
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import Future, wait
from queue import SimpleQueue
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from support import present
from support.stand_in import fake

from deadpool_plugin.comm.generations import Generations
from deadpool_plugin.core import local
from deadpool_plugin.errors import CheckpointLost, GenerationChanged, Unsupported
from deadpool_plugin.transport import linux
from deadpool_plugin.worker import calls, codec, copies, dcp, patching, saving
from deadpool_plugin.worker.calls import Call, CallKind
from deadpool_plugin.worker.link import AgentLink
from deadpool_plugin.worker.mute import Mute


class Link:
    """Keeps what a worker says."""

    def __init__(self):
        self.sent, self.events, self._changed = [], [], threading.Condition()

    def send(self, message):
        self.sent.append(message)

    def event(self, kind, **fields):
        self.events.append((kind, fields))

    def wake(self):
        with self._changed:
            self._changed.notify_all()

    def wait_until(self, done):
        with self._changed:
            assert self._changed.wait_for(done, 20), "the test would wait for ever"


@pytest.fixture
def saves(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    groups = fake(generation=0, generations=Generations(explain_timeout_s=0.0))
    saves = saving.Saves(cast(AgentLink, Link()), groups, lambda call: call())
    yield saves
    see_files_as_they_are(saves)


def see_files_as_they_are(saves):
    if saves.folders._patches is not None:
        saves.folders._patches.undo()


@dataclasses.dataclass
class Shard:
    data: torch.Tensor
    replica: int
    parts: list[int]


def test_what_a_save_was_given_survives_what_saving_does_to_it():
    tensor = torch.ones(2)
    given: dict[str, Any] = {"a": [Shard(tensor, 1, [1])], "b": (tensor, {"c": 1})}
    kept = copies.structure(given)
    given["a"][0].replica, given["b"][1]["c"] = 9, 9
    given["a"][0].parts.append(2)
    given["a"].clear()
    assert kept["a"][0].replica == 1 and kept["a"][0].parts == [1] and kept["b"][1]["c"] == 1
    assert kept["a"][0].data is tensor and kept["b"][0] is tensor


class OfTheScript(dict[str, Any]):
    """Such as EasyDict, or Lightning's AttributeDict."""


def test_what_a_save_was_given_keeps_its_types_its_attributes_and_what_is_shared():
    metadata: Any = torch.nn.BatchNorm1d(2).state_dict()
    cycle: dict[str, Any] = {"own": OfTheScript(a=1), "state": metadata, "again": metadata}
    cycle["itself"] = [cycle, (cycle,)]
    kept = copies.structure(cycle)
    assert kept is not cycle and kept["itself"][0] is kept and kept["itself"][1] == (kept,)
    assert type(kept["own"]) is OfTheScript and kept["state"] is kept["again"] is not metadata
    assert type(kept["state"]) is OrderedDict
    assert vars(kept["state"])["_metadata"] == metadata._metadata


def test_what_a_script_saves_is_what_it_would_save_without_us(tmp_path, saves):
    def given():
        state = torch.nn.BatchNorm1d(2).state_dict()
        return {"state": state, "again": [state, state], "own": OfTheScript(a=state)}

    original = torch.save
    for kind in ("plain", "wrapped"):
        (tmp_path / kind).mkdir()
        try:
            if kind == "wrapped":
                saving.install(saves)
            torch.save(given(), tmp_path / kind / "one.pt")
        finally:
            patching.replace({torch.save: original})
    assert (tmp_path / "plain" / "one.pt").read_bytes() == (tmp_path / "wrapped" / "one.pt").read_bytes()
    assert saves.link.sent


def test_torch_save_replaces_a_file_only_when_the_new_one_is_whole(tmp_path, saves):
    path = tmp_path / "rank3.pt"
    torch.save({"old": 1}, path)

    def fails_half_way(obj, f):
        with open(f, "wb") as file:
            file.write(b"half")
        raise OSError("disk full")

    saves.step = 7
    with pytest.raises(OSError):
        saving.FileSave("torch.save", saves, str(path), lambda file: fails_half_way({"new": 2}, file))()
    assert torch.load(path) == {"old": 1}
    saving.FileSave("torch.save", saves, str(path), functools.partial(torch.save, {"new": 2}))()
    assert torch.load(path) == {"new": 2} and os.listdir(tmp_path) == ["rank3.pt"]
    assert saves.link.sent == [local.CheckpointSaved(7, str(path), whole=False)]
    plain = tmp_path / "plain" / "rank3.pt"
    plain.parent.mkdir()
    torch.save({"new": 2}, plain)
    assert plain.read_bytes() == path.read_bytes()


def test_torch_save_is_done_once_through_links_and_devices(tmp_path, saves, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.pt").symlink_to(tmp_path / "real" / "rank3.pt")
    given = {"of the script": torch.ones(1)}
    save = saving.FileSave("torch.save", saves, str(tmp_path / "link.pt"), functools.partial(torch.save, given))
    save()
    given["of the script"].zero_()
    save()
    assert torch.load(tmp_path / "real" / "rank3.pt") == {"of the script": 1} and (tmp_path / "link.pt").is_symlink()
    assert len(saves.link.sent) == 1
    kept = weakref.ref(given["of the script"])
    del given
    assert kept() is None  # although the call log still has the save
    monkeypatch.setattr(os, "replace", None)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    saving.FileSave("torch.save", saves, str(tmp_path / "pipe"), lambda file: file.write_bytes(b"sent"))()
    assert os.read(reader, 9) == b"sent"
    os.close(reader)


def test_a_save_that_is_done_again_is_not_complete_meanwhile_and_an_older_one_keeps_its_mark(tmp_path, saves):
    mark_seen = []

    def original(state_dict, checkpoint_id):
        mark_seen.append((tmp_path / "new" / ".metadata").exists())
        (tmp_path / "new").mkdir(exist_ok=True)
        (tmp_path / "new" / ".metadata").touch()

    for _ in range(2):  # the second one overwrites the first, as the script wants it
        save = dcp.Save(saves, original, (), {"state_dict": {}, "checkpoint_id": str(tmp_path / "new")})
        save()
        save()
    assert mark_seen == [False, False, True, True]


def thread_flight(saves, folder):
    given = {"state_dict": {}, "checkpoint_id": str(folder)}
    return dcp.ThreadFlight(saves, dcp.AsyncSave(saves, lambda state_dict, checkpoint_id: None, (), given))


@pytest.mark.parametrize("completed_by_others", [False, True])
def test_a_rank_that_gave_its_word_keeps_its_files(tmp_path, saves, completed_by_others):
    """The coordinator may have completed the checkpoint already, or do so yet."""
    file = tmp_path / "__0_0.distcp"
    flight = thread_flight(saves, tmp_path)
    saves.flights.append(flight)
    flight.check()  # planning: nothing is written yet
    assert not flight.keep_files
    file.touch()
    if completed_by_others:
        (tmp_path / ".metadata").touch()
    else:
        flight.check()
    saves.cancel()
    assert file.exists()


def test_a_flight_that_landed_while_it_was_stopped_is_left_alone(tmp_path, saves):
    class Landing(saving.Flight):
        def settle(self):
            self.completed()

    (tmp_path / "mine").touch()
    saves.flights.append(Landing(saves, str(tmp_path), [str(tmp_path / "mine")]))
    saves.report_cancelled(saves.cancel(), 5)
    assert (tmp_path / "mine").exists() and [kind for kind, _ in saves.link.events] == ["CheckpointSaved"]


def test_a_flight_is_stopped_settled_and_its_own_files_removed(tmp_path, saves):
    folder = tmp_path / "iter"
    folder.mkdir()
    (folder / "mine").touch()
    order = []

    class Slow(saving.Flight):
        def stop(self):
            super().stop()
            order.append("stop")

        def settle(self):
            order.append("settle")
            assert (folder / "mine").exists()

    saves.step = 4
    saves.on_cancel.append(lambda: order.append("forget"))
    saves.flights.append(Slow(saves, str(folder), [str(folder / "mine")]))
    saves.abort(1)
    (flight,) = saves.cancel()
    assert order == ["stop", "stop", "settle", "forget"] and not folder.exists() and flight.cancelled
    assert saves.cancel() == []
    saves.report_cancelled([flight], 5)
    assert saves.link.events[0][0] == "CheckpointCancelled" and "from step 5" in saves.link.events[0][1]["reason"]


def test_a_swap_that_finds_the_main_thread_in_a_save_is_told_so(saves):
    saves.abort(1)
    with saves.under_way():
        saves.abort(2)
    saves.abort(3)
    assert saves.link.sent == [local.Saving(2)]

    saves.groups.generations.announce(4)
    with pytest.raises(GenerationChanged), saves.under_way():
        raise AssertionError("nobody knows of a save that begins after the swap")
    saves.abort(4)
    assert len(saves.link.sent) == 1


def test_all_writers_have_ended_before_anything_is_removed(tmp_path, saves):
    done = []

    class Noted(saving.Flight):
        def settle(self):
            done.append("settle")

        def remove_files(self):
            done.append("remove")

    for _ in range(2):
        saves.flights.append(Noted(saves, str(tmp_path)))
    saves.cancel()
    assert done == ["settle", "settle", "remove", "remove"]


def cannot(*args, **kwargs):
    raise OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize("owner, name", [(os, "listdir"), (pathlib.Path, "unlink"), (pathlib.Path, "exists")])
def test_what_cannot_be_removed_is_said_and_the_rest_is(tmp_path, saves, monkeypatch, owner, name):
    removed = []

    class Other(saving.Flight):
        def remove_files(self):
            removed.append(self)

    (tmp_path / "__0_0.distcp").touch()
    flight = thread_flight(saves, tmp_path)
    saves.flights.append(flight)
    saves.flights.append(Other(saves, ""))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, cannot)
        assert len(saves.cancel()) == 2
    assert len(removed) == 1 and flight.future.done() and not saves.flights
    ((kind, fields),) = saves.link.events
    assert kind == "Note" and str(tmp_path) in fields["text"] and "Stale file handle" in fields["text"]


def test_a_folder_that_another_rank_has_removed_meanwhile_is_nothing_to_say(tmp_path, saves, monkeypatch):
    saves.flights.append(thread_flight(saves, tmp_path / "gone"))
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    saves.cancel()
    assert saves.link.events == []


def test_a_rank_that_cannot_see_its_files_keeps_them(tmp_path, saves, monkeypatch):
    flight = thread_flight(saves, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", cannot)
        flight.check()
    assert flight.keep_files


def test_files_of_a_checkpoint_that_may_be_complete_are_kept(tmp_path, saves):
    (tmp_path / "mine").touch()
    flight = saving.Flight(saves, str(tmp_path), [str(tmp_path / "mine")])
    flight.keep_files = True
    saves.flights.append(flight)
    saves.cancel()
    assert (tmp_path / "mine").exists()


def test_the_future_of_a_lost_save_is_done_and_says_why(saves):
    future = dcp.SaveFuture(saves)
    assert not future.done()
    future.lose("cancelled")
    with pytest.warns(RuntimeWarning, match="was not completed: cancelled; to do: before naming it"):
        assert future.done() and future.result() is None and isinstance(future.exception(), CheckpointLost)
    future.ended = False
    assert not future.done()
    future.end("metadata")
    assert future.result() == "metadata" and future.exception() is None


def test_what_ended_a_cancelled_save_is_no_failure_of_it(saves):
    """Without collectives torch passes the interruption on wrapped in an error of its own."""
    inner: Future[None] = Future()
    given = {"state_dict": {}, "checkpoint_id": ""}
    future = dcp.AsyncSave(saves, lambda state_dict, checkpoint_id: inner, (), given)()
    saves.abort(1)
    inner.set_exception(RuntimeError("wrapped"))
    assert not future.ended
    saves.cancel()
    assert isinstance(future.exception(), CheckpointLost)


def test_a_writing_thread_ends_at_its_next_collective_or_in_its_writing(tmp_path, saves, monkeypatch):
    writing = threading.Event()

    def original(state_dict, checkpoint_id):
        executor: Any = importlib.import_module("torch.distributed.checkpoint._async_thread_executor")

        pool = executor.ThreadPoolExecutor(1)
        return pool.submit(executor.save_wrapper)

    def endless():
        writing.set()
        while True:
            pass

    executor: Any = importlib.import_module("torch.distributed.checkpoint._async_thread_executor")

    monkeypatch.setattr(executor, "save_wrapper", endless)
    call = dcp.AsyncSave(saves, original, (), {"state_dict": {}, "checkpoint_id": str(tmp_path / "none")})
    future = call()
    assert writing.wait(20)
    saves.cancel()
    assert isinstance(future.exception(), CheckpointLost)


@pytest.fixture
def async_save(saves, tmp_path, monkeypatch):
    """`async_save(write)`: as torch's, `write` being what its thread does; the call and its future."""
    executor: Any = importlib.import_module("torch.distributed.checkpoint._async_thread_executor")

    def make(write, staged=lambda: None):
        def original(state_dict, checkpoint_id):
            staged()
            return executor.ThreadPoolExecutor(1).submit(executor.save_wrapper)

        monkeypatch.setattr(executor, "save_wrapper", write)
        call = dcp.AsyncSave(saves, original, (), {"state_dict": {}, "checkpoint_id": str(tmp_path / "none")})
        return call, call.future

    return make


class Broken(OSError):
    pass


def breaks(*args, **kwargs):
    raise Broken("disk full")


def test_an_asynchronous_save_that_fails_is_over(saves, async_save):
    call, future = async_save(breaks)
    assert call() is future
    assert wait([future], 20).done and isinstance(future.exception(), Broken) and future.done()
    assert saves.flights == [] and saves.cancel() == []


def test_an_asynchronous_save_that_cannot_even_begin_is_over(saves, async_save):
    call, future = async_save(breaks, staged=breaks)
    with pytest.raises(Broken):
        call()
    assert saves.flights == [] and future.done() and isinstance(future.exception(), Broken)


@pytest.mark.parametrize("end", ["succeeded", "failed", "cancelled"])
def test_however_a_save_ends_who_waits_or_is_called_back_can_ask(saves, async_save, end):
    heard: SimpleQueue[Any] = SimpleQueue()
    go_on = threading.Event()

    def write():
        while not go_on.is_set():  # an interruption within the lock of `wait` would leave it locked
            time.sleep(0.01)
        return breaks() if end == "failed" else "metadata"

    call, future = async_save(write)
    asking = lambda one: heard.put((threading.current_thread(), one.exception()))  # noqa: E731
    future.add_done_callback(asking)
    call()
    if end == "cancelled":
        saves.cancel()
    go_on.set()
    assert wait([future], 20).done
    thread, error = heard.get(timeout=20)
    assert {"succeeded": type(None), "failed": Broken, "cancelled": CheckpointLost}[end] is type(error)
    future.add_done_callback(asking)  # it runs at once
    assert threading.main_thread() not in (thread, heard.get(timeout=20)[0])


def test_who_waits_for_threads_that_write_waits_for_no_other_flight(saves, async_save):
    go_on = threading.Event()
    call, future = async_save(lambda: go_on.wait(20))
    other = saving.Flight(saves, "")
    saves.flights.append(other)
    call()
    threading.Timer(0.01, go_on.set).start()
    saves.wait_for_threads()
    assert go_on.is_set() and saves.flights == [other] and future.done()


def test_in_a_process_that_follows_nobody_waits_for_a_save_or_is_called_back(async_save):
    call, _ = async_save(breaks)
    future = call.skipped(None)
    future.add_done_callback(breaks)
    assert wait([future], 20).done and isinstance(future.exception(), CheckpointLost)


def test_a_rehearsal_is_told_of_no_save_that_it_is_not_done(saves):
    saves.do = lambda call: call.skipped(None)  # as before the first forward
    assert dcp.SaveFuture(saves).done()


def test_killing_a_writer_kills_what_it_has_forked(monkeypatch):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2048:
        pytest.skip("this machine lets a process have too few files open")
    pidfd_open = linux.pidfd_open
    high = lambda pid: fcntl.fcntl(pidfd_open(pid), fcntl.F_DUPFD, 1024)  # noqa: E731
    monkeypatch.setattr(linux, "pidfd_open", high)  # as in a process that has very many files open
    script = "import os,time\nif os.fork()==0: os.fork()\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(600)"
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    pids = [int(present(writer.stdout).readline()) for _ in range(3)]
    linux.kill_tree(writer.pid)
    writer.wait()
    assert len(set(pids)) == 3 and not any(is_running(pid) for pid in pids)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may be reaped while it is read
        return False


def test_a_follower_leaves_files_as_they_are_until_it_takes_over(tmp_path):
    latest = tmp_path / "latest"
    latest.write_text("20")
    mute = Mute(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT))
    try:
        mute.keep_files()
        with open(latest, "w") as file:
            file.write("10")
        (tmp_path / "draft").write_text("10")
        os.replace(tmp_path / "draft", latest)
        latest.unlink()
        os.makedirs(tmp_path / "folder" / "one")
        (tmp_path / "folder").mkdir()
        temporary = tempfile.mkdtemp(dir=tmp_path)
        is_made = os.path.isdir(temporary)
        kept = latest.read_text()
        mute.release_files()
        latest.write_text("30")
    finally:
        mute.release_files()
        mute.lift()
    assert kept == "20" and latest.read_text() == "30" and is_made
    assert not (tmp_path / "draft").exists() and not (tmp_path / "folder").exists()


def test_a_thread_that_a_follower_starts_removes_nothing_either_and_the_plugins_own_do(tmp_path):
    """Megatron-LM removes the checkpoint before the newest one in a thread (`--save-retain-interval`)."""
    folders = {"Thread-1": tmp_path / "newest", "deadpool-link": tmp_path / "ours"}
    mute = Mute(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT))
    try:
        mute.keep_files()
        for name, folder in folders.items():
            os.mkdir(folder)
            thread = threading.Thread(target=lambda folder=folder: shutil.rmtree(folder), name=name)
            thread.start()
            thread.join()
        left = [folder.name for folder in folders.values() if folder.exists()]
    finally:
        mute.release_files()
        mute.lift()
    assert left == ["newest"]


def test_a_file_the_follower_holds_open_goes_on_where_the_rank_itself_has_stopped(tmp_path):
    log, gone = tmp_path / "log", tmp_path / "folder" / "gone"
    log.write_text("1\n2\n")
    mute = Mute(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT))
    try:
        mute.keep_files()
        with open(log, "w") as file, open(gone, "w") as lost, open(log, "ab") as closed:
            closed.close()
            file.write("1\n2\n")
            mute.release_files()
            file.write("3\n")
            lost.write("nobody reads this")
            inherited = os.get_inheritable(file.fileno())
    finally:
        mute.release_files()
        mute.lift()
    assert log.read_text() == "1\n2\n3\n" and not gone.exists() and not inherited


def test_saving_into_memory_is_no_save(saves):
    original = torch.save
    try:
        saving.install(saves)
        buffer = io.BytesIO()
        torch.save({"a": 1}, buffer)
        assert buffer.getvalue() and not saves.link.sent
    finally:
        patching.replace({torch.save: original})
    assert torch.save is original


def test_safetensors_saves_as_torch_does(tmp_path, saves, monkeypatch):
    """For a script that imported it before or does so later; with a stand-in, since it need not be installed."""
    (tmp_path / "site" / "safetensors").mkdir(parents=True)
    (tmp_path / "site" / "safetensors" / "__init__.py").touch()
    (tmp_path / "site" / "safetensors" / "torch.py").write_text(
        "def save_file(tensors, filename, metadata=None):\n    filename.write_text(f'{tensors} {metadata}')\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    original = torch.save
    try:
        saving.install(saves)
        late: Any = importlib.import_module("safetensors.torch")
        late.save_file({"a": 1}, tmp_path / "late", metadata={"b": "2"})
        assert (tmp_path / "late").read_text() == "{'a': 1} {'b': '2'}"
        late.save_file = inspect.unwrap(late.save_file)
        early: Any = ModuleType("of_the_script")
        early.save = late.save_file
        monkeypatch.setitem(sys.modules, "of_the_script", early)
        patching.replace({torch.save: original})
        saving.install(saves)
        early.save({"a": 3}, str(tmp_path / "early"))
        assert (tmp_path / "early").read_text() == "{'a': 3} None"
        assert [message.path for message in saves.link.sent] == [str(tmp_path / "late"), str(tmp_path / "early")]
        saves.do = lambda call: call.skipped(None)
        early.save({"a": 4}, str(tmp_path / "early"))
        assert (tmp_path / "early").read_text() == "{'a': 3} None"
    finally:
        patching.replace({torch.save: original})


def test_the_log_of_one_segment_is_bounded(monkeypatch):
    monkeypatch.setattr(calls, "CALLS_MAX", 3)
    log = calls.CallLog()
    with pytest.raises(Unsupported, match="at most 3 between two optimizer steps"):
        for _ in range(4):
            log.add(calls.LoggedCall(Call("f", CallKind.PLAIN, int), 0, lambda: None), None)


FOLDERS = [  # what this rank says, and whether it is a replacement; what the others say; where it saves
    (("p", False), [("p", False)], "p"),
    (("q", True), [("p", False), ("p", False)], "p"),
    (("p", False), [("q", True), ("p", False)], "p"),
    (("./p", True), [("p", False)], "./p"),
    (("q", True), [("r", True), ("p", False)], "p"),
]


def others_say(monkeypatch, others, rank=0):
    """`dist` of a job in which all others say the same: a name of a checkpoint, and whether a later clock said it.

    Args: rank: this process's.
    """
    others = [(name, 2 * doubts) for name, doubts in others]
    dist = fake(
        is_initialized=lambda: True,
        get_rank=lambda: rank,
        get_world_size=lambda group=None: len(others) + 1,
        get_process_group_ranks=lambda group: list(range(len(others) + 1)),
        group=fake(WORLD=None),
    )
    dist.all_gather_object = lambda said, mine, group: said.__setitem__(
        slice(None), [*others[:rank], mine, *others[rank:]]
    )
    monkeypatch.setattr("deadpool_plugin.worker.folders.dist", dist)


@pytest.mark.parametrize(("mine", "others", "folder"), FOLDERS)
def test_a_replacement_saves_where_all_others_do(saves, monkeypatch, mine, others, folder):
    others_say(monkeypatch, others)
    given, saves.folders.took_over = mine
    assert saves.folders.one_folder(given) == folder
    said = [fields["text"] for kind, fields in saves.link.events]
    assert len(said) == (folder != given) and all(given in text and folder in text for text in said)
    assert saves.folders.one_folder(folder) == folder


def test_a_folder_that_is_named_otherwise_once_is_known_from_then_on(saves, monkeypatch):
    saves.folders.took_over = True
    others_say(monkeypatch, [("/out/monday/step4", False)])
    assert saves.folders.one_folder("/out/tuesday/step4") == "/out/monday/step4"
    assert saves.folders.moved("/out/tuesday/step8/rank1.pt") == "/out/monday/step8/rank1.pt"
    others_say(monkeypatch, [("/out/wednesday/step8", True)])  # the rank that was left has been replaced since
    assert saves.folders.one_folder("/out/tuesday/step8") == "/out/monday/step8"
    assert len(saves.link.events) == 1


def test_a_later_replacement_repeats_a_save_in_the_folder_that_all_agreed_on(saves, monkeypatch):
    saves.folders.took_over = True
    others_say(monkeypatch, [("/out/17:01", False)], rank=1)
    assert saves.folders.one_folder("/out/17:01") == "/out/17:01"
    others_say(monkeypatch, [("/out/17:02", True)], rank=1)  # rank 0 has been replaced, too, and the save is done again
    assert saves.folders.one_folder("/out/17:01") == "/out/17:01"


def test_a_name_that_was_another_ranks_at_one_save_may_be_everybodys_at_the_next(saves, monkeypatch):
    """By the minute, say: a replacement saved at 17:02 what the others had begun to save at 17:01."""
    saves.folders.took_over = True
    others_say(monkeypatch, [("/out/17:01", False)])
    assert saves.folders.one_folder("/out/17:02") == "/out/17:01"
    others_say(monkeypatch, [("/out/17:02", False)])
    assert saves.folders.one_folder("/out/17:02") == saves.folders.moved("/out/17:02") == "/out/17:02"
    assert saves.folders.moved("/out/17:01") == "/out/17:01"


def file_save(saves, path):
    return saving.FileSave("torch.save", saves, str(path), functools.partial(torch.save, {"at": str(path)}))


@pytest.fixture
def clock(saves, tmp_path):
    """A replacement that names `later` what the rank itself named `first`, and has followed a save of the rank's."""
    first, later = tmp_path / "first", tmp_path / "later"
    (first / "iter_8").mkdir(parents=True)
    later.mkdir()
    for name in ("iter_2", "iter_4"):
        save = file_save(saves, first / name / "rank3.pt")
        file_save(saves, later / name / "rank3.pt").skipped(codec.decode(codec.encode(save.outcome(None))))
    return first, later


@pytest.mark.parametrize(
    ("recorded", "made", "known"),
    [
        (["17:01"], [], False),
        (["17:01"], ["18:00"], True),
        (["17:01", "17:01"], [], True),
        (["17:01", "17:02"], [], False),
    ],
)
def test_only_a_name_that_stays_is_a_replacements_to_use(saves, tmp_path, recorded, made, known):
    """Else a folder that the script names by the minute at every save would be taken for one of an older checkpoint."""
    saves.folders.made = {str(tmp_path / name) for name in made}
    for name in recorded:
        file_save(saves, tmp_path / "18:00" / "rank3.pt").skipped(os.fsencode(tmp_path / name / "rank3.pt"))
    saves.folders.take_over()
    assert saves.folders.moved(str(tmp_path / "18:00")) == str(tmp_path / ("17:01" if known else "18:00"))


def test_files_of_a_replacement_lie_where_the_ranks_own_lay(saves, clock):
    """A checkpoint of format `torch`: each rank's own file, and a tracker that rank 0 writes with `open`."""
    first, later = clock
    (later / "before").write_text("")
    saves.folders.take_over()
    os.makedirs(later / "iter_12")
    save = file_save(saves, later / "iter_8" / "rank3.pt")
    save()
    (later / "tracker.tmp").write_text("8")
    os.replace(src=later / "tracker.tmp", dst=later / "latest")
    with open(later / "log", "a") as log:
        log.write("saved")
    assert (later / "latest").read_text() == "8" and os.path.exists(later / "iter_12")
    assert os.fsdecode(save.outcome(None)) == str(first / "iter_8" / "rank3.pt")
    see_files_as_they_are(saves)
    assert os.listdir(later) == ["before"]
    assert sorted(os.listdir(first)) == ["iter_12", "iter_8", "latest", "log"]
    assert os.listdir(first / "iter_8") == ["rank3.pt"]
    ((_, fields),) = saves.link.events[:1]
    assert str(first) in fields["text"] and str(later) in fields["text"]


def test_a_folder_that_another_host_has_not_is_the_scripts_own(saves, clock):
    first, later = clock
    shutil.rmtree(first)
    (later / "iter_8").mkdir()
    saves.folders.take_over()
    file_save(saves, later / "iter_8" / "rank3.pt")()
    (later / "latest").write_text("8")
    see_files_as_they_are(saves)
    assert sorted(os.listdir(later)) == ["iter_8", "latest"] and os.listdir(later / "iter_8") == ["rank3.pt"]


def test_temporary_folders_differ_as_they_should(saves, tmp_path):
    own, its = (tempfile.mkdtemp(dir=tmp_path) for _ in range(2))
    file_save(saves, f"{own}/rank3.pt").skipped(os.fsencode(f"{its}/rank3.pt"))
    saves.folders.take_over()
    file_save(saves, f"{own}/rank3.pt")()
    assert os.listdir(own) == ["rank3.pt"] and os.listdir(its) == []


@pytest.mark.parametrize("recorded", [["first"], ["first", "second"]])
def test_a_replacement_that_cannot_know_where_the_others_save_says_so(saves, tmp_path, recorded):
    """Lost before its second save, the rank had made its folder in the loop; of another folder, a move was said."""
    for name in recorded:
        file_save(saves, tmp_path / "later" / "rank3.pt").skipped(os.fsencode(tmp_path / name / "rank3.pt"))
    for _ in range(2):
        file_save(saves, tmp_path / "known" / "rank3.pt").skipped(os.fsencode(tmp_path / "its" / "rank3.pt"))
    (tmp_path / "later").mkdir()
    (tmp_path / "its").mkdir()
    saves.folders.take_over()
    file_save(saves, tmp_path / "known" / "rank3.pt")()
    for _ in range(2):
        file_save(saves, tmp_path / "later" / "rank3.pt")()
    moved, apart = [fields["text"] for kind, fields in saves.link.events if kind == "Note"]
    assert f"saves to {tmp_path / 'its' / 'rank3.pt'}" in moved
    assert f"rank 3 saves {tmp_path / 'later' / 'rank3.pt'}, in {tmp_path / 'later'}, where the rank itself" in apart
    assert str(tmp_path / "first") in apart or len(recorded) > 1
    assert os.listdir(tmp_path / "later") == ["rank3.pt"], "what a clock says at every save may be the others', too"


@pytest.mark.parametrize("is_new", [True, False])
def test_a_replacement_says_once_that_it_saves_where_nobody_did(saves, tmp_path, is_new):
    saves.folders.made = {str(tmp_path)} if is_new else ()
    saves.folders.take_over()
    for step in (4, 8):
        file_save(saves, tmp_path / f"{step}.pt")()
    said = [fields["text"] for kind, fields in saves.link.events if kind == "Note"]
    assert len(said) == is_new and all(str(tmp_path) in text and "rank 3" in text for text in said)


def test_ranks_that_name_different_folders_from_the_start_are_refused_by_name(saves, monkeypatch):
    others_say(monkeypatch, [("q", False), ("p", False), ("r", True)])
    with pytest.raises(Unsupported, match=r"rank\(s\) 0, 2 to p; rank\(s\) 1 to q; rank\(s\) 3 to r"):
        saves.folders.one_folder("p")


TAGS = [
    (("new-8", True), [("old-8", False)], "old-8"),
    (("old-8", False), [("new-8", True)], "old-8"),
    (("new-8", True), [("newer-8", True)], "new-8"),
    (("17:01:02", False), [("17:01:03", False), ("17:01:02", False)], "17:01:02"),
]


@pytest.mark.parametrize(("mine", "others", "tag"), TAGS)
def test_one_checkpoint_has_one_name_on_all_ranks_also_where_each_asks_the_clock(saves, monkeypatch, mine, others, tag):
    others_say(monkeypatch, others)
    given, saves.folders.took_over = mine
    assert saves.folders.one_tag("/out", given) == tag
    assert saves.folders.moved(f"/out/{given}/rank1.pt") == f"/out/{tag}/rank1.pt"
    others_say(monkeypatch, [("newest-8", True)])
    assert saves.folders.one_tag("/out", tag) == tag, "what is done again has the name it had"


def test_ranks_whose_names_of_checkpoints_differ_are_named_once_by_the_first_of_them(saves, monkeypatch):
    saves.folders.took_over = True
    for step in (4, 8):
        others_say(monkeypatch, [(f"old-{step}", False), (f"later-{step}", True)])
        saves.folders.one_tag("/out", f"new-{step}")
    ((kind, fields),) = saves.link.events
    assert kind == "Note" and "rank(s) 0, 2 name a checkpoint in /out" in fields["text"] and "old-4" in fields["text"]


def test_a_save_of_torchs_own_goes_to_the_folder_all_agree_on(saves, monkeypatch, tmp_path):
    others_say(monkeypatch, [(str(tmp_path / "p"), False)])
    saves.folders.took_over, folders = True, []

    def save(state_dict, *, checkpoint_id=None, storage_writer=None, process_group=None, no_dist=False):
        folders.append(checkpoint_id)

    for more in ({}, {"no_dist": True}):
        dcp.Save(saves, save, (), {"state_dict": {}, "checkpoint_id": str(tmp_path / "q"), **more})()
    assert folders == [str(tmp_path / "p"), str(tmp_path / "q")]
    assert [message.path for message in saves.link.sent] == folders


@pytest.mark.parametrize(
    ("case", "stays"), [("cancelled", False), ("done again", True), ("perhaps complete", True), ("complete", True)]
)
def test_what_a_lost_rank_has_left_of_a_cancelled_save_is_removed(saves, tmp_path, case, stays):
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    left = [folder / name for name in ("__2_0.distcp", "__2_1.distcp", "common.pt")]
    for file in left:
        file.touch()
    saves.step = 3
    flight = saving.Flight(saves, str(folder))
    flight.keep_files = case == "perhaps complete"
    if case == "complete":
        (folder / saving.MARK).touch()
    saves.sweep([flight], 3 if case == "done again" else 4)
    assert [file.exists() for file in [*left, folder]] == [stays] * 4
