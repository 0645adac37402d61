"""NCCL's demands on us, on a CPU: operations without a Work, Works without a sender, aborts that wait for others."""

from __future__ import annotations

import os
import sys
import threading
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import present
from support.comm import TIMEOUT
from support.stand_in import fake
from torch._C._distributed_c10d import FakeProcessGroup, HashStore

from deadpool_plugin.comm import groups as groups_module, nccl
from deadpool_plugin.comm.collective import BATCH, Operation
from deadpool_plugin.comm.fabric import HandleWork
from deadpool_plugin.comm.generations import Generations
from deadpool_plugin.comm.groups import Groups
from deadpool_plugin.comm.handle import Handle
from deadpool_plugin.comm.record import Recorder, Replay
from deadpool_plugin.errors import DeadpoolError, GenerationChanged, Unsupported

GIVEN = fake(group_rank=0, global_ranks_in_group=[0, 1], group_id="", timeout=TIMEOUT)


class Streams:
    """Adds 1 at once where NCCL would enqueue; torch's own Work without a sender is what an asynchronous one gives."""

    supports_coalescing = True

    def __init__(self) -> None:
        self._work: Any = FakeProcessGroup._create_internal(0, 2)
        self.open_groups, self.counted, self.refuses_to_end = 0, 0, False
        """NCCL's groups that are open in the thread, and how many of these torch counts as its own."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        tensors[0].add_(1)
        return None if options is None or not options.asyncOp else self._work.allreduce(tensors)

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> Any:
        tensors[0].add_(srcRank)
        return self._work.recv(tensors, srcRank, tag)

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        self.open_groups += 1
        raise dist.DistBackendError("NCCL communicator was aborted")

    def scatter(self, tensors: list[torch.Tensor]) -> None:
        raise dist.DistBackendError("refused before a group was open")

    def reduce(self, tensors: list[torch.Tensor]) -> None:
        raise RuntimeError("not NCCL's: no memory")

    def barrier(self, opts: Any = None) -> None:
        return None

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self.ncclGroupStart()
        self.counted += 1

    def _end_coalescing(self, device: torch.device) -> None:
        refuses, self.refuses_to_end = self.refuses_to_end, False
        if self.ncclGroupEnd() or refuses:
            raise RuntimeError("NCCL's group did not end")
        self.counted -= 1

    def ncclGroupStart(self) -> None:
        self.open_groups += 1

    def ncclGroupEnd(self) -> int:
        if not self.open_groups:
            return 5
        self.open_groups -= 1
        return 0


class Everything:
    def __contains__(self, connected: object) -> bool:
        return True

    def clear(self) -> None: ...


def over(inner: Any) -> tuple[Groups, Handle]:
    groups = Groups(explain_timeout_s=0.0)
    handle = Handle(groups.runtime, GIVEN, 0, "", {"cpu": "nccl"})
    fabric: Any = nccl.NcclFabric.__new__(nccl.NcclFabric)
    fabric._nccl, fabric._backends, fabric._connected, fabric._over = inner, [inner], Everything(), False
    fabric.generations, fabric._issuing = groups.generations, set()
    network: Any = types.SimpleNamespace(fabrics={"nccl": fabric})
    handle.inner, groups._network = inner, network
    return groups, handle


def asynchronous() -> Any:
    options = dist.AllreduceOptions()
    options.asyncOp = True
    return options


@pytest.mark.parametrize("named", [False, True])
def test_a_plain_receive_ends_and_knows_its_sender(named: bool) -> None:
    _, handle = over(Streams())
    tensor = torch.zeros(2)
    work = handle.recv([tensor], srcRank=1, tag=0) if named else handle.recv([tensor], 1, 0)
    assert work.wait() and work.source_rank() == 1 and tensor.tolist() == [1.0, 1.0]


def test_synchronous_operations_are_recorded_and_replayed() -> None:
    def script(groups: Groups, handle: Handle) -> list[list[float]]:
        alone, together = torch.zeros(2), [torch.zeros(3), torch.zeros(3)]
        handle.allreduce([alone]).wait()
        groups.issue(handle, Operation(BATCH, ([Operation("allreduce", ([tensor],)) for tensor in together],))).wait()
        handle.barrier().wait()
        return [tensor.tolist() for tensor in (alone, *together)]

    groups, handle = over(Streams())
    groups._recorder = Recorder(1 << 10)
    expected = script(groups, handle)
    recording = groups.stop_recording()
    groups, handle = over(None)
    groups._replay = Replay(recording)
    assert script(groups, handle) == expected == [[1.0] * 2, [1.0] * 3, [1.0] * 3]
    groups.finish_rehearsal()


def test_what_is_never_waited_for_is_not_kept() -> None:
    _, handle = over(Streams())
    for options in (None, asynchronous()):
        tensor = torch.zeros(2)
        handle.allreduce([tensor], options)
        assert sys.getrefcount(tensor) == 2, "this frame's, and the count's own"


@pytest.mark.parametrize(
    ("fails", "said"),
    [("broadcast", "aborted"), ("scatter", "refused"), ("reduce", "no memory"), ("end", "did not end")],
)
def test_a_batch_that_fails_is_ended_once(fails: str, said: str) -> None:
    """An operation with a group of its own leaves that open too; torch forgets a batch only when one ends well."""
    inner = Streams()
    inner.refuses_to_end = fails == "end"
    groups, handle = over(inner)
    last = "allreduce" if fails == "end" else fails
    parts = [Operation(name, ([torch.zeros(1)],)) for name in ("allreduce", last)]
    with pytest.raises(RuntimeError, match=said):
        groups.issue(handle, Operation(BATCH, (parts,)))
    assert (inner.open_groups, inner.counted) == (0, 0)


def test_a_tensor_with_gaps_is_left_as_it_is_for_torch_to_refuse():
    with_gaps, dense = torch.arange(16).view(4, 4)[:, ::2], torch.arange(16).view(4, 4).t()
    assert nccl._flat(with_gaps) is with_gaps
    assert nccl._flat(dense).tolist() == list(range(16))


def test_what_torch_coalesces_is_issued_as_a_batch() -> None:
    """One that fails inside of torch ends the process. A dense tensor need not be contiguous."""
    inner = Streams()
    _, handle = over(inner)
    options = dist.AllreduceCoalescedOptions()
    options.asyncOp = True
    tensors, issued = [torch.zeros(2), torch.zeros(2, 3).t()], list[Any]()

    def allreduce(given: list[torch.Tensor], options: Any) -> None:
        issued.append((given[0].shape, options.asyncOp, inner.counted))
        given[0].add_(1)

    inner.allreduce = allreduce  # type: ignore[method-assign, assignment]
    handle.allreduce_coalesced(tensors, options).wait()
    assert issued == [((2,), True, 1), ((6,), True, 1)] and inner.counted == 0
    assert all(tensor.eq(1).all() for tensor in tensors)


@pytest.mark.parametrize("name", ["broadcast", "scatter"])
def test_an_operation_that_fails_leaves_no_group_open(name: str) -> None:
    """In an open group, this thread's later connections would only be queued."""
    inner = Streams()
    groups, handle = over(inner)
    with pytest.raises(dist.DistBackendError):
        groups.issue(handle, Operation(name, ([torch.zeros(1)],)))
    assert inner.open_groups == 0


