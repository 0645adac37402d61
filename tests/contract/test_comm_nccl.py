"""The same contract over NCCL: every operation gives what plain NCCL gives; an abort out of blocked ones of two groups
whose other member was killed outside or inside of them, or stopped; out of connecting; an operation after a killed
peer's error; rebuilt groups, many times without anything left behind.

Rules of this file: needs one GPU per rank, or NCCL >= 2.30 where several ranks may share one (one NCCL_HOSTID each, no
shared memory and no peer-to-peer, sockets on lo). The processes are forked before CUDA is initialised. What is measured
is recorded as properties of the test.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support import present

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import pytest
import torch
import torch.distributed as dist
from clusters import card
from support.comm import COLLECTIVES, TIMEOUT, battery, become, plain
from support.forked import Cell, Fleet
from support.zygote import in_zygote
from torch._C._distributed_c10d import ErrorType, PrefixStore
from torch.distributed.distributed_c10d import _coalescing_manager

from deadpool_plugin.comm import patches
from deadpool_plugin.comm.groups import Groups, host_store
from deadpool_plugin.comm.handle import Handle
from deadpool_plugin.errors import GenerationChanged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not dist.is_nccl_available(), reason="needs a GPU and NCCL"),
]


NOT_OF_NCCL = {"barriers": "monitored_barrier", "point_to_point": "receiving from anybody"}
"""Collectives of the battery that have parts NCCL knows nothing of; `_battery` has the others."""
BACKENDS = "cpu:gloo,cuda:nccl"
DEADLINE_S, SWAPS_DEADLINE_S = 40.0, 90.0
ROUNDS = 5
"""Number of operations in flight before the member of a group that is inside of them is killed."""


def _device(rank: int) -> torch.device:
    """A GPU of one's own where there are two; else one card shared by both ranks."""
    if torch.cuda.device_count() < 2:
        os.environ.update(card.TOGETHER | card.host_id(rank))
        return torch.device("cuda", 0)
    return torch.device("cuda", rank)


def _groups(rank: int, store: str, **options: Any) -> Groups:
    become(rank, 2)
    torch.cuda.set_device(_device(rank))
    groups = Groups(**options)
    patches.install(groups)
    groups.start(0, store)
    dist.init_process_group(BACKENDS, timeout=TIMEOUT)
    return groups


def _surface(rank: int, of_torch: bool, address: Cell) -> Any:
    """Every operation; what it gives on a group of torch's own, or on a handle."""
    if rank == 0:
        keep, text = host_store("127.0.0.1")
        address.set(text)
    if of_torch:
        torch.cuda.set_device(_device(rank))
        plain(rank, 2, address.get(), BACKENDS)
    else:
        _groups(rank, address.get())
    torch.set_default_device("cuda")
    results = battery(None, *(name for name in COLLECTIVES if name not in NOT_OF_NCCL))
    dist.barrier()
    return results


@in_zygote
def test_every_operation_equals_plain_nccl() -> None:
    with Fleet(DEADLINE_S) as fleet:
        results = []
        for of_torch in (True, False):
            address = Cell()
            results.append(fleet.values([fleet.fork(_surface, rank, of_torch, address) for rank in range(2)]))
    assert results[0] == results[1]


def _both() -> list[Any]:
    """The default group, and one more that has nothing but NCCL. Blocks: until all ranks make it."""
    return [dist.group.WORLD, dist.new_group([0, 1], backend="nccl")]


