"""agent/mirroring.py: a push that fails is tried again, and what stays impossible is said, more than once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from support import expect
from support.hosts import host, local_node

from deadpool_plugin.agent.mirroring import Mirroring
from deadpool_plugin.core import api, local
from deadpool_plugin.core.types import NO_STEP, World
from deadpool_plugin.errors import DeadpoolError, TransportError
from deadpool_plugin.mirror.records import NotHeld
from deadpool_plugin.mirror.store import CorruptSnapshot
from deadpool_plugin.mirror.transfers import TransferFailed
from deadpool_plugin.mirror.wire import InAnotherGeneration

PROFILE = local.RankReady(0, header_bytes=0, payload_bytes=0, layout_hash="", replicas=(), recording=b"")


class Buddy:
    """Refuses one push with `error`, and takes what comes after it."""

    def __init__(self, error: DeadpoolError) -> None:
        self.errors = [error]

    async def push(self, *arguments):
        if self.errors:
            error = self.errors.pop()
            await asyncio.sleep(0.01)  # meanwhile the process goes on
            raise error


@pytest.mark.parametrize("error", [NotHeld("overwritten"), CorruptSnapshot("3 of 7 frames")])
def test_a_snapshot_that_cannot_be_read_here_is_no_fault_of_the_buddy(error: DeadpoolError) -> None:
    async def scenario(newest: int) -> list[api.Input]:
        said: list[api.Input] = []
        mirroring = Mirroring(local_node(host(bulk=Buddy(error)), said.append, patience_s=0.0))
        mirroring.enter(World(0, (0, 1), ()))
        mirroring.profiles[0] = PROFILE
        for step in range(3, newest + 1):
            mirroring._push_snapshot(0, step, 0, b"", NO_STEP)
            await asyncio.sleep(0)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        return said

    assert asyncio.run(scenario(newest=3)) == [
        api.WorkerLost(0, f"its newest snapshot cannot be read here: {error}"),
    ]
    assert asyncio.run(scenario(newest=4)) == [], "the process has gone on and overwritten it"


class Unreachable:
    """The buddy as this node sees it, which answers every attempt with `error` until it `heals`."""

    def __init__(self, error: DeadpoolError, heals: asyncio.Event) -> None:
        self.error, self.heals, self.done = error, heals, asyncio.Event()
        self.attempts = 0

    async def push(self, *arguments):
        self.attempts += 1
        if not self.heals.is_set():
            raise self.error
        self.done.set()


def pushed(error: DeadpoolError, enough: Callable[[list[api.Input], int], bool]) -> list[api.Input]:
    """Return what was said of a buddy that could be pushed to only after `enough(said, attempts)`."""

    async def scenario():
        said: list[api.Input] = []
        heals = asyncio.Event()
        buddy = Unreachable(error, heals)
        mirroring = Mirroring(local_node(host(bulk=buddy), said.append, patience_s=0.05))
        mirroring.enter(World(0, (0, 1), ()))
        mirroring.profiles[0] = PROFILE
        mirroring._push_snapshot(0, 3, 0, b"", NO_STEP)
        while not enough(said, buddy.attempts):
            await asyncio.sleep(0.01)
        heals.set()
        await buddy.done.wait()
        return said

    return asyncio.run(asyncio.wait_for(scenario(), timeout=30))


def test_a_buddy_that_only_this_node_cannot_reach_is_tried_until_it_can_be_reached_again():
    """Nobody acts on the first word: the others hear that node."""
    said = pushed(TransportError("no route"), lambda said, attempts: len(said) >= 2)
    lost = [expect(api.LinkLost, event) for event in said]
    assert {(event.node, event.silent) for event in lost} == {(1, True)}


def test_a_node_that_cannot_send_gives_itself_up_and_accuses_no_buddy():
    said = pushed(TransferFailed("no memory"), lambda said, attempts: bool(said))
    assert said == [api.NodeGivenUp("it cannot mirror any more: no memory")]


def test_a_buddy_that_answers_from_another_generation_is_not_lost():
    """It has promised a swap this node has not heard of; who is asked to lead that may have died meanwhile."""
    assert pushed(InAnotherGeneration("fenced"), lambda said, attempts: attempts >= 5) == []
