"""Tests of the wait after a cut: a thread that has had no CPU since may write into a tensor when it gets one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist
from support.comm import live
from support.forked import Fleet
from support.zygote import in_zygote

from deadpool_plugin.comm import gloo
from deadpool_plugin.comm.gloo import GlooFabric
from deadpool_plugin.comm.groups import host_store
from deadpool_plugin.transport import linux

TICKS = os.sysconf("SC_CLK_TCK")
NAMES = {"1": "gloo_tcp_loop", "2": "pt_gloo_runloop", "3": "python", "4": "gloo_tcp_loop", "5": "gloo_tcp_loop"}
LOOPS: Any = ("1", "4", "5")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Takes what /proc shall say of each thread, look by look; gives the threads in the order they are looked at."""

    def tell(states: dict[str, list[tuple[str, int] | None]]) -> list[str]:
        asked = []

        def read(thread: str, name: str) -> bytes:
            if name == "comm":
                return f"{NAMES[thread]}\n".encode()
            asked.append(thread)
            seen = states[thread].pop(0)
            return b"" if seen is None else f"{thread} (\xe9) x) {seen[0]} {'0 ' * 10}{seen[1]} 0".encode("latin-1")

        monkeypatch.setattr(linux, "threads", lambda: list(NAMES))
        monkeypatch.setattr(linux, "of_thread", read)
        return asked

    return tell


def cut() -> GlooFabric:
    fabric = GlooFabric.__new__(GlooFabric)
    fabric._loops, fabric._unfinished = LOOPS, set()
    return fabric


def test_all_have_slept_since_or_can_do_no_more(told: Any) -> None:
    states: dict[str, list[tuple[str, int] | None]] = {
        "1": [("R", 7), ("R", 7), ("D", 7), ("S", 7), ("S", 7), ("R", 7), ("S", 7)],  # it slept for a lock first
        "2": [
            ("R", 0),
            ("R", TICKS),
            ("R", 5 * TICKS),
            ("S", 5 * TICKS),
            ("S", 5 * TICKS),
            ("S", 5 * TICKS),
        ],  # reduces
        "4": [("R", 3), None, None, None],  # it has ended
        "5": [("R", 0), ("R", 1), ("R", TICKS), ("R", TICKS), ("R", 2 * TICKS)],  # its operation never ends
    }
    asked = told(states)
    assert cut().quiesce(lambda: False)
    assert not any(states.values())
    assert asked[-2:] == ["2", "2"], "whom a loop wakes is looked at after the loop"


def test_nobody_is_waited_for_once_another_generation_begins(told: Any) -> None:
    turns = iter([False, False, True])
    told({"1": [("R", 7)] * 4, "4": [None] * 9, "5": [None] * 9})
    assert not cut().quiesce(lambda: next(turns))


def _threads_of_gloo() -> Any:
    _, address = kept = host_store("127.0.0.1")
    groups = live(0, 1, address)
    dist.barrier()
    assert groups._network is not None
    fabric: Any = groups._network.fabrics["gloo"]
    names = {linux.of_thread(thread, "comm").strip() for thread in linux.threads()}
    return bool(kept) and bool(fabric._loops) and gloo._RUN_LOOP in names and fabric.quiesce(lambda: False)


@in_zygote
def test_this_torch_has_such_threads() -> None:
    with Fleet() as fleet:
        assert fleet.values([fleet.fork(_threads_of_gloo)]) == [True]