def test_a_synchronous_operation_that_an_abort_has_ended_says_so() -> None:
    """A barrier comes back though nobody came."""
    groups, handle = over(Streams())
    handle.inner.barrier = lambda: groups.generations.announce(1) and None  # type: ignore[union-attr, method-assign]
    with pytest.raises(GenerationChanged):
        handle.barrier()


def test_so_does_a_wait_that_an_abort_has_ended() -> None:
    groups, handle = over(Streams())
    work: Any = handle.allreduce([torch.zeros(1)], asynchronous())
    work.inner = types.SimpleNamespace(wait=lambda: groups.generations.announce(1))
    with pytest.raises(GenerationChanged):
        work.wait()


def test_an_operation_without_tensors_is_of_the_groups_default_backend() -> None:
    both = {"cpu": "gloo", "cuda": "nccl"}
    handle = Handle(Groups().runtime, GIVEN, 0, "", both)
    assert handle.backend_of(Operation("barrier")) == "nccl"
    on_host = dist.BarrierOptions()
    on_host.device = torch.device("cpu")
    assert handle.backend_of(Operation("barrier", (on_host,))) == "gloo"


class OnDevice(torch.Tensor):
    """Says that it is on the second GPU."""

    is_cuda, device = True, torch.device("cuda", 1)  # type: ignore[assignment]


def test_a_future_knows_the_devices_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Future:
        def __init__(self, devices: Any = None) -> None:
            asked.append(devices)

        def set_result(self, value: Any) -> None: ...

    monkeypatch.setattr(torch.futures, "Future", Future)
    for outputs in ([torch.ones(1), torch.ones(1).as_subclass(OnDevice)], [torch.ones(1)]):
        HandleWork(Operation("allreduce", (outputs,))).get_future()
    assert asked == [[OnDevice.device], []]


class Network:
    """One whose generation is over while it builds its first group."""

    built: list[threading.Thread]

    def __init__(self, groups: Groups) -> None:
        self._groups, self.built, self.left_behind = groups, [], threading.Event()
        self.store = HashStore()

    def build(self, handle: Handle) -> Any:
        self.built.append(threading.current_thread())
        self._groups.interrupt(2)
        self.left_behind.wait()


def test_a_network_whose_generation_is_over_is_built_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, handle = over(None)
    groups._network, network = None, Network(groups)
    groups.handles += [handle, handle]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")  # nobody else is to come
    monkeypatch.setattr(groups_module, "Network", lambda generation, store, generations: network)
    with pytest.raises(GenerationChanged):
        groups.rebuild(1, "")
    network.left_behind.set()
    network.built[0].join()
    assert len(network.built) == 1


