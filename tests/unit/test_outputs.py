"""agent/outputs.py: where what a process prints goes when it takes a rank over, whatever the file system does."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import cast

import pytest
from support import present
from support.hosts import host, local_node

from deadpool_plugin.agent import outputs as outputs_module
from deadpool_plugin.agent.node import Process, Slot
from deadpool_plugin.agent.workers import Workers
from deadpool_plugin.core import local
from deadpool_plugin.host.machine import Machine
from deadpool_plugin.host.output import Pipe, Writer, rank_file
from deadpool_plugin.transport.unix import LocalPeer


def workers_of(on: Machine, output_dir: Path, *slots: Slot) -> Workers:
    """Make those of node 2."""
    return Workers(local_node(on, slots=slots, node=2, output_dir=output_dir), lambda slot: None)


def threaded(writer: Writer) -> Machine:
    """A host whose files are looked at in threads."""

    async def at_files(work):
        return await asyncio.get_running_loop().run_in_executor(None, work)

    return host(output=writer, at_files=at_files)


def taken_over(writer: Writer, output_dir, may_open: threading.Event | None = None) -> None:
    """A process takes rank 5 over on node 2 and says a line; `may_open` is set then."""

    async def scenario():
        read_end, write_end = os.pipe()
        slot = Slot(0, rank=5, process=Process(1, 5, rehearses=True), pipe=Pipe(read_end, writer))
        workers = workers_of(threaded(writer), output_dir, slot)
        assert await workers.take(slot, present(slot.process), 7)
        os.write(write_end, b"a line\n")
        os.close(write_end)
        await asyncio.wait_for(present(slot.pipe).ended.wait(), 60)
        if may_open is not None:
            may_open.set()

    asyncio.run(scenario())
    writer.close()


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch):
    monkeypatch.setattr(outputs_module, "READ_S", 20.0)


def test_who_takes_a_rank_over_prints_into_the_ranks_file(tmp_path):
    taken_over(Writer(os.open(os.devnull, os.O_WRONLY)), tmp_path)
    assert rank_file(tmp_path, 5, 2).read_bytes() == b"a line\n"


def test_a_file_system_that_stands_still_holds_no_take_over_up_and_loses_no_line(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs_module, "READ_S", 0.05)
    may_open, opened = threading.Event(), Writer.open

    def late(writer, path):
        assert may_open.wait(20)
        return opened(writer, path)

    monkeypatch.setattr(Writer, "open", late)
    heard, said = os.pipe()
    taken_over(Writer(said), tmp_path, may_open)
    assert os.read(heard, 1 << 12) == b"a line\n"
    assert rank_file(tmp_path, 5, 2).read_bytes() == b"a line\n"
    os.close(heard)
    os.close(said)


def test_a_file_that_cannot_be_opened_later_either_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    heard, said = os.pipe()
    taken_over(Writer(said), tmp_path / "file")
    words = os.read(heard, 1 << 12).decode().splitlines()
    assert sorted("cannot write everything to output_dir" in word for word in words) == [False, True]
    assert "a line" in words
    os.close(heard)
    os.close(said)


def test_how_much_is_in_a_file_that_was_opened_late_is_not_claimed(tmp_path):
    """A cut at a wrong place would drop lines of the next replacement."""

    async def scenario():
        read_end, write_end = os.pipe()
        pipe = Pipe(read_end, writer)
        pipe.assign(tmp_path / "rank", False, late=True)
        os.write(write_end, b"a line\n")
        cut = pipe.cut(3)
        os.close(write_end)
        async with asyncio.timeout(60):
            await pipe.ended.wait()
        return cut

    (tmp_path / "rank").write_text("before\n")
    writer = Writer(os.open(os.devnull, os.O_WRONLY))
    assert asyncio.run(scenario()) is None
    writer.close()
    assert (tmp_path / "rank").read_text() == "before\na line\n"


def test_logs_that_are_slow_to_read_do_not_cost_the_rank_its_file(tmp_path, monkeypatch):
    def late(*_):
        raise TimeoutError

    monkeypatch.setattr(outputs_module, "printed_since", late)
    taken_over(Writer(os.open(os.devnull, os.O_WRONLY)), tmp_path)
    assert rank_file(tmp_path, 5, 2).read_bytes() == b"a line\n"


class Told(list[local.LocalMessage]):
    """A worker's connection."""

    tag = None

    def send(self, message, fds=()):
        self.append(message)


def test_who_comes_when_its_generation_is_over_is_not_told_to_begin(tmp_path):
    """The store it would look for may be gone with its host; a job that waits for a host would end for that."""
    first, late = Process(1, 0, rehearses=False), Process(2, 1, rehearses=False)
    slots = [Slot(0, rank=0, process=first), Slot(1, rank=1, process=late)]
    workers = workers_of(host(), tmp_path, *slots)
    one, other = Told(), Told()
    workers.start_groups(0, "a store")
    workers.worker(cast(LocalPeer, one), local.WorkerHello(0, 11, 0, False, 1))
    workers.abort(1)
    workers.worker(cast(LocalPeer, other), local.WorkerHello(1, 12, 1, False, 2))
    assert one == [local.StartGroups(0, "a store"), local.Abort(1)] and other == []


@pytest.mark.parametrize("overtaken", [False, True])
def test_what_a_rehearsal_prints_goes_to_a_file_of_its_own(tmp_path, overtaken):
    writer = Writer(os.open(os.devnull, os.O_WRONLY))

    async def scenario():
        slot = Slot(0, rank=-1, process=Process(1, 5, rehearses=True))
        workers = workers_of(host(output=writer, pipe=lambda fd: Pipe(fd, writer)), tmp_path, slot)
        peer = Told()
        workers.worker(cast(LocalPeer, peer), local.WorkerHello(0, 11, 5, True, 1))
        if overtaken:
            slot.process = None
        read_end, write_end = os.pipe()
        os.write(write_end, b"a line\n")
        workers.outputs.assign_rehearsal(slot.of_peer(cast(LocalPeer, peer)), [read_end])
        if overtaken:
            with pytest.raises(BrokenPipeError):
                os.write(write_end, b"nobody reads this")
        os.close(write_end)
        while workers.outputs._opening._tasks:
            await asyncio.gather(*workers.outputs._opening._tasks)
        while not overtaken and _open_files(tmp_path) != []:
            await asyncio.sleep(0)

    asyncio.run(scenario())
    writer.close()
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*.txt")}
    assert found == ({} if overtaken else {"rehearsals/rank0005.11.txt": b"a line\n"})


def _open_files(folder):
    """List what this process has open below `folder`."""
    return [path for fd in os.listdir("/proc/self/fd") if (path := _target(fd)).startswith(str(folder))]


def _target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""
