"""A member dies or stops in the middle of an operation; the others are unblocked, a replacement that has rehearsed
takes its place, and everything works on the same handles.

Rules of this file: no timing is asserted; a test ends by its result or by the fleet's deadline with all stacks.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import present
from support.comm import battery, become, live
from support.forked import Cell, Fleet
from support.zygote import in_zygote

from deadpool_plugin.comm import patches
from deadpool_plugin.comm.groups import Groups, host_store
from deadpool_plugin.comm.handle import Handle
from deadpool_plugin.errors import GenerationChanged

SIZE, VICTIM = 3, 1
SOME = ("all_reduce", "reduce_scatter", "point_to_point", "batch", "coalesced", "objects")
REPEAT = int(os.environ.get("DEADPOOL_TEST_REPEAT", "1"))


class Cells:
    """Facts that the processes of one test tell each other."""

    def __init__(self) -> None:
        self.stores = [Cell(4096) for _ in range(3)]
        self.recording = Cell()
        self.entered = [Cell(4096) for _ in range(SIZE)]
        self.abort = [Cell(4096) for _ in range(3)]
        self.rehearsed = Cell(4096)
        self.take_over = Cell(4096)
        self.unblocked = [Cell(4096) for _ in range(SIZE)]


def _big_isend(group: Any) -> None:
    tensor = torch.ones(16 << 20)
    present(dist.isend(tensor, VICTIM, group=group)).wait()


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1 << 16), group=group),
    "all_reduce_async": lambda group: dist.all_reduce(torch.ones(1 << 16), group=group, async_op=True).wait(),
    "future": lambda group: dist.all_reduce(torch.ones(4), group=group, async_op=True).get_future().wait(),
    "reduce_scatter": lambda group: dist.reduce_scatter_tensor(torch.empty(4), torch.ones(4 * SIZE), group=group),
    "all_gather": lambda group: dist.all_gather_into_tensor(torch.empty(4 * SIZE), torch.ones(4), group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "monitored_barrier": lambda group: dist.monitored_barrier(group=group),
    "recv": lambda group: dist.recv(torch.empty(4), VICTIM, group=group),
    "recv_anysource": lambda group: dist.recv(torch.empty(4), group=group),
    "big_isend": _big_isend,
    "batch": lambda group: [
        work.wait()
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, torch.ones(4), VICTIM, group), dist.P2POp(dist.irecv, torch.ones(4), VICTIM, group)]
        )
    ],
    "broadcast_object_list": lambda group: dist.broadcast_object_list([None], src=VICTIM, group=group),
}


def _startup(rank: int) -> tuple[list[Any], Any]:
    groups = [dist.group.WORLD, dist.new_group(list(range(SIZE))), dist.new_group([0, 2]), dist.new_group([rank])]
    return groups, battery(groups[1], *SOME)


def _host(rank: int, cells: Cells, index: int, keep: list[Any]) -> None:
    if rank == 0:
        server, text = host_store("127.0.0.1")
        keep.append(server)
        cells.stores[index].set(text)


def _listen(groups: Groups, cells: Cells) -> None:
    """Announce on another thread, as the worker's link to its agent does."""

    def listen() -> None:
        for generation in (1, 2):
            cells.abort[generation].get()
            groups.interrupt(generation)
            groups.interrupt(generation)

    threading.Thread(target=listen, daemon=True).start()


def _member(rank: int, operation: str, cells: Cells) -> Any:
    keep: list[Any] = []
    _host(rank, cells, 0, keep)
    groups = live(rank, SIZE, cells.stores[0].get(), explain_timeout_s=60.0)
    made, first = _startup(rank)
    recording = groups.stop_recording()
    identities = [id(group) for group in made]
    dist.barrier()
    if rank == VICTIM:
        cells.recording.set(recording)
        cells.entered[rank].set()
        signal.pause()
    _listen(groups, cells)
    _host(rank, cells, 1, keep)
    cells.entered[rank].set()
    try:
        OPERATIONS[operation](made[1])
        raise AssertionError("the operation ended although a member never joined it")
    except GenerationChanged as change:
        assert change.generation == 1
    try:
        dist.all_reduce(torch.ones(1), group=made[-1])
        raise AssertionError("an operation was issued between the generations")
    except GenerationChanged:
        pass
    cells.unblocked[rank].set()
    groups.rebuild(1, cells.stores[1].get())
    assert identities == [id(group) for group in made] and groups.generation == 1
    results = _after(made)
    return first, results