# ---- what is told and done to NCCL itself


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what a user may have set, and restore it after the test."""
    for name in nccl.ENVIRONMENT:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT")


@pytest.mark.usefixtures("environment")
def test_a_watchdog_that_would_end_the_process_is_told_otherwise(capfd: pytest.CaptureFixture[str]) -> None:
    nccl.NcclFabric(Generations(explain_timeout_s=0.0))
    assert {os.environ[name] for name in nccl.ENVIRONMENT} == {"0"}
    assert capfd.readouterr().err == (
        "[deadpool] TORCH_NCCL_ASYNC_ERROR_HANDLING=1 is replaced by 0: a swap needs it\n"
    )


@pytest.mark.usefixtures("environment")
def test_a_debug_level_that_tells_it_otherwise_again_is_refused() -> None:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with pytest.raises(Unsupported, match="TORCH_DISTRIBUTED_DEBUG=DETAIL"):
            nccl.NcclFabric(Generations(explain_timeout_s=0.0))
    finally:
        dist.set_debug_level(before)


class Aborted:
    def __init__(self, others: threading.Barrier) -> None:
        self._others = others

    def abort(self) -> None:
        self._others.wait()


@pytest.mark.usefixtures("environment")
def test_all_communicators_are_aborted_at_once() -> None:
    fabric, others = nccl.NcclFabric(Generations(explain_timeout_s=0.0)), threading.Barrier(3)
    fabric._backends += [Aborted(others) for _ in range(3)]
    fabric.unblock()


@pytest.mark.usefixtures("environment")
def test_an_abort_that_does_not_return_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "ABORT_DEADLINE_S", 0.05)
    fabric = nccl.NcclFabric(Generations(explain_timeout_s=0.0))
    fabric._backends += [Aborted(threading.Barrier(2)), Aborted(threading.Barrier(1))]
    with pytest.raises(DeadpoolError, match="aborting 2 NCCL communicators failed: [12] of them did not return"):
        fabric.unblock()


def test_who_waits_for_a_peer_to_connect_can_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is connected after that is aborted, for no abort has met it."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    there, aborted = threading.Event(), threading.Event()

    class Connecting(Streams):
        def broadcast(self, tensors: list[torch.Tensor]) -> None:
            assert tensors[0].numel() == 0
            groups.generations.announce(1)
            there.wait()

        def abort(self) -> None:
            aborted.set()

    groups, handle = over(Connecting())
    fabric: Any = present(groups._network).fabrics["nccl"]
    fabric._connected = set()
    with pytest.raises(GenerationChanged):
        handle.allreduce([torch.zeros(2)])
    fabric.unblock()
    aborted.clear()
    there.set()
    assert aborted.wait(60)


@pytest.mark.parametrize(("leave_s", "left"), [(30.0, True), (0.05, False)])
def test_nothing_is_aborted_under_a_thread_that_issues_unless_it_is_caught_there(
    monkeypatch: pytest.MonkeyPatch, leave_s: float, left: bool
) -> None:
    monkeypatch.setattr(nccl, "LEAVE_S", leave_s)
    inside, go, found = threading.Event(), threading.Event(), list[bool]()

    class Connecting(Streams):
        def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
            inside.set()
            assert go.wait(60)
            return super().allreduce(tensors, options)

        def abort(self) -> None:
            found.append(not fabric._issuing)

    groups, handle = over(Connecting())
    fabric: Any = present(groups._network).fabrics["nccl"]

    def issue() -> None:
        with pytest.raises(GenerationChanged):
            handle.allreduce([torch.zeros(2)])

    thread = threading.Thread(target=issue)
    thread.start()
    assert inside.wait(60)
    if left:
        threading.Timer(0.2, go.set).start()
    groups.interrupt(1)
    go.set()
    thread.join()
    assert not fabric._issuing and found == [left]
    with pytest.raises(GenerationChanged):
        handle.allreduce([torch.zeros(2)])


def test_a_barrier_names_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    _, handle = over(Streams())
    guessed, chosen = dist.BarrierOptions(), dist.BarrierOptions()
    chosen.device_ids = [1]
    handle.barrier(guessed)
    handle.barrier(opts=chosen)
    assert (guessed.device_ids, chosen.device_ids) == ([3], [1])


def test_what_another_thread_does_meanwhile_is_not_in_the_batch() -> None:
    """A save in the background may use the group that the script sends a batch over."""
    _, handle = over(Streams())
    mine, theirs, cpu = torch.zeros(2), torch.zeros(2), torch.device("cpu")
    handle._start_coalescing(cpu)
    handle.allreduce([mine])
    thread = threading.Thread(target=lambda: handle.allreduce([theirs]).wait())
    thread.start()
    thread.join()
    assert theirs.tolist() == [1.0, 1.0] and mine.tolist() == [0.0, 0.0]
    handle._end_coalescing(cpu).wait()
    assert mine.tolist() == [1.0, 1.0]