def _battery(group: Any) -> list[Any]:
    """Synchronous and asynchronous operations, sends and receives alone and in a batch, objects, a barrier."""
    rank = dist.get_rank()
    mine = torch.full((3,), float(rank), device="cuda")
    total = torch.arange(4.0, device="cuda") + rank
    dist.all_reduce(total, group=group)
    later = torch.arange(4.0, device="cuda") + rank
    work = dist.all_reduce(later, group=group, async_op=True)
    work.wait()
    gathered = torch.empty(4, device="cuda")
    dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank), device="cuda"), group=group)
    scattered = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0, device="cuda") + rank, group=group)
    alone, unwaited, batched = (torch.empty(3, device="cuda") for _ in range(3))
    if rank == 0:
        dist.send(mine, 1, group=group)
        assert dist.recv(alone, 1, group=group) == 1
        present(dist.isend(mine, 1, group=group)).wait()
    else:
        assert dist.recv(alone, 0, group=group) == 0
        dist.send(mine, 0, group=group)
        present(dist.irecv(unwaited, 0, group=group)).wait()
    operations = [
        dist.P2POp(dist.isend, mine, 1 - rank, group),
        dist.P2POp(dist.irecv, batched, 1 - rank, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    dist.barrier(group=group)
    results = [total, later, gathered, scattered, alone, batched] + [unwaited] * rank
    return [*(tensor.tolist() for tensor in results), objects]


def _expected(rank: int) -> list[Any]:
    theirs = [float(1 - rank)] * 3
    return [
        [1.0, 3.0, 5.0, 7.0],
        [1.0, 3.0, 5.0, 7.0],
        [0.0, 0.0, 1.0, 1.0],
        [[1.0, 3.0], [5.0, 7.0]][rank],
        theirs,
        theirs,
        *[theirs] * rank,
        [{"rank": 0}, {"rank": 1}],
    ]


class Cells:
    def __init__(self) -> None:
        self.stores = [Cell(4096), Cell(4096)]
        self.recording, self.entered, self.abort = Cell(), Cell(4096), Cell(4096)


def _in_flight(groups: list[Any], tensors: list[torch.Tensor], issued: Callable[[], None] = lambda: None) -> None:
    """One operation of each group, on streams of their own, until both have ended or are aborted."""
    dist.all_reduce(tensors[1], group=groups[1], async_op=True)
    dist.all_reduce(tensors[0], group=groups[0])
    issued()
    torch.cuda.synchronize()


def _member(rank: int, inside: bool, cells: Cells) -> Any:
    """Results before and after the swap, and seconds from the abort to GenerationChanged. Rank 1 is the victim."""
    keep = []
    for index in (0, 1) if rank == 0 else ():
        server, text = host_store("127.0.0.1")
        keep.append(server)
        cells.stores[index].set(text)
    groups = _groups(rank, cells.stores[0].get())
    handle = dist.group.WORLD
    assert isinstance(handle, Handle)
    both = _both()
    first = [_battery(group) for group in both]
    recording = groups.stop_recording()
    tensors = [torch.ones(1 << 24, device="cuda") for _ in both]
    if rank == 1:
        cells.recording.set(recording)
        while inside:
            _in_flight(both, tensors)
        signal.pause()
    aborted: list[float] = []

    def abort() -> None:
        cells.abort.get()
        aborted.append(time.monotonic())
        groups.interrupt(1)

    aborter = threading.Thread(target=abort, daemon=True)
    aborter.start()
    try:
        for _ in range(ROUNDS if inside else 0):
            _in_flight(both, tensors)
        _in_flight(both, tensors, cells.entered.set)
        while aborter.is_alive():
            _in_flight(both, tensors)
        dist.all_reduce(tensors[0])
        raise AssertionError("no GenerationChanged")
    except GenerationChanged as change:
        changed = time.monotonic()
        assert change.generation == 1
    aborter.join()
    groups.rebuild(1, cells.stores[1].get())
    assert dist.group.WORLD is handle
    return first, [_battery(group) for group in both], changed - aborted[0]


def _newcomer(cells: Cells, trained: bool = True) -> Any:
    become(1, 2)
    torch.cuda.set_device(_device(1))
    groups = Groups()
    patches.install(groups)
    groups.rehearse(cells.recording.get())
    dist.init_process_group(BACKENDS, timeout=TIMEOUT)
    both = _both()
    first = [_battery(group) for group in both if trained]
    groups.finish_rehearsal()
    groups.rebuild(1, cells.stores[1].get())
    return first, [_battery(group) for group in both]


@pytest.fixture
def figures(record_property: Any) -> Iterator[dict[str, Any]]:
    """A mapping that is recorded, whether the test passes or not."""
    found: dict[str, Any] = {}
    yield found
    for name, value in found.items():
        record_property(name, value)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
@in_zygote
def test_a_rank_is_replaced(signum: int, inside: bool, figures: dict[str, Any]) -> None:
    with Fleet(DEADLINE_S) as fleet:
        cells = Cells()
        members = [fleet.fork(_member, rank, inside, cells) for rank in range(2)]
        newcomer = fleet.fork(_newcomer, cells)
        fleet.until(cells.recording, cells.entered)
        fleet.kill(members[1], signum)
        cells.abort.set()
        (*zero, seconds), one = fleet.values([members[0], newcomer])
    figures["abort_to_generation_changed_s"] = seconds
    for rank, seen in enumerate((zero, one)):
        assert list(seen) == [[_expected(rank)] * 2] * 2


def _exchange(rank: int, sent: torch.Tensor, received: torch.Tensor) -> Any:
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)])


