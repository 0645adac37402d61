"""The stand-in for NCCL when something fails: lost and silent peers, aborts, inits that do not come to their end,
errors through torch, leaks. Each fault that can be ordered is ordered here, and struck.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import nccl_api as nccl
from support.comm import become, plain
from support.forked import Cell, Fleet
from support.zygote import in_zygote

from deadpool_plugin.comm.groups import host_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not nccl.is_stand_in(), reason="the stand-in for NCCL is not preloaded (scripts/test_cuda.sh)"),
]
SETTLE_S = 2.0
"""A thread that was joined is in /proc for a moment more."""
CYCLES = 50


# ---- lost peers


class Meeting:
    """Cells of a test in which a rank is killed."""

    def __init__(self, ranks: int) -> None:
        self.identity = Cell(4096)
        self.connected, self.entered, self.seen = ([Cell(4096) for _ in range(ranks)] for _ in range(3))
        self.aborted = [Cell(4096) for _ in range(ranks)]


def _survivor(rank: int, ranks: int, meeting: Meeting) -> Any:
    """Rank 3 is the victim; its neighbours in the ring, 2 and 0, notice, and rank 1 only when those have aborted."""
    communicator = nccl.join(meeting.identity, rank, ranks)
    value = torch.ones(1 << 20, device="cuda")
    assert communicator.all_reduce(value) == nccl.SUCCESS
    communicator.stream.synchronize()
    meeting.connected[rank].set()
    if rank == 3:
        signal.pause()
    assert communicator.all_reduce(value) == nccl.SUCCESS
    meeting.entered[rank].set()
    if rank == 1:
        for neighbour in (0, 2):
            meeting.seen[neighbour].get()
        assert communicator.error() == nccl.SUCCESS
        meeting.seen[1].set()
    nccl.until(lambda: communicator.error() != nccl.SUCCESS)
    meeting.seen[rank].set()
    meeting.seen[1].get()
    assert not communicator.stream.query()  # its kernel spins
    later = communicator.all_reduce(value)
    in_a_group = nccl.group(lambda: communicator.all_reduce(value))
    destroyed = nccl.call("ncclCommDestroy", communicator.handle)
    aborted = communicator.abort()
    communicator.stream.synchronize()
    return later, in_a_group, destroyed, aborted, nccl.count("communicators")


@in_zygote
def test_a_killed_peer_is_an_error_that_stays_and_a_kernel_that_spins_until_the_abort() -> None:
    with Fleet(nccl.DEADLINE_S) as fleet:
        meeting = Meeting(4)
        ranks = [fleet.fork(_survivor, rank, 4, meeting) for rank in range(4)]
        fleet.until(*meeting.connected, *meeting.entered[:3])
        fleet.kill(ranks[3])
        results = fleet.values(ranks[:3])
        assert fleet.wait(ranks[3:])[0].signal == signal.SIGKILL
    gone = nccl.REMOTE_ERROR
    assert results == [(gone, ([gone], gone), gone, nccl.SUCCESS, 0)] * 3


def _beside_a_silent_one(communicator: nccl.Communicator, rank: int, ranks: int, aborted: Cell) -> Any:
    value = torch.ones(1 << 20, device="cuda")
    assert communicator.all_reduce(value) == nccl.SUCCESS
    communicator.stream.synchronize()
    if rank == 1:
        nccl.order("silent", 1)
    assert communicator.all_reduce(value) == nccl.SUCCESS
    if rank == 1:
        nccl.until(lambda: nccl.count("silent") == 1)
        aborted.get()
        nccl.order("silent", 0)  # it finds that the other one has gone
        nccl.until(lambda: communicator.error() != nccl.SUCCESS)
        return communicator.error(), communicator.abort()
    thread, results = nccl.in_thread(communicator.abort)  # from another thread, while this one waits for the stream
    communicator.stream.synchronize()
    thread.join()
    aborted.set()
    return nccl.SUCCESS, *results


@in_zygote
def test_a_silent_peer_is_no_error_and_an_abort_from_another_thread_ends_the_wait() -> None:
    assert nccl.together(_beside_a_silent_one, 2, Cell(4096)) == [(0, 0), (nccl.REMOTE_ERROR, 0)]


def _beside_one_that_has_finished(
    communicator: nccl.Communicator, rank: int, ranks: int, entered: Cell, destroyed: Cell
) -> Any:
    """Around the ring from 1 by 2 to 0: rank 1 has gone, in good order, while rank 0 waits for rank 2."""
    value = torch.full((1000,), float(rank), device="cuda")
    assert communicator.all_reduce(value) == nccl.SUCCESS
    communicator.stream.synchronize()
    if rank == 2:
        nccl.order("silent", 1)
    code = nccl.TYPES[value.dtype]
    assert communicator.issue("ncclBroadcast", value, value, nccl.size(value), code, 1) == nccl.SUCCESS
    if rank == 0:
        entered.set()
    if rank == 1:
        entered.get()
        communicator.stream.synchronize()
        nccl.checked("ncclCommDestroy", communicator.handle)
        destroyed.set()
        return nccl.SUCCESS
    if rank == 2:
        destroyed.get()
        nccl.order("silent", 0)
    communicator.stream.synchronize()
    return communicator.error()


@in_zygote
def test_a_peer_that_has_finished_and_left_is_no_error() -> None:
    assert nccl.together(_beside_one_that_has_finished, 3, Cell(4096), Cell(4096)) == [nccl.SUCCESS] * 3


def _connects_to_nobody(rank: int, identity: Cell, made: Cell, gone: Cell) -> Any:
    os.environ.update(NCCL_SOCKET_RETRY_CNT="3", NCCL_SOCKET_RETRY_SLEEP_MSEC="1")
    communicator = nccl.join(identity, rank, 2)
    if rank == 1:
        made.set()
        signal.pause()
    gone.get()
    result = communicator.all_reduce(torch.ones(1, device="cuda"))
    return result, communicator.error(), nccl.count("launches"), communicator.abort()


@in_zygote
def test_a_peer_that_died_before_the_first_operation_refuses_and_no_kernel_is_launched() -> None:
    with Fleet(nccl.DEADLINE_S) as fleet:
        identity, made, gone = Cell(4096), Cell(4096), Cell(4096)
        ranks = [fleet.fork(_connects_to_nobody, rank, identity, made, gone) for rank in range(2)]
        fleet.until(made)
        fleet.kill(ranks[1])
        assert fleet.wait(ranks[1:])[0].signal == signal.SIGKILL
        gone.set()
        assert fleet.values(ranks[:1]) == [(nccl.REMOTE_ERROR, nccl.SUCCESS, 0, nccl.SUCCESS)]


def _abort_while_connecting(communicator: nccl.Communicator, rank: int, ranks: int, done: Cell, fault: bool) -> Any:
    if rank == 1:  # never comes to its first operation
        done.get()
        return communicator.abort()
    if fault:
        nccl.order("connect_delay_ms", -1)
    value = torch.ones(1, device="cuda")
    sockets = _descriptors("socket")
    thread, results = nccl.in_thread(lambda: communicator.all_reduce(value))
    if fault:
        nccl.until(lambda: nccl.count("connect_delay_ms") == 1)
    else:
        nccl.until(lambda: _descriptors("socket") > sockets)  # one to the other rank, which does not answer
    assert thread.is_alive()
    aborted = communicator.abort()
    thread.join()
    done.set()
    return results[0], aborted, nccl.count("launches"), nccl.count("communicators")


@pytest.mark.parametrize("fault", [False, True], ids=["the peer has not come", "connect_delay_ms"])
@in_zygote
def test_an_abort_ends_connecting(fault: bool) -> None:
    zero, one = nccl.together(_abort_while_connecting, 2, Cell(4096), fault)
    assert zero == (nccl.INTERNAL_ERROR, nccl.SUCCESS, 0, 0) and one == nccl.SUCCESS


# ---- an init that does not come to its end


def _cut(rank: int, identity: Cell, fault: bool) -> Any:
    """One of two ranks alone, until its sockets are shut down under it."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    torch.cuda.set_device(0)
    before, threads = _descriptors(), len(os.listdir("/proc/self/task"))
    made = nccl.unique_id()
    if fault:
        nccl.order("init_hangs", 1)
    thread, results = nccl.in_thread(lambda: nccl.init(made, 2, rank)[0])
    if fault:
        nccl.until(lambda: nccl.count("init_hangs") == 1)
        nccl.order("init_hangs", 0)
    nccl.until(lambda: nccl.count("check_ins") == 1)
    assert len(_listeners()) == 2  # the root's and the rank's own
    assert thread.is_alive()
    for descriptor in _listeners():
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert nccl.count("communicators") == nccl.count("roots") == 0
    nccl.until(lambda: len(os.listdir("/proc/self/task")) == threads)  # the thread that called has ended, too
    return results[0], _descriptors() - before


