"""The agent's parts that need no processes: the world from the hosts, output, lines for people, /proc."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import signal
import string
import subprocess
import sys
import threading
import time
from io import FileIO

import pytest
from support.hosts import local_node
from support.stand_in import fake

from deadpool_plugin import events
from deadpool_plugin.agent import reports as reports_module
from deadpool_plugin.agent.links import Links
from deadpool_plugin.agent.reports import Reports, named
from deadpool_plugin.agent.world import Place, described, form_world, rack_named, spare_nodes, worker_env
from deadpool_plugin.cli.jobview import JobView
from deadpool_plugin.config import Config
from deadpool_plugin.core import api
from deadpool_plugin.core.messages import AnyMessage, NodeFailed, RankFailed, Report, Verdict
from deadpool_plugin.core.types import Failure, World
from deadpool_plugin.errors import ConfigError
from deadpool_plugin.host import proc
from deadpool_plugin.host.machine import address_of, addresses_here, addresses_of
from deadpool_plugin.host.output import LINE_BYTES_MAX, Lane, LineBuffer, LogFile, Pipe, StderrHandler, Writer
from deadpool_plugin.host.proc import Processes, described_exit
from deadpool_plugin.transport.rendezvous import Hello

HOSTS = ["a.lan", "b.lan", "c.lan", "d.lan"]


def hello(node, **change):
    base = {"node": node, "host": HOSTS[node], "control": ("h", 1), "bulk": (("h", 2),), "local_size": 2}
    return Hello(**{**base, "versions": {"torch": "2.9"}, "config_digest": "x", **change})


# ---- the world


@pytest.mark.parametrize(
    ("spares", "nodes"),
    [(0, ()), (1, (3,)), (2, (2, 3)), (["0"], (0,)), (["b.lan"], (1,)), (["d", "a"], (3, 0))],
)
def test_which_nodes_stand_by(spares, nodes):
    assert spare_nodes(spares, HOSTS) == nodes


@pytest.mark.parametrize("spares", [4, ["x"], ["4"], ["a", "a.lan"], ["a", "b", "c", "d"]])
def test_wrong_spares(spares):
    with pytest.raises(ConfigError):
        spare_nodes(spares, HOSTS)


def test_ranks_are_numbered_over_the_active_nodes():
    world = form_world([hello(node) for node in range(4)], Config(spares=["b"]))
    assert world.node_of == (0, 0, 2, 2, 3, 3) and world.spares == (1,) and world.generation == 0
    assert described(world, HOSTS)[1] == "node 1 b.lan: spare"
    env = worker_env(Place(2, 4, 2, "m", 5), world, 3, 1, "10.0.0.3")
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_SIZE"]) == ("3", "6", "1", "2")
    assert (env["CROSS_RANK"], env["CROSS_SIZE"], env["MASTER_ADDR"]) == ("1", "3", "m")


def test_racks_are_named_by_host_or_index():
    racks = {"left": ["a", "1", "host-that-joins-later"], "right": ["c.lan"]}
    world = form_world([hello(node) for node in range(4)], Config(spares=1, racks=racks))
    assert dict(world.racks) == {0: "left", 1: "left", 2: "right"}
    assert [world.rack_of(node) for node in (2, 3)] == ["rack right", "node 3"]
    assert 1 not in world.mirrors[0] and 0 not in world.mirrors[1]
    assert described(world, HOSTS)[2:] == ["node 2 c.lan: ranks 4-5, rack right", "node 3 d.lan: spare"]
    assert rack_named(7, "host-that-joins-later.lan", racks) == "left" and rack_named(8, "x", racks) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"local_size": 4}, "slots"),
        ({"versions": {"torch": "2.10"}}, "torch is 2.9 on a.lan and 2.10 on c.lan"),
        ({"versions": {}}, "torch"),
        ({"config_digest": "y"}, "configuration of host c.lan"),
    ],
)
def test_nodes_that_do_not_fit_together(change, said):
    with pytest.raises(ConfigError, match=said):
        form_world([hello(0), hello(1), hello(2, **change), hello(3)], Config(spares=1))


# ---- output


def test_only_whole_lines_are_forwarded():
    lines = LineBuffer()
    assert lines.feed(b"one\ntw") == b"one\n"
    assert lines.feed(b"o\n") == b"two\n"
    assert lines.feed(b"x" * (LINE_BYTES_MAX + 1)) != b""
    assert lines.feed(b"rest") == b"" and lines.flush() == b"rest"


def test_a_broken_pipe_ends_forwarding_only(tmp_path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    writer = Writer(write_end)
    file = writer.open(tmp_path / "log")
    writer.forward(b"lost")
    writer.write(file, b"kept")
    writer.forward(b"lost too")
    writer.write(file, b" whole")
    writer.close()
    assert (tmp_path / "log").read_bytes() == b"kept whole" and writer.dropped_bytes >= 4


def test_nobody_who_logs_waits_for_a_standard_error_that_takes_nothing():
    """As a disk that hangs, or a launcher that is stopped: the event loop logs, too."""
    read_end, write_end = os.pipe()
    handler = StderrHandler(write_end)
    said = [f"line {number} {'x' * 1000}" for number in range(300)]  # more than the pipe holds
    for line in said:
        handler.handle(logging.makeLogRecord({"msg": line}))
    with open(read_end, "rb") as stream:
        assert stream.read(10) == b"[deadpool]"
        rest = threading.Thread(target=lambda: read.append(stream.read()))
        read = list[bytes]()
        rest.start()
        handler.close()
        os.close(write_end)
        rest.join()
    assert (b"[deadpool]" + read[0]).decode().splitlines() == [f"[deadpool] {line}" for line in said]


def test_a_file_that_cannot_be_closed_well_costs_no_other(tmp_path, monkeypatch, capfd):
    """A shared file system may say only then that it is full."""
    writer = Writer()
    bad, good = writer.open(tmp_path / "bad"), writer.open(tmp_path / "good")

    def close():
        FileIO.close(bad)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(bad, "close", close)
    writer.release(bad)
    writer.write(good, b"kept")
    writer.close()
    assert (tmp_path / "good").read_bytes() == b"kept"
    assert "to output_dir: Disk quota exceeded" in capfd.readouterr().out


def test_a_launcher_that_does_not_read_blocks_nothing_and_no_file(tmp_path, monkeypatch):
    read_end, write_end = os.pipe()
    writer = Writer(write_end)
    log = writer.open(tmp_path / "log")
    for _ in range(40):
        writer.forward(bytes(1 << 20))
    writer.write(log, b"JobFinished\n")
    writer.release(log)
    Lane.close(writer)
    monkeypatch.setattr("deadpool_plugin.host.output._CLOSE_S", 0.1)
    writer.close()
    assert (tmp_path / "log").read_bytes() == b"JobFinished\n" and writer.dropped_bytes >= 20 << 20
    os.close(read_end)


def test_a_full_disk_may_have_room_later(tmp_path, monkeypatch):
    room, write = [3, 0], os.write

    def some(fd, data):
        if not room or os.readlink(f"/proc/self/fd/{fd}") != str(tmp_path / "log"):  # other threads write, too
            return write(fd, data)
        if left := room.pop(0):
            return write(fd, data[:left])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("deadpool_plugin.host.output.os.write", some)
    writer = Writer()
    log = writer.open(tmp_path / "log")
    for line in (b"cut off\n", b"whole\n", b"again\n"):
        writer.write(log, line)
    writer.close()
    assert (tmp_path / "log").read_bytes() == b"cut\nwhole\nagain\n" and writer.dropped_bytes == 5


@pytest.mark.parametrize(("every_s", "times"), [(3600.0, 1), (0.0, 3)])
def test_a_full_disk_is_said_at_once_but_not_again_and_again(monkeypatch, every_s, times):
    monkeypatch.setattr("deadpool_plugin.host.output.SAID_EVERY_S", every_s)
    heard, said = os.pipe()
    writer = Writer(said)
    full = LogFile("/dev/full", "w")
    for _ in range(3):
        writer.write(full, b"a line\n")
    writer.close()
    words = os.read(heard, 1 << 12).decode().splitlines()
    expected = f"[deadpool] {os.uname().nodename} cannot write everything to output_dir: No space left on device; "
    assert [word.startswith(expected + "training goes on; ") for word in words] == [
        True
    ] * times and writer.dropped_bytes == 21
    for fd in (heard, said):
        os.close(fd)


def test_that_output_dir_was_removed_is_said_once(tmp_path):
    heard, said = os.pipe()
    writer = Writer(said)
    removed = [writer.open(tmp_path / "logs" / name) for name in ("one", "other")]
    shutil.rmtree(tmp_path / "logs")
    for file in removed:
        writer.write(file, b"a line\n")
    writer.close()
    (words,) = os.read(heard, 1 << 12).decode().splitlines()
    assert "cannot write everything to output_dir: a file was removed" in words and writer.dropped_bytes == 14
    for fd in (heard, said):
        os.close(fd)


def test_a_file_that_cannot_be_opened_costs_its_lines_only(tmp_path):
    (tmp_path / "file").touch()
    heard, said = os.pipe()

    async def scenario():
        writer = Writer(said)
        read_end, write_end = os.pipe()
        pipe = Pipe(read_end, writer)
        pipe.assign(tmp_path / "file" / "rank", forward=True)
        os.write(write_end, b"forwarded\n")
        assert pipe.cut(1) == 10
        pipe.assign(tmp_path / "rank", forward=True)
        os.write(write_end, b"kept\n")
        os.close(write_end)
        await asyncio.wait_for(pipe.ended.wait(), 60)
        writer.close()

    asyncio.run(scenario())
    words = os.read(heard, 1 << 12).decode().splitlines()
    assert words[1:] == ["forwarded", "kept"] and f"{tmp_path}/file/rank, its output is lost: " in words[0]
    assert (tmp_path / "rank").read_bytes() == b"kept\n"
    os.close(heard)
    os.close(said)


def test_a_workers_pipe_goes_into_its_file(tmp_path):
    async def scenario():
        writer = Writer()
        read_end, write_end = os.pipe()
        pipe = Pipe(read_end, writer)
        os.write(write_end, b"early ")
        pipe.assign(tmp_path / "rank", forward=False)
        os.write(write_end, b"late")
        os.close(write_end)
        await asyncio.wait_for(pipe.ended.wait(), 60)
        writer.close()

    asyncio.run(scenario())
    assert (tmp_path / "rank").read_bytes() == b"early late"


WITH_A_NOTE = b"printed\n[deadpool] rank 1's script ended: refused\nlate\n"


def test_a_note_stands_behind_what_the_process_printed_and_is_not_forwarded(tmp_path):
    heard, said = os.pipe()

    async def scenario():
        writer = Writer(said)
        read_end, write_end = os.pipe()
        pipe = Pipe(read_end, writer)
        pipe.assign(tmp_path / "rank", forward=True)
        os.write(write_end, b"printed\n")
        pipe.note("rank 1's script ended: refused")
        os.write(write_end, b"late\n")
        assert pipe.cut(1) == len(WITH_A_NOTE)
        os.close(write_end)
        await asyncio.wait_for(pipe.ended.wait(), 60)
        writer.close()

    asyncio.run(scenario())
    assert (tmp_path / "rank").read_bytes() == WITH_A_NOTE
    assert os.read(heard, 1 << 12) == b"printed\nlate\n"
    os.close(heard)
    os.close(said)


def test_reports_log_everything_and_keep_what_they_cannot_read(tmp_path):
    writer = Writer()
    reports = Reports(2, writer, tmp_path)
    reports.emit(events.StepCommitted(step=4))
    reports.worker_event("StepDone", {"rank": 1, "step": 4, "time": 5.0})
    reports.worker_event("Nonsense", {})
    writer.close()
    found = written(tmp_path, 2)
    assert [type(event) for event in found].count(events.StepDone) == 1
    assert any(isinstance(event, events.Note) and "Nonsense" in event.text for event in found)


def written(folder, node):
    paths = [events.log_of(folder, node), *events.recent_of(folder, node)]
    return [events.decoder.decode(line) for path in paths for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("ranks", [8, 256])
def test_a_step_takes_two_lines_at_most_however_many_ranks_a_node_has(tmp_path, ranks):
    writer = Writer()
    reports = Reports(0, writer, tmp_path)
    for generation, steps in ((0, (1, 2, 3)), (1, (3, 4))):
        reports.generation = generation
        for step in steps:
            for rank in range(ranks):
                fields: dict[str, object] = {"rank": rank, "step": step, "loss": 0.5 if rank >= ranks // 2 else None}
                reports.worker_event("StepDone", fields)
    reports.worker_event("StepDone", {"rank": 0, "step": 3, "loss": None})
    writer.close()
    said = [(event.generation, event.step, event.rank, event.loss) for event in written(tmp_path, 0)]
    generations = [(0, 1), (0, 2), (0, 3), (1, 3), (1, 4)]
    assert said == [line for step in generations for line in ((*step, 0, None), (*step, ranks // 2, 0.5))]


def test_a_jobs_files_stay_within_a_bound_and_nothing_of_its_fate_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(reports_module, "LOG_BYTES_MAX", 1 << 15)
    monkeypatch.setattr(reports_module, "RECENT_BYTES", 1 << 14)
    events.recent_of(tmp_path, 0)[0].write_bytes(b"of an earlier job\n" * 10_000)
    writer = Writer()
    reports = Reports(0, writer, tmp_path)
    for step in range(2000):
        reports.worker_event("StepDone", {"rank": 0, "step": step, "loss": 1.0})
        reports.emit(events.StepCommitted(step=step))
        reports.worker_event("Note", {"text": f"anything in step {step}"})
        if step % 100 == 0:
            reports.emit(events.SwapPlanned(restore_step=step))
            reports.emit(events.Unprotected(reason="a swap"))
    for step in range(2000):
        reports.worker_event("StepDone", {"rank": 0, "step": 2000 + step, "loss": 1.0})
        reports.emit(events.StepCommitted(step=2000 + step))
        if step == 0:
            reports.emit(events.Protected(step=2000))
    reports.emit(events.JobStopped(exit_code=86, reason="no spare"))
    writer.close()
    found = written(tmp_path, 0)
    assert events.log_of(tmp_path, 0).stat().st_size < (1 << 15) + 42 * 300
    assert all(path.stat().st_size <= 1 << 14 for path in events.recent_of(tmp_path, 0))
    planned = [event.restore_step for event in found if isinstance(event, events.SwapPlanned)]
    assert planned == [*range(0, 2000, 100)] and any(isinstance(event, events.JobStopped) for event in found)
    stands = [event for event in found if isinstance(event, (events.Protected, events.Unprotected))]
    assert isinstance(max(stands, key=lambda event: event.time), events.Protected)
    assert max(event.step for event in found if isinstance(event, events.StepDone)) == 3999
    assert max(event.step for event in found if isinstance(event, events.StepCommitted)) == 3999


@pytest.mark.parametrize(("kind", "said"), reports_module.SENTENCES.items())
def test_a_sentence_names_what_its_event_has(kind, said):
    named = {field for _, field, _, _ in string.Formatter().parse(said) if field is not None}
    assert named <= {f"0.{field}" for field in kind.__struct_fields__}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("node 0 was lost (link lost)", "node 0 (h1) was lost (link lost)"),
        ("swap: node 4 takes over from node 0; node 4 is", "swap: node 4 (h5) takes over from node 0 (h1); node 4 is"),
        ("nodes 0 and 4 cannot reach each other", "nodes 0 (h1) and 4 (h5) cannot reach each other"),
        ("no spare can take node 0, 4 (spare node 4 waits)", "no spare can take node 0, 4 (spare node 4 (h5) waits)"),
        ("node 7 has joined; rank 0 was lost", "node 7 has joined; rank 0 was lost"),
    ],
)
def test_host_names_stand_beside_the_numbers_of_nodes(line, shown):
    assert named(line, {0: "h1", 4: "h5"}) == shown
    assert named(line, {0: "vm", 4: "vm"}) == line


def test_the_host_of_a_lost_node_is_still_named_on_the_terminal_and_not_in_the_log(tmp_path, capfdbinary):
    writer = Writer()
    reports = Reports(1, writer, tmp_path)
    links = Links(local_node(node=1, reports=reports))
    for node in (0, 1):
        links.know(hello(node))
    links.gone(0)
    reports.emit(events.NodeLost(lost=(0,), evidence="node 0 was lost (link lost)"))
    writer.close()
    assert capfdbinary.readouterr().out == b"[deadpool] node 0 (a.lan) was lost (link lost)\n"
    assert "node 0 was lost" in (tmp_path / "events.1.jsonl").read_text()


def test_nobody_is_dialled_for_what_ends_something(monkeypatch):
    links, dialled = Links(local_node(node=1)), list[AnyMessage]()

    def send(node, message, makes_link):
        if makes_link:
            dialled.append(message)

    monkeypatch.setattr(links.mesh, "send", send)
    evidence = NodeFailed(0, 3, "silent")
    verdict, failed = Verdict(0, 1, "over"), RankFailed(0, Failure(0, 1, "over"))
    for message in (verdict, failed, NodeFailed(0, 2, "you are out"), NodeFailed(0, 1, "I leave"), evidence, Report(0)):
        links.send(2, message)
    assert dialled == [evidence, Report(0)]


def test_a_silent_start_names_the_ranks_it_waits_for_at_doubling_intervals(tmp_path, monkeypatch):
    writer, lines = Writer(), list[str]()
    monkeypatch.setattr(writer, "forward", lambda data: lines.append(data.decode()))
    reports = Reports(0, writer, tmp_path)
    reports.hosts |= {0: "h1", 1: "h2", 2: "h3"}
    world = World(0, (0, 0, 1, 1), (2,))

    def said(ranks, now, world=world):
        lines.clear()
        reports.await_ranks(ranks, world, now)
        return lines.copy()

    everyone = (0, 1, 2, 3)
    assert not said((), 0.0, None)  # the hosts meet
    assert not said(everyone, 1000.0) and not said(everyone, 1029.0)
    assert said(everyone, 1030.0) == [
        "[deadpool] waiting for 4 of 4 ranks to reach training, for 30 s: rank(s) 0, 1 on node 0 (h1); "
        "rank(s) 2, 3 on node 1 (h2); their output is in rank0000.node0.log and so on\n"
    ]
    assert not said((2, 3), 1089.0)  # 60 s after the line before, at the earliest
    reports.say("a line about something else")
    assert not said((2, 3), 1090.0) and not said((2, 3), 1149.0)
    assert "2 of 4 ranks to reach training, for 150 s: rank(s) 2, 3 on node 1 (h2)" in said((2, 3), 1150.0)[0]
    assert not said((2, 3), 1151.0) and not said((2, 3), 1269.0) and said((2, 3), 1270.0)
    assert not said((), 2000.0) and not said((), 9000.0)  # all ranks are in training
    after = World(1, (2, 2, 1, 1))
    assert not said((0, 1), 9001.0, after) and not said((0, 1), 9030.0, after)
    assert "for 30 s: rank(s) 0, 1 on node 2 (h3)" in said((0, 1), 9031.0, after)[0]
    reports.emit(events.SwapPlanned(restore_step=3, lost_nodes=(0,), takers={"0": 2}, lost_ranks=(7,)))
    said((), 9031.0)
    swapped = World(2, (2, 2, 1, 1, 3, 3, 3, 3))
    said(range(8), 9031.5, swapped)
    [line] = said(range(8), 9061.5, swapped)
    assert "rank(s) 0, 1 on node 2 (h3); rank(s) 7, 4, 5, 6 on node 3" in line, "new processes first"
    assert "rank0000.node2.log" in line
    reports.emit(events.SwapPlanned(restore_step=4))
    many = World(3, tuple(range(1000)))
    said(range(1000), 9032.0, many)
    [line] = said(range(1000), 9999.0, many)
    assert "1000 of 1000 ranks" in line and "rank(s) 3 on node 3; 996 more node(s);" in line and len(line) < 300
    writer.close()
    view = JobView()  # which `deadpool watch` shows, wherever the terminal of this host is
    for event in (tmp_path / "events.0.jsonl").read_bytes().splitlines():
        view.apply(events.decoder.decode(event))
    assert any("2 of 4 ranks to reach training, for 150 s: rank(s) 2, 3 on node 1" in told.text for told in view.lines)


def test_notes_are_said_once_in_a_generation_whoever_says_them_again(tmp_path, capfdbinary):
    writer = Writer()
    reports = Reports(2, writer, tmp_path)
    for generation in (0, 1):
        reports.generation = generation
        for rank in (4, 5):
            reports.worker_event("Note", {"text": f"snapshots of rank {rank} could not be page-locked"})
        reports.emit(events.Note(text="node 3: no step was mirrored for 1800 s"))
        reports.emit(events.Note(text="node 3: no step was mirrored for 1800 s"))
    writer.close()
    said = [b"node 2: snapshots of rank 4 could not be page-locked", b"node 3: no step was mirrored for 1800 s"]
    assert capfdbinary.readouterr().out.splitlines() == [b"[deadpool] " + line for line in said + said]
    assert len((tmp_path / "events.2.jsonl").read_bytes().splitlines()) == 8, "the log has all of them"


# ---- addresses


def test_which_address_of_this_host_is_meant():
    found = [("lo", "127.0.0.1"), ("eth0", "192.168.3.4"), ("ib0", "10.1.7.9"), ("ib0", "10.1.8.9"), ("ib0", "fd00::9")]
    assert address_of("10.9.9.9", found) == "10.9.9.9", "an address is what it is; binding to it will tell"
    assert address_of("ib0", found) == "10.1.7.9"
    assert address_of("10.1.8.0/24", found) == "10.1.8.9"
    assert address_of("fd00::/16", found) == "fd00::9"
    for wrong in ("ib1", "172.16.0.0/12"):
        with pytest.raises(ConfigError, match=f"interface_address {wrong} is no address of .*eth0 192.168.3.4, ib0 10"):
            address_of(wrong, found)
    with pytest.raises(ConfigError, match="such as 10.1.0.0/16"):
        address_of("10.1.0.0/99", found)
    assert addresses_of("ib0, fd00::/16,ib0,eth0", found) == ("10.1.7.9", "fd00::9", "192.168.3.4")
    with pytest.raises(ConfigError, match="interface_address ib1 is no address of"):
        addresses_of("ib0,ib1", found)


def test_the_kernel_knows_this_hosts_addresses():
    assert ("lo", "127.0.0.1") in addresses_here()
    assert address_of("127.0.0.0/8") == address_of("lo") == "127.0.0.1"


# ---- where it runs


MEMPOLICY = """
import ctypes, os
from deadpool_plugin.host.proc import reset_affinity
libc, policy, bound = ctypes.CDLL(None), ctypes.c_int(-1), ctypes.c_ulong(1)
set_policy, get_policy = {"x86_64": (238, 239), "aarch64": (237, 236)}.get(os.uname().machine, (0, 0))
if not set_policy or libc.syscall(set_policy, 2, ctypes.byref(bound), 64):  # MPOL_BIND, to node 0
    raise SystemExit(77)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