def _after(made: list[Any]) -> Any:
    results = [battery(made[0], *SOME), battery(made[1], *SOME)]
    if dist.get_rank() != VICTIM:
        results.append(battery(made[2], *SOME))
    dist.all_reduce(torch.ones(2), group=made[3])
    dist.barrier()
    dist.destroy_process_group()
    return results


def _newcomer(cells: Cells) -> Any:
    become(VICTIM, SIZE)
    groups = Groups()
    patches.install(groups)
    groups.rehearse(cells.recording.get())
    dist.init_process_group("gloo")
    made, first = _startup(VICTIM)
    groups.finish_rehearsal()
    cells.rehearsed.set()
    cells.take_over.get()
    groups.rebuild(1, cells.stores[1].get())
    assert all(isinstance(group, Handle) for group in (made[0], made[1], made[3]))
    return first, _after(made)


def _swap(operation: str, signum: int) -> None:
    with Fleet() as fleet:
        cells = Cells()
        members = [fleet.fork(_member, rank, operation, cells) for rank in range(SIZE)]
        newcomer = fleet.fork(_newcomer, cells)
        fleet.until(*cells.entered, cells.rehearsed)
        fleet.kill(members[VICTIM], signum)
        if signum == signal.SIGKILL:
            (outcome,) = fleet.wait([members[VICTIM]])
            assert outcome.signal == signal.SIGKILL
        cells.abort[1].set()
        fleet.until(*(cells.unblocked[rank] for rank in range(SIZE) if rank != VICTIM))
        cells.take_over.set()
        others = [members[rank] for rank in range(SIZE) if rank != VICTIM]
        zero, two, one = fleet.values([*others, newcomer])
    # before the failure and after the swap, every rank got the same from the same collectives
    for first, results in (zero, one, two):
        assert results[0] == results[1] == first
    assert len(zero[1]) == len(two[1]) == 3 and len(one[1]) == 2


@pytest.mark.parametrize("repeat", range(REPEAT))
@pytest.mark.parametrize("operation", OPERATIONS)
@in_zygote
def test_a_member_is_killed(operation: str, repeat: int) -> None:
    _swap(operation, signal.SIGKILL)


@pytest.mark.parametrize("repeat", range(REPEAT))
@pytest.mark.parametrize("operation", ["all_reduce", "barrier", "recv", "big_isend", "broadcast_object_list"])
@in_zygote
def test_a_member_stops(operation: str, repeat: int) -> None:
    _swap(operation, signal.SIGSTOP)


def _interrupted_twice(rank: int, cells: Cells) -> Any:
    """Generation 1 is never completed: its newcomer does not come. Generation 2 is."""
    keep: list[Any] = []
    for index in range(3):
        _host(rank, cells, index, keep)
    groups = live(rank, SIZE, cells.stores[0].get())
    made, first = _startup(rank)
    recording = groups.stop_recording()
    dist.barrier()
    if rank == VICTIM:
        cells.recording.set(recording)
        cells.entered[rank].set()
        signal.pause()
    _listen(groups, cells)
    cells.entered[rank].set()
    cells.abort[1].get()
    groups.interrupt(1)
    cells.unblocked[rank].set()
    try:
        groups.rebuild(1, cells.stores[1].get())
        raise AssertionError("rebuilt without a member")
    except GenerationChanged as change:
        assert change.generation == 2
    assert groups.generation == 0
    groups.rebuild(2, cells.stores[2].get())
    groups.interrupt(1)
    groups.interrupt(2)
    return first, _after(made)


