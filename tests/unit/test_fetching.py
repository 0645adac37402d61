"""agent/fetching.py: what a fetch that failed leaves."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from support.stand_in import stand_in
from support.stores import free

from deadpool_plugin.agent.fetching import Fetches
from deadpool_plugin.agent.peers import Peers
from deadpool_plugin.agent.profile import Profile
from deadpool_plugin.agent.reports import Reports
from deadpool_plugin.core.types import Source
from deadpool_plugin.errors import StaleGeneration, TransportError
from deadpool_plugin.mirror.arena import SlotPair
from deadpool_plugin.mirror.store import SnapshotStore

PROFILE = Profile(header_bytes=4096, payload_bytes=64, layout_hash="", replicas=(0,), recording=b"")


class Holder:
    """Another node, which breaks off in the middle of the first snapshot it is asked for."""

    def __init__(self) -> None:
        self.filled: list[SlotPair] = []

    def to(self, node):
        return self

    async def ask(self, work, *nodes):
        return work()

    def fetch(self, rank, step, payload_rank, into, payload_peer, generation):
        self.filled.append(into)
        into.seal(step, 0, "", b"")
        if len(self.filled) == 1:
            raise TransportError("broke off")


class Swapped(Holder):
    """The next swap begins while slots are made for what is asked for."""

    def __init__(self, store: SnapshotStore) -> None:
        super().__init__()
        self.store = store

    async def ask(self, work, *nodes):
        self.store.fence(1)
        return work()


def test_a_fetch_that_failed_leaves_its_slots_to_the_next_one():
    store, holder = SnapshotStore(), Holder()
    store.prepare_own(0, 4096, 64)
    fetches = Fetches(1, store, cast(Peers, holder), stand_in(Reports))
    with pytest.raises(TransportError, match="broke off"):
        asyncio.run(fetches.bring(Source(0, 0, 0, 0), 3, PROFILE))
    assert store.own(0) is None and holder.filled[0].open(3) is None
    asyncio.run(fetches.bring(Source(0, 0, 0, 0), 3, PROFILE))
    assert holder.filled[0] is holder.filled[1] is store.own(0) and store.owns(0, 3)
    free(store)


def test_no_slots_are_made_for_a_generation_that_is_over():
    store = SnapshotStore()
    holder = Swapped(store)
    with pytest.raises(StaleGeneration):
        fetches = Fetches(1, store, cast(Peers, holder), stand_in(Reports))
        asyncio.run(fetches.bring(Source(0, 0, 0, 0), 3, PROFILE))
    assert not holder.filled and not store.has_slots(0)
    free(store)
