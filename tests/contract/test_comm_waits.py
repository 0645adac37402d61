"""Waits that always come back, the generations of a process, and which sockets an interruption cuts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comm import live
from support.forked import Cell, Fleet
from support.zygote import in_zygote

from deadpool_plugin.comm.collective import Operation
from deadpool_plugin.comm.fabric import SwapWork
from deadpool_plugin.comm.generations import Generations
from deadpool_plugin.comm.gloo import GlooFabric
from deadpool_plugin.comm.groups import host_store
from deadpool_plugin.errors import GenerationChanged, StaleGeneration

SAME, NEXT = Generations(explain_timeout_s=0.0), Generations(explain_timeout_s=0.0)
NEXT.announce(1)


def test_a_helper_hands_over_value_and_error() -> None:
    assert SAME.run(lambda: 7, 0) == 7
    nothing: dict[str, int] = {}
    with pytest.raises(KeyError):
        SAME.run(lambda: nothing["missing"], 0)
    assert SAME.run(threading.get_ident, 0) != threading.get_ident()


def test_a_stuck_function_is_abandoned_and_the_next_one_runs() -> None:
    release = threading.Event()
    with pytest.raises(GenerationChanged):
        NEXT.run(release.wait, 0)
    assert NEXT.run(lambda: "next", 0, 60.0) == "next"
    release.set()


def test_a_function_may_end_within_the_grace() -> None:
    asked = threading.Event()

    class Asked(Generations):
        """Generations whose newest one is announced; says that somebody has looked."""

        @property
        def announced(self) -> int:  # type: ignore[override]
            asked.set()
            return 1

        @announced.setter
        def announced(self, generation: int) -> None: ...

    def function() -> str:
        asked.wait()
        return "ended"

    assert Asked(explain_timeout_s=0.0).run(function, 0, 60.0) == "ended"


def test_generations_only_move_forward() -> None:
    generations = Generations(explain_timeout_s=0.0)
    generations.check()
    assert generations.announce(1) and not generations.announce(1)
    with pytest.raises(GenerationChanged) as caught:
        generations.check()
    assert caught.value.generation == 1
    assert generations.announce(3) and not generations.announce(2)
    with pytest.raises(GenerationChanged):
        generations.enter(2)
    generations.enter(3)
    generations.check()
    assert generations.current == 3 and not generations.announce(3)


def test_an_error_is_explained_by_an_announcement() -> None:
    generations, error = Generations(explain_timeout_s=60.0), RuntimeError("connection closed by peer")
    threading.Thread(target=generations.announce, args=(1,)).start()
    with pytest.raises(GenerationChanged) as caught:
        generations.explain(error)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:398. This is typically ..."
        ),
        RuntimeError("[gloo/transport/tcp/pair.cc:538] Read error [10.0.0.2]:398: Connection reset by peer"),
        RuntimeError("[gloo/transport/tcp/pair.cc:588] Read error [10.0.0.2]:398: Connection timed out"),
        RuntimeError("[gloo/transport/tcp/pair.cc:375] writev [10.0.0.2]:398: Broken pipe"),
        dist.DistBackendError("NCCL error in: ...\nncclRemoteError: A call failed possibly due to a network error"),
        dist.DistBackendError("NCCL error in: ...\nncclSystemError: System call (e.g. socket, malloc) failed."),
        RuntimeError("NCCL Error 6: remote process exited or there was a network error"),
        dist.DistNetworkError("The client socket has failed to connect"),
    ],
    ids=lambda error: str(error)[-30:],
)
def test_an_error_of_the_transport_is_never_the_scripts(error: RuntimeError) -> None:
    """Nobody is lost and nothing was announced: it is said once, and what comes of it is waited for."""
    said = []

    def on_broken(generation: int, reason: str) -> bool:
        said.append((generation, reason))
        threading.Thread(target=generations.announce, args=(1,)).start()
        return True

    generations = Generations(0.0, on_broken)
    with pytest.raises(GenerationChanged) as caught:
        generations.explain(error)
    assert caught.value.__cause__ is error and said == [(0, str(error))]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Detected mismatch between collectives on ranks"),
        RuntimeError(
            "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation to complete"
        ),
        dist.DistBackendError("NCCL error in: ...\nncclInvalidUsage: This usually reflects invalid usage of NCCL."),
    ],
    ids=["mismatch", "the group's time-out", "usage"],
)
def test_another_error_is_the_scripts(error: RuntimeError) -> None:
    generations = Generations(0.0, lambda generation, reason: pytest.fail(reason))
    with pytest.raises(type(error)) as caught:
        generations.explain(error)
    assert caught.value is error


class _StuckWork:
    """gloo's race: the operation neither ends nor fails. `begun` is called by who waits."""

    def __init__(self, begun: Callable[[], object] = lambda: None) -> None:
        self._begun = begun

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._begun()
        threading.Event().wait(None if timeout is None else timeout.total_seconds())
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


class _Group:
    key, ranks = "all", (0, 1)
    abandoned = False


def issued(name: str, inner: Any, group: Any, generations: Generations) -> SwapWork:
    fabric = GlooFabric.__new__(GlooFabric)
    fabric.generations, fabric._unfinished = generations, set()
    return SwapWork(inner, fabric, group, Operation(name, ([torch.ones(1)], 1, 0)))