def _second_newcomer(cells: Cells) -> Any:
    become(VICTIM, SIZE)
    groups = Groups()
    patches.install(groups)
    groups.rehearse(cells.recording.get())
    dist.init_process_group("gloo")
    made, first = _startup(VICTIM)
    cells.take_over.get()
    groups.rebuild(2, cells.stores[2].get())
    return first, _after(made)


@pytest.mark.parametrize("repeat", range(REPEAT))
@in_zygote
def test_a_second_loss_interrupts_the_rebuild(repeat: int) -> None:
    with Fleet() as fleet:
        cells = Cells()
        members = [fleet.fork(_interrupted_twice, rank, cells) for rank in range(SIZE)]
        newcomer = fleet.fork(_second_newcomer, cells)
        fleet.until(*cells.entered)
        fleet.kill(members[VICTIM])
        cells.abort[1].set()
        fleet.until(*(cells.unblocked[rank] for rank in range(SIZE) if rank != VICTIM))
        cells.abort[2].set()
        cells.take_over.set()
        zero, two, one = fleet.values([members[0], members[2], newcomer])
    for first, results in (zero, one, two):
        assert results[0] == results[1] == first


SHORT = timedelta(seconds=5)


def _patient(rank: int, cells: Cells) -> Any:
    """All groups have the shortest of time-outs, the default one too."""
    keep: list[Any] = []
    _host(rank, cells, 0, keep)
    groups = live(rank, SIZE, cells.stores[0].get(), group_timeout=SHORT)
    dist.new_group(list(range(SIZE)), timeout=SHORT)
    recording = groups.stop_recording()
    dist.barrier()
    if rank == VICTIM:
        cells.recording.set(recording)
        cells.entered[rank].set()
        signal.pause()
    _host(rank, cells, 1, keep)
    cells.entered[rank].set()
    cells.abort[1].get()
    groups.rebuild(1, cells.stores[1].get())
    return battery(None, "all_reduce")


def _late(cells: Cells) -> Any:
    become(VICTIM, SIZE)
    groups = Groups()
    patches.install(groups)
    groups.rehearse(cells.recording.get())
    dist.init_process_group("gloo", timeout=SHORT)
    dist.new_group(list(range(SIZE)), timeout=SHORT)
    groups.finish_rehearsal()
    cells.abort[1].get()
    time.sleep(SHORT.total_seconds() + 2)  # its way through past steps
    groups.rebuild(1, cells.stores[1].get())
    return battery(None, "all_reduce")


@in_zygote
def test_a_newcomer_may_take_longer_than_groups_wait() -> None:
    with Fleet() as fleet:
        cells = Cells()
        members = [fleet.fork(_patient, rank, cells) for rank in range(SIZE)]
        newcomer = fleet.fork(_late, cells)
        fleet.until(*cells.entered)
        fleet.kill(members[VICTIM])
        cells.abort[1].set()
        zero, two, one = fleet.values([members[0], members[2], newcomer])
    assert zero == one == two


def _trouble(rank: int, cells: Cells) -> Any:
    """A neighbour dies and nobody announces anything: the original error comes out."""
    keep: list[Any] = []
    _host(rank, cells, 0, keep)
    live(rank, 2, cells.stores[0].get(), explain_timeout_s=0.2)
    dist.barrier()
    cells.entered[rank].set()
    if rank == VICTIM:
        signal.pause()
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError:
        return "the error itself"
    return "no error"


@in_zygote
def test_an_error_nobody_explains_stays_what_it_is() -> None:
    with Fleet() as fleet:
        cells = Cells()
        members = [fleet.fork(_trouble, rank, cells) for rank in range(2)]
        fleet.until(cells.entered[0], cells.entered[1])
        fleet.kill(members[VICTIM])
        assert fleet.values([members[0]]) == ["the error itself"]