reset_affinity()
assert libc.syscall(get_policy, ctypes.byref(policy), None, 0, None, 0) == 0 and policy.value == 0, policy
print(len(os.sched_getaffinity(0)))
"""


def test_what_the_launcher_bound_the_first_rank_to_does_not_bind_the_agent():
    ran = subprocess.run([sys.executable, "-c", MEMPOLICY], capture_output=True, text=True, check=False)
    if ran.returncode == 77:
        pytest.skip("the kernel does not let this process choose its memory's place")
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == len(os.sched_getaffinity(0))


FIRST = """
import os, subprocess, sys, threading
from deadpool_plugin.host.proc import come_first
from deadpool_plugin.transport.linux import lock_memory
come_first()
lock_memory()
found = [os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK]
thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
child = subprocess.run([sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"], capture_output=True)
locked = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmLck"))
print(*found, child.stdout.decode().strip(), locked)
"""


def test_only_the_thread_of_the_heartbeats_comes_before_the_trainers():
    ran = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    own, thread, child, locked = map(int, ran.stdout.split())
    assert (own in (os.SCHED_RR, os.SCHED_OTHER), thread, child) == (True, os.SCHED_OTHER, os.SCHED_OTHER)
    if os.geteuid() == 0 and own == os.SCHED_OTHER:
        pytest.skip("real-time priority is not permitted here")
    assert locked == 0 or locked > 1000, "all of what it has, or nothing"


# ---- processes


def sleeper(**environment):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, **environment})


def test_the_watch_sees_a_kill_and_a_stop():
    async def scenario():
        seen: list[int | float | str] = []
        watch = Processes("tag.", silent_after_s=0.2)
        watch.start()
        killed, stopped = sleeper(), sleeper()
        watch.watch(killed.pid, seen.append, seen.append)
        watch.watch(stopped.pid, seen.append, lambda seconds: seen.append("stopped"))
        try:
            killed.kill()
            stopped.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 10
            while len(seen) < 2 and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
        finally:
            watch.close()
            stopped.kill()
            killed.wait()
            stopped.wait()
        return seen

    assert sorted(map(str, asyncio.run(scenario()))) == ["-9", "stopped"]
    assert described_exit(-9) == "killed by SIGKILL" and described_exit(3) == "exit code 3"


def test_a_watch_that_fails_is_heard_of():
    async def scenario():
        def fails(code: int) -> None:
            raise ZeroDivisionError

        failures: asyncio.Queue[Exception] = asyncio.Queue()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.put_nowait(context["exception"]))
        watch, child = Processes("tag.", silent_after_s=10.0), sleeper()
        watch.start()
        watch.watch(child.pid, fails, lambda seconds: None)
        child.kill()
        try:
            return await asyncio.wait_for(failures.get(), 10)
        finally:
            child.wait()

    assert isinstance(asyncio.run(scenario()), ZeroDivisionError)


def test_the_sweep_kills_what_carries_the_tag_and_nothing_else():
    mine, other = (sleeper(**{proc.TAG: f"{os.getpid()}.{tag}.0."}) for tag in (5, 51))
    try:
        assert proc.sweep(f"{os.getpid()}.5.") == 1
        assert mine.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


def test_who_has_no_environment_costs_nobody_a_further_look(monkeypatch):
    """Threads of the kernel, whom /proc names first, and processes that have ended."""
    monkeypatch.setattr(proc, "EXEC_LOOKS_MAX", 3)
    answers = {"7": [b"", b"", b"TAG=x"]}
    monkeypatch.setattr(os, "listdir", lambda path: ["1", "2", "3", "4", "5", "6", "7"])
    monkeypatch.setattr(proc, "_read", lambda path: answers.get(path.split("/")[2], [b""] * 2).pop(0))
    monkeypatch.setattr(proc, "_within_exec", lambda pid: pid == 7)
    assert dict(proc.environments()) == {**dict.fromkeys(range(1, 7), b""), 7: b"TAG=x"}


def test_who_is_within_its_exec_is_found():
    """On busy CPUs most processes are met while their new memory has no environment yet."""
    busy = [subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"]) for _ in range(2 * len(os.sched_getaffinity(0)))]
    try:
        for number in range(60):
            tag = f"{os.getpid()}.x{number}."
            child = subprocess.Popen(["/bin/sleep", "60"], env={**os.environ, proc.TAG: tag})
            assert proc.sweep(tag) == 1, f"process {number}"
            assert child.wait(10) == -signal.SIGKILL
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_status_of_what_has_gone():
    child = sleeper()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    status = proc.look(child.pid)
    assert status is not None and status.ending
    child.wait()
    assert proc.look(child.pid) is None


@pytest.mark.parametrize(
    ("state", "flags", "status", "dumping", "seen"),
    [
        ("S", 0x400040, 0, 0, proc.ProcessStatus("S")),
        ("T", 0x400040, 0x137F, 0, proc.ProcessStatus("T")),
        ("R", 0x400044, 9, 0, proc.ProcessStatus("R", True, -9)),
        ("D", 0x400440, 11, 1, proc.ProcessStatus("D", True, -11)),
        ("D", 0x400440, 0, 1, proc.ProcessStatus("D", True, -signal.SIGSEGV)),
        ("R", 0x400440, 0, 0, proc.ProcessStatus("R", True)),
        ("R", 0x400444, 0, 0, proc.ProcessStatus("R", True)),
        ("Z", 0x400444, 0x300, 0, proc.ProcessStatus("Z", True, 3)),
    ],
    ids=["lives", "stopped", "killed", "dumps", "dumps_old_kernel", "a_thread_ends_it", "so_with_0", "so_with_3"],
)
def test_a_death_is_seen_before_its_core_dump_is_written(tmp_path, state, flags, status, dumping, seen):
    (tmp_path / "77").mkdir()
    between = " ".join("0" for _ in range(42))
    (tmp_path / "77" / "stat").write_text(f"77 (a) name) {state} 1 77 77 0 -1 {flags} {between} {status}\n")
    (tmp_path / "77" / "status").write_text(f"Name:\tpython\nCoreDumping:\t{dumping}\nThreads:\t2\n")
    assert proc.look(77, str(tmp_path)) == seen
    (tmp_path / "77" / "status").unlink()
    assert proc.look(77, str(tmp_path)) == (seen if status else proc.ProcessStatus(seen.state, seen.ending))


def test_a_link_that_stays_silent_is_told_as_a_silent_one():
    """One that is closed counts against its node at once; a silent one may be the fault of this pair of hosts."""
    fed: list[api.Input] = []
    lost = api.LinkLost(3, "no answer", silent=True, still=True)
    Links._link_lost(fake(_node=local_node(feed=fed.append), gone=lambda node: None), lost)
    assert fed == [lost]