@pytest.mark.parametrize("name", ["allreduce", "send"])
def test_a_stuck_operation_is_abandoned_and_its_group_marked(name: str) -> None:
    generations, group = Generations(explain_timeout_s=0.0), _Group()
    work = issued(name, _StuckWork(lambda: generations.announce(1)), group, generations)
    with pytest.raises(GenerationChanged):
        work.wait()
    assert group.abandoned
    generations.enter(1)
    with pytest.raises(StaleGeneration):
        work.wait()


class _FailedComposite:
    """Made of several operations, it fails at once but never says that it is completed."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise RuntimeError("Connection closed by peer")

    def is_completed(self) -> bool:
        return False


def test_a_failed_operation_that_never_completes_is_an_error_not_a_stuck_one() -> None:
    generations, group = Generations(explain_timeout_s=60.0), _Group()
    work = issued("allreduce_coalesced", _FailedComposite(), group, generations)
    threading.Timer(0.5, generations.announce, args=(1,)).start()
    with pytest.raises(GenerationChanged):
        work.wait()
    assert not group.abandoned


NEVER_JOINED: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(2)),
    "reduce_scatter": lambda: dist.reduce_scatter(torch.ones(2), [torch.ones(2), torch.ones(2)]),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4)),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(4), torch.ones(2)),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2)),
    "recv": lambda: dist.recv(torch.ones(2), src=1),
}


def _wait_alone(rank: int, name: str, address: Cell, over: Cell) -> Any:
    if rank == 0:
        server, text = host_store("127.0.0.1")  # lives as long as this frame
        address.set(text)
    groups = live(rank, 2, address.get())
    dist.barrier()
    if rank == 1:
        over.get()
        return True
    assert groups._network is not None
    groups._network.fabrics["gloo"].unblock = lambda: None  # gloo's race: cut, it still does not end
    threading.Timer(0.5, groups.interrupt, args=(1,)).start()
    with pytest.raises(GenerationChanged):
        NEVER_JOINED[name]()
    over.set()
    return True


@pytest.mark.parametrize("name", NEVER_JOINED)
@in_zygote
def test_every_real_operation_that_does_not_end_is_abandoned(name: str) -> None:
    with Fleet() as fleet:
        address, over = Cell(4096), Cell(4096)
        assert fleet.values([fleet.fork(_wait_alone, rank, name, address, over) for rank in range(2)]) == [True, True]


def test_a_time_out_of_the_callers_own_is_kept() -> None:
    work = issued("allreduce", _StuckWork(), _Group(), Generations(explain_timeout_s=0.0))
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(milliseconds=1))


def _cut(rank: int, address: Cell, ready: list[Cell], done: list[Cell]) -> Any:
    server = None
    if rank == 0:
        server, text = host_store("127.0.0.1")
        address.set(text)
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    groups = live(rank, 2, address.get())
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()

    ready[rank].set()
    ready[1 - rank].get()
    groups.interrupt(1)
    ours.sendall(b"alive")
    assert theirs.recv(5) == b"alive"
    store.set(f"alive/{rank}", "yes")
    assert store.get(f"alive/{1 - rank}") == b"yes"
    again = socket.create_connection(listener.getsockname())
    again.close()
    with pytest.raises(GenerationChanged):
        dist.barrier()
    done[rank].set()
    done[1 - rank].get()  # rank 0 hosts the store
    return True


@in_zygote
def test_an_interruption_cuts_gloos_connections_only() -> None:
    with Fleet() as fleet:
        address, ready, done = Cell(4096), [Cell(4096), Cell(4096)], [Cell(4096), Cell(4096)]
        assert fleet.values([fleet.fork(_cut, rank, address, ready, done) for rank in range(2)]) == [True, True]


def _reset(rank: int, address: Cell, ready: list[Cell], said: list[Cell]) -> Any:
    """Rank 0's connections to rank 1 end under a collective, and both live."""
    server = None
    if rank == 0:
        server, text = host_store("127.0.0.1")
        address.set(text)
    groups = live(rank, 2, address.get(), explain_timeout_s=0.0)
    dist.barrier()
    broken: list[tuple[int, tuple[int, ...]]] = []

    def connection_broke(generation: int, peers: tuple[int, ...], reason: str) -> bool:
        broken.append((generation, peers))
        said[rank].set()
        threading.Timer(0.0, groups.interrupt, args=(1,)).start()
        return True

    groups.runtime.connection_broke = connection_broke  # type: ignore[method-assign]
    ready[rank].set()
    ready[1 - rank].get()
    if rank == 0:
        assert groups._network is not None
        groups._network.fabrics["gloo"].unblock()
    with pytest.raises(GenerationChanged):
        dist.all_reduce(torch.ones(2))
    said[1 - rank].get()  # rank 0 hosts the store
    return broken


@in_zygote
def test_a_connection_that_is_reset_is_said_with_its_other_end() -> None:
    with Fleet() as fleet:
        address, ready, said = Cell(4096), [Cell(4096), Cell(4096)], [Cell(4096), Cell(4096)]
        found = fleet.values([fleet.fork(_reset, rank, address, ready, said) for rank in range(2)])
    assert found == [[(0, (1,))], [(0, (0,))]]