def _listeners() -> list[int]:
    """Descriptors of sockets that listen."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.append(int(entry.name))
        except FileNotFoundError:
            continue  # closed meanwhile
    return found


@pytest.mark.parametrize("fault", [False, True], ids=["the other one has not come", "init_hangs"])
@in_zygote
def test_an_init_ends_when_its_sockets_are_cut_and_leaves_nothing(fault: bool) -> None:
    with Fleet(nccl.DEADLINE_S) as fleet:
        ((result, descriptors),) = fleet.values([fleet.fork(_cut, 0, Cell(4096), fault)])
    assert (result, descriptors) == (nccl.SYSTEM_ERROR, 0)


def _same_device(rank: int, identity: Cell, host: str) -> Any:
    os.environ.pop("NCCL_MULTI_RANK_GPU_ENABLE", None)
    os.environ["NCCL_HOSTID"] = host
    torch.cuda.set_device(0)
    if rank == 0:
        identity.set(nccl.unique_id())
    result, communicator = nccl.init(identity.get(), 2, rank)
    return result, bool(communicator.handle.value), nccl.count("communicators")


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@in_zygote
def test_two_ranks_of_a_host_on_one_device_are_refused(hosts: str) -> None:
    with Fleet(nccl.DEADLINE_S) as fleet:
        identity = Cell(4096)
        results = fleet.values([fleet.fork(_same_device, rank, identity, hosts[rank]) for rank in range(2)])
    assert results == [(nccl.INVALID_USAGE, False, 0) if hosts == "aa" else (nccl.SUCCESS, True, 1)] * 2


# ---- errors through torch, and an abort that hangs


def _failing_in_torch(rank: int, fault: str, address: Cell) -> Any:
    os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
    if rank == 0:
        keep, text = host_store("127.0.0.1")
        address.set(text)
    torch.cuda.set_device(0)
    plain(rank, 2, address.get(), "cpu:gloo,cuda:nccl")
    value = torch.ones(4, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    nccl.order(fault, nccl.SYSTEM_ERROR)
    message = ""
    try:
        dist.all_reduce(value)
        nccl.until(lambda: nccl.count(fault) == 1)
        while True:
            dist.all_reduce(value)
    except RuntimeError as error:
        message = str(error)
    dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda")).abort()  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    return nccl.count(fault), "unhandled system error" in message, nccl.count("communicators")


@pytest.mark.parametrize("fault", ["fail_at_issue", "fail_on_stream"])
@in_zygote
def test_torch_raises_what_nccl_gives(fault: str) -> None:
    with Fleet(nccl.DEADLINE_S) as fleet:
        address = Cell(4096)
        ranks = [fleet.fork(_failing_in_torch, rank, fault, address) for rank in range(2)]
        assert fleet.values(ranks) == [(1, True, 0)] * 2


def _hanging_abort(communicator: nccl.Communicator, rank: int, ranks: int) -> Any:
    value = torch.ones(4, device="cuda")
    assert communicator.all_reduce(value) == nccl.SUCCESS
    communicator.stream.synchronize()
    if rank == 0:
        assert communicator.all_reduce(value) == nccl.SUCCESS
    nccl.order("abort_hangs", 1)
    thread, results = nccl.in_thread(communicator.abort)
    communicator.stream.synchronize()  # the kernel has ended
    nccl.until(lambda: nccl.count("abort_hangs") == 1)
    assert thread.is_alive() and nccl.count("communicators") == 1
    nccl.order("abort_hangs", 0)
    thread.join()
    return results[0], communicator.abort()


@in_zygote
def test_an_abort_that_hangs_has_ended_its_kernels() -> None:
    assert nccl.together(_hanging_abort) == [(nccl.SUCCESS, nccl.INVALID_ARGUMENT)] * 2


def _dead_context(communicator: nccl.Communicator, rank: int, ranks: int) -> Any:
    value = torch.ones(4, device="cuda")
    assert communicator.all_reduce(value) == nccl.SUCCESS
    communicator.stream.synchronize()
    if rank == 0:
        assert communicator.all_reduce(value) == nccl.SUCCESS
        ctypes.CDLL(None).fakecuda_break(719)
    else:
        value.cpu()
    arguments = value, value, nccl.size(value), nccl.TYPES[value.dtype], nccl.SUM
    later = communicator.issue_at_once("ncclAllReduce", *arguments) if rank == 0 else nccl.CUDA_ERROR
    return later, communicator.abort(), nccl.count("communicators")


@in_zygote
def test_a_dead_context_ends_kernels_and_the_abort_returns() -> None:
    assert nccl.together(_dead_context) == [(nccl.CUDA_ERROR, nccl.SUCCESS, 0)] * 2


# ---- leaks


def _descriptors(kind: str = "") -> int:
    """Open descriptors of this process whose target has `kind` in its name."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:
            continue  # the one of the listing itself
    return sum(kind in link for link in links)