FIRST: dict[str, Callable[[torch.Tensor], Any]] = {
    "0": lambda tensor: dist.all_reduce(tensor),
    "0, of a batch": lambda tensor: _exchange(0, tensor, tensor),
    "0:1": lambda tensor: dist.send(tensor, 1),
}
"""By the key in the store of what a first operation needs to connect."""


def _connecting(rank: int, key: str, cells: Cells) -> Any:
    """Rank 0 waits for rank 1 in its first operation when the generation ends."""
    groups = _groups(rank, cells.stores[0].get())
    both = _both()
    recording = groups.stop_recording()
    if rank == 1:
        cells.recording.set(recording)
        PrefixStore("nccl", PrefixStore(both[0].key, present(groups._network).store)).wait([key[:3].strip(" ,")])
        cells.entered.set()
        cells.abort.get()
        groups.interrupt(1)
    else:
        threading.Thread(target=lambda: groups.interrupt(1 if cells.abort.get() is None else 0), daemon=True).start()
        with pytest.raises(GenerationChanged):
            FIRST[key](torch.ones(4, device="cuda"))
    groups.rebuild(1, cells.stores[1].get())
    return [_battery(group) for group in both]


@pytest.mark.parametrize(("key", "lost"), [("0", True), ("0, of a batch", False), ("0:1", False), ("0:1", True)])
@in_zygote
def test_nobody_is_lost_who_waits_for_a_peer_to_connect(key: str, lost: bool) -> None:
    with Fleet(DEADLINE_S) as fleet:
        cells = Cells()
        fleet.fork(_host, cells.stores)
        ranks = [fleet.fork(_connecting, rank, key, cells) for rank in range(2)]
        fleet.until(cells.entered)
        if lost:
            fleet.kill(ranks[1])
            ranks[1] = fleet.fork(_newcomer, cells, False)
        cells.abort.set()
        zero, one = fleet.values(ranks)
    assert zero == [_expected(0)] * 2
    assert one == (([], [_expected(1)] * 2) if lost else [_expected(1)] * 2)


def _coalesced(operation: Callable[[torch.Tensor, torch.Tensor], Any], *tensors: torch.Tensor) -> Any:
    with _coalescing_manager(dist.group.WORLD, tensors[0].device, async_ops=True) as manager:
        for tensor in tensors:
            operation(tensor, torch.cat([tensor, tensor]))
    return manager.works


STEPS: dict[str, Callable[[int, torch.Tensor, torch.Tensor], Any]] = {
    "batch_isend_irecv": _exchange,
    "all_reduce": lambda rank, one, two: _coalesced(lambda own, both: dist.all_reduce(own), one, two),
    "all_gather": lambda rank, one, two: _coalesced(lambda own, both: dist.all_gather_into_tensor(both, own), one, two),
    "broadcast": lambda rank, one, two: _coalesced(lambda own, both: dist.broadcast(own, 0, async_op=True), one, two),
    "all_to_all": lambda rank, one, two: [dist.all_to_all_single(one, two, async_op=True)],
    "send": lambda rank, one, two: [(dist.isend if rank == 0 else dist.irecv)(one, 1 - rank)],
}
"""Coalesced but for the last two; the parts of some open a group of NCCL's own, which an error leaves open."""


def _neighbour(rank: int, name: str, hurried: bool, cells: Cells) -> Any:
    """What ended rank 0's steps, modules imported by then, and the results after the swap. Rank 1 is the victim."""
    groups, broken = _groups(rank, cells.stores[0].get(), explain_timeout_s=10.0 if hurried else 0.0), threading.Event()
    groups.runtime.connection_broke = lambda *connection: broken.set() is None  # type: ignore[method-assign]
    both = _both()
    one, two = torch.ones(1 << 10, device="cuda"), torch.ones(1 << 10, device="cuda")
    recording = groups.stop_recording()
    backend = both[0]._get_backend(one.device)

    def step() -> None:
        for work in STEPS[name](rank, one, two):
            while not hurried and not work.is_completed():
                pass

    step()
    if rank == 1:
        cells.recording.set(recording)
        while True:
            step()

    def announce() -> None:
        """Once an operation and the watchdog have met the error; if `hurried`, the watchdog alone."""
        assert hurried or broken.wait()
        while backend.get_error() == ErrorType.SUCCESS:
            time.sleep(0.001)
        groups.interrupt(1)

    threading.Thread(target=announce, daemon=True).start()
    modules = set(sys.modules)
    cells.entered.set()
    try:
        while True:
            step()
    except GenerationChanged as change:
        cause = change.__cause__
    groups.rebuild(1, cells.stores[1].get())
    _held()
    imported = set(sys.modules) - modules
    return repr(cause), imported, [_battery(group) for group in both]


