"""agent/mirroring.py: what is asked in vain is said, so that controllers can judge; what a failed fetch leaves."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from support.hosts import host, local_node
from support.stores import free

from deadpool_plugin.agent.mirroring import Mirroring
from deadpool_plugin.core import api, local
from deadpool_plugin.core.types import Source
from deadpool_plugin.errors import StaleGeneration, TransportError
from deadpool_plugin.mirror.arena import SlotPair
from deadpool_plugin.mirror.store import SnapshotStore
from deadpool_plugin.mirror.wire import RefusedByPeer

PROFILE = local.RankReady(0, header_bytes=4096, payload_bytes=64, layout_hash="", replicas=(0,), recording=b"")


class Holder:
    """Another node, which breaks off in the middle of the first snapshot it is asked for."""

    def __init__(self) -> None:
        self.filled: list[SlotPair] = []

    async def fetch(self, source, step, into, generation):
        self.filled.append(into)
        into.seal(step, 0, "", b"")
        if len(self.filled) == 1:
            raise TransportError("broke off")


def test_a_fetch_that_failed_leaves_its_slots_to_the_next_one():
    store, holder = SnapshotStore(), Holder()
    store.prepare_own(0, 4096, 64)
    asks = Mirroring(local_node(host(store, holder), patience_s=0.0))
    with pytest.raises(TransportError, match="broke off"):
        asyncio.run(asks.bring(Source(0, 0, 0, 0), 3, PROFILE))
    assert store.own(0) is None and holder.filled[0].open(3) is None
    asyncio.run(asks.bring(Source(0, 0, 0, 0), 3, PROFILE))
    assert holder.filled[0] is holder.filled[1] is store.own(0) and store.owns(0, 3)
    free(store)


def test_no_slots_are_made_for_a_generation_that_is_over():
    store = SnapshotStore()
    holder = Holder()

    async def swapped_meanwhile(work):
        store.fence(1)
        return work()

    with pytest.raises(StaleGeneration):
        asks = Mirroring(local_node(host(store, holder, in_thread=swapped_meanwhile)))
        asyncio.run(asks.bring(Source(0, 0, 0, 0), 3, PROFILE))
    assert not holder.filled and not store.has_slots(0)
    free(store)


class Silent:
    """Another node, asked for a recording: `fails` once or always, each time after `lasts_s` of the test's clock."""

    def __init__(self, error: TransportError, times: int = 1 << 30, lasts_s: float = 0.0) -> None:
        self.error, self.left, self.lasts_s, self.now = error, times, lasts_s, 0.0

    async def get_recording(self, node, rank):
        self.now += self.lasts_s
        self.left -= 1
        if self.left >= 0:
            raise self.error
        return msgspec.msgpack.encode(PROFILE)


def asked(error: TransportError, node: int) -> list[api.Input]:
    """Return what was said after node 0 had asked `node` for a recording and met `error` each time."""
    said: list[api.Input] = []
    with pytest.raises(TransportError):
        asks = Mirroring(local_node(host(bulk=Silent(error)), said.append, patience_s=0.3))
        asyncio.run(asks.recording(node, 7))
    return said


def test_who_cannot_be_asked_for_the_patience_is_not_heard():
    (lost,) = asked(TransportError("no route to host"), 2)
    assert isinstance(lost, api.LinkLost) and (lost.node, lost.silent) == (2, True)
    assert "no route to host" in lost.reason


def test_who_answers_no_is_heard():
    assert asked(RefusedByPeer("not held"), 2) == []


def test_nothing_is_said_of_this_node_itself():
    said: list[api.Input] = []

    class Broken(Holder):
        async def fetch(self, *arguments):
            raise TransportError("no route to host")

    store = SnapshotStore()
    with pytest.raises(TransportError):
        asks = Mirroring(local_node(host(store, Broken()), said.append, patience_s=0.3))
        asyncio.run(asks.bring(Source(0, 0, 3, 0), 3, PROFILE))
    assert [lost.node for lost in said if isinstance(lost, api.LinkLost)] == [3]
    store.drop_prepared()


def test_the_patience_begins_with_the_first_failure(monkeypatch):
    """A transfer that breaks off after it has gone on for long is tried again."""
    silent = Silent(TransportError("the connection broke"), times=1, lasts_s=90.0)
    monkeypatch.setattr("deadpool_plugin.agent.mirroring.loop_time", lambda: silent.now)
    assert asyncio.run(Mirroring(local_node(host(bulk=silent), patience_s=10.0)).recording(2, 7)) == PROFILE


def test_slots_of_a_fetch_that_was_given_up_are_nobody_elses_until_it_ends():
    """Its transfer goes on: whoever fetches next must not be given the slots that are still written to."""

    class Slow(Holder):
        def __init__(self):
            super().__init__()
            self.may_end = asyncio.Event()

        async def fetch(self, source, step, into, generation):
            self.filled.append(into)
            await self.may_end.wait()
            into.seal(step, 0, "", b"")

    async def scenario():
        store, holder = SnapshotStore(), Slow()
        asks = Mirroring(local_node(host(store, holder)))
        first = asyncio.ensure_future(asks.bring(Source(0, 0, 0, 0), 3, PROFILE))
        while not holder.filled:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.ensure_future(asks.bring(Source(0, 0, 0, 0), 3, PROFILE))
        while len(holder.filled) < 2:
            await asyncio.sleep(0)
        assert holder.filled[0] is not holder.filled[1]
        holder.may_end.set()
        await second
        assert store.owns(0, 3)
        free(store)

    asyncio.run(asyncio.wait_for(scenario(), timeout=30))