def _swap_values(communicator: nccl.Communicator, sent: torch.Tensor, received: torch.Tensor, peer: int) -> None:
    inside, end = nccl.group(lambda: communicator.send(sent, peer), lambda: communicator.receive(received, peer))
    assert (inside, end) == ([nccl.SUCCESS] * 2, nccl.SUCCESS)


def _held(expected: Any = None) -> Any:
    """Return this process's descriptors, threads, free device memory and communicators, once they are `expected`."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        names = []
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                names.append(Path(f"/proc/self/task/{task}/comm").read_text())
        communicators = nccl.count("communicators") + nccl.count("roots")
        held = _descriptors(), sorted(names), torch.cuda.mem_get_info()[0], communicators
        if held == expected or time.monotonic() > deadline:
            return held
        time.sleep(0.01)


def _cycles(rank: int, identities: list[Cell]) -> Any:
    """Return what is held after each of many lives of a communicator."""
    become(rank, 2)
    figures = list[Any]()
    value, sent = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
    stream = torch.cuda.Stream()
    for identity in identities:
        communicator = nccl.join(identity, rank, 2)
        communicator.stream = stream
        assert communicator.all_reduce(value) == nccl.SUCCESS
        _swap_values(communicator, sent, value, 1 - rank)
        stream.synchronize()
        if rank == 0:  # one operation is in flight
            assert communicator.all_reduce(value) == nccl.SUCCESS
        assert communicator.abort() == nccl.SUCCESS
        stream.synchronize()
        figures.append(_held(*figures[:1]))
    return figures, nccl.count("made"), nccl.count("aborted")


@in_zygote
def test_fifty_communicators_leave_no_socket_thread_or_memory() -> None:
    with Fleet(nccl.DEADLINE_S) as fleet:
        identities = [Cell(4096) for _ in range(CYCLES)]
        results = fleet.values([fleet.fork(_cycles, rank, identities) for rank in range(2)])
    for figures, made, aborted in results:
        assert (made, aborted) == (CYCLES, CYCLES)
        assert figures == figures[:1] * CYCLES
        assert not [name for name in figures[0][1] if name.startswith("fakenccl")]