def _survivor(name: str, hurried: bool, after: int = 1) -> Any:
    with Fleet(DEADLINE_S) as fleet:
        cells = Cells()
        fleet.fork(_host, cells.stores)
        members = [fleet.fork(_neighbour, rank, name, hurried, cells) for rank in range(2)]
        newcomer = fleet.fork(_newcomer, cells, False)
        fleet.until(cells.recording, cells.entered)
        fleet.kill(members[1])
        (cause, modules, results), (_, theirs) = fleet.values([members[0], newcomer])
    assert results == [_expected(0)] * 2 and theirs == [_expected(1)] * 2
    return cause, modules


@pytest.mark.parametrize("name", STEPS)
@in_zygote
def test_a_killed_rank_does_not_take_its_neighbour_along(name: str) -> None:
    cause, modules = _survivor(name, hurried=False)
    assert "remote process exited" in cause
    assert not {module for module in modules if module.startswith("torch._inductor")}


@pytest.mark.long
@in_zygote
def test_nor_does_any_of_a_hundred() -> None:
    for number in range(100):
        _survivor([*STEPS][number % len(STEPS)], hurried=True)


def _host(stores: list[Cell]) -> None:
    """Hosts every generation's store, so that no rank has the server's end of a connection among its descriptors."""
    keep = []
    for cell in stores:
        server, address = host_store("127.0.0.1")
        keep.append(server)
        cell.set(address)
    signal.pause()


def _held() -> dict[str, int]:
    """What this process holds once the groups of former generations are gone."""
    for thread in threading.enumerate():
        if thread.name == "deadpool-retire":
            thread.join()
    return {
        "device_bytes": torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0],
        "allocated_bytes": torch.cuda.memory_allocated(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def _swapper(rank: int, swaps: int, stores: list[Cell], unwaited: list[Cell]) -> Any:
    """Return the last results, what was held after each swap, and the seconds of its abort and from there to a
    barrier."""
    groups = _groups(rank, stores[0].get())
    both = _both()
    results = [_battery(group) for group in both]
    groups.stop_recording()
    held, took = [], []
    for generation in range(1, swaps + 1):
        if rank == 0:  # nobody joins it, and nobody waits for it
            dist.all_reduce(torch.ones(1 << 20, device="cuda"), group=both[generation % 2], async_op=True)
            unwaited[generation].set()
        unwaited[generation].get()
        began = time.monotonic()
        groups.interrupt(generation)
        torch.cuda.synchronize()
        aborted = time.monotonic()
        groups.rebuild(generation, stores[generation].get())
        dist.barrier()
        took.append((aborted - began, time.monotonic() - aborted))
        results = [_battery(group) for group in both]
        held.append(_held())
        dist.barrier()  # a shared card is also what the other one holds
    return results, held, took


@pytest.mark.parametrize("swaps", [20, pytest.param(100, marks=pytest.mark.long)])
@in_zygote
def test_swaps_leave_nothing_behind(swaps: int, figures: dict[str, Any]) -> None:
    with Fleet(SWAPS_DEADLINE_S * swaps / 20) as fleet:
        stores, unwaited = ([Cell(4096) for _ in range(swaps + 1)] for _ in range(2))
        fleet.fork(_host, stores)
        outcomes = fleet.values([fleet.fork(_swapper, rank, swaps, stores, unwaited) for rank in range(2)])
    for rank, (results, held, took) in enumerate(outcomes):
        assert results == [_expected(rank)] * 2
        for name, seconds in zip(("abort", "rebuild_and_barrier"), zip(*took, strict=True), strict=True):
            figures[f"{name}_s_of_rank_{rank}"] = statistics.median(seconds)
        # A stream of torch's pool is made at its first use, and whatever belongs to it: half of the swaps see to that.
        late = held[swaps // 2 :]
        grown = {name: late[-1][name] - value for name, value in late[0].items()}
        figures[f"growth_of_rank_{rank}_over_{len(late) - 1}_swaps"] = grown
        assert not any(grown.values()), held
