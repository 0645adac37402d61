"""Tests of what scripts/bench_rebuild.py takes for granted: gloo and NCCL ask a store what `rebuild_alone` says, a call
makes as many round trips as `TRIPS` says, and a rank that is alone has the groups that it has among others."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forked import Cell, Fleet
from support.zygote import in_zygote
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo, Store, TCPStore

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench import rebuild_alone as alone
from bench.rebuild_report import TRIPS, Group, Layout, communicators, kinds
from clusters import card

DEADLINE_S = 60.0
TIMEOUT = timedelta(seconds=40)


class Asked(Store):
    """Passes on what is asked of `store`, and notes it."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.calls = Counter[tuple[str, ...]]()

    def _note(self, name: str, *keys: str) -> None:
        self.calls[name, *(key.removeprefix("group/") for key in keys)] += 1

    def set(self, key: str, value: str) -> None:
        self._note("set", key)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._note("get", key)
        return self._store.get(key)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._note("wait", *keys)
        self._store.wait(keys, *timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._note("multi_get", *keys)
        return self._store.multi_get(keys)

    def has_extended_api(self) -> bool:
        return True


def _of_gloo(size: int) -> list[tuple[Counter[tuple[str, ...]], int]]:
    """What each member of a group asked, and how many sockets all have made, shared out among them."""
    stores, server = [], HashStore()
    groups: list[Any] = [None] * size
    device = ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)
    before = _sockets()

    def join(place: int, store: Store) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [device], TIMEOUT
        groups[place] = ProcessGroupGloo(PrefixStore("group", store), place, size, options)

    stores = [Asked(server) for _ in range(size)]
    threads = [threading.Thread(target=join, args=(place, store)) for place, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [(store.calls, (_sockets() - before) // size) for store in stores]


def _sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except FileNotFoundError:  # the folder's own
            continue
    return found


def _said(asks: Callable[..., None], *place: int) -> Counter[tuple[str, ...]]:
    store = HashStore()
    for other in range(8):
        store.set(f"0/{other}", "")
    store.set("0", "")
    asked = Asked(store)
    asks(asked, *place)
    return asked.calls


@pytest.mark.parametrize("size", [2, 3, 5])
@in_zygote
def test_gloo_asks_a_store_for_every_member_and_connects_each(size: int) -> None:
    with Fleet(DEADLINE_S) as fleet:
        (found,) = fleet.values([fleet.fork(_of_gloo, size)])
    assert found == [(_said(alone.gloo_asks, place, size), size - 1) for place in range(size)]


def _of_nccl(place: int, address: Cell) -> Any:
    if place == 0:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address.set(server.port)
    os.environ.update(card.TOGETHER | card.host_id(place))
    torch.cuda.set_device(0)
    store = Asked(TCPStore("127.0.0.1", address.get(), is_master=False, wait_for_workers=False))
    backend: Any = dist.ProcessGroupNCCL(PrefixStore("group", store), place, 2, dist.ProcessGroupNCCL.Options())
    made = store.calls.copy()
    backend.allreduce([torch.ones(4, device="cuda")]).wait()
    torch.cuda.synchronize()
    return made, store.calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not dist.is_nccl_available(), reason="needs a GPU and NCCL")
@in_zygote
def test_nccl_asks_a_store_for_its_identifier_at_the_first_operation() -> None:
    with Fleet(DEADLINE_S) as fleet:
        address = Cell()
        found = fleet.values([fleet.fork(_of_nccl, place, address) for place in (0, 1)])
    assert found == [(Counter(), _said(alone.nccl_asks, place)) for place in (0, 1)]


def _turns(name: str) -> int:
    """How often a client that calls `name` once hears from a store's server after it has said something."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("a", "1")
    listener, heard = socket.create_server(("127.0.0.1", 0)), [""]

    def relay() -> None:
        client, _ = listener.accept()
        ends = {client: socket.create_connection(("127.0.0.1", server.port))}
        ends |= {there: here for here, there in ends.items()}
        while True:
            for end in select.select(list(ends), [], [])[0]:
                data = end.recv(1 << 16)
                if not data:
                    return
                heard.append("client" if end is client else "server")
                ends[end].sendall(data)

    threading.Thread(target=relay, daemon=True).start()
    store = TCPStore("127.0.0.1", listener.getsockname()[1], is_master=False, wait_for_workers=False)
    calls: dict[str, Callable[[], Any]] = {
        "set": lambda: store.set("b", "1"),
        "add": lambda: store.add("n", 1),
        "wait": lambda: store.wait(["a"]),
        "get": lambda: store.get("a"),
        "multi_get": lambda: store.multi_get(["a"]),
    }
    begin = len(heard)
    calls[name]()
    store.check(["a"])  # one round trip, behind whatever `name` has sent
    turns = [first + second for first, second in zip(heard[begin:], heard[begin + 1 :], strict=False)]
    return turns.count("clientserver") - 1


@pytest.mark.parametrize("name", TRIPS)
@in_zygote
def test_a_call_makes_its_round_trips(name: str) -> None:
    with Fleet(DEADLINE_S) as fleet:
        assert fleet.values([fleet.fork(_turns, name)]) == [TRIPS[name]]


def _alone(setup: str, rank: int) -> Any:
    return alone.count(Layout(2, 2, 2, 2), alone.SETUPS[setup], rank)


@in_zygote
def test_each_rank_alone_makes_the_groups_that_any_other_says_it_has() -> None:
    pytest.importorskip("megatron.core")
    with Fleet(DEADLINE_S) as fleet:
        counted = fleet.values([fleet.fork(_alone, "megatron", rank) for rank in range(8)])
    groups = [Group("default_pg", "nccl", tuple(range(8))), *counted[3]["called"]]
    for rank, found in enumerate(counted):
        assert sorted(found["mine"]) == sorted(group for group in groups if rank in group.ranks)
        backends = Counter(group.backend for group in found["mine"])
        assert found["made"] == backends, "a rebuild makes each of them once"
        sizes = [len(group.ranks) for group in communicators(found["mine"]) if group.backend == "gloo"]
        assert found["store"]["get"] == sum(sizes) and found["store"]["wait"] == 1 + sum(sizes)
    assert sum(kind.count for kind in kinds(groups, 8, frozenset({0, 1}))) == 8
