"""agent/mirroring.py: how much memory is asked for while arenas are being made, and whose they are in the end."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from support import present
from support.hosts import host, local_node
from support.stores import free

from deadpool_plugin.agent.mirroring import Mirroring
from deadpool_plugin.agent.node import Process, Slot
from deadpool_plugin.core import api, local
from deadpool_plugin.core.types import World
from deadpool_plugin.mirror.arena import SlotPair, arena_bytes
from deadpool_plugin.mirror.store import SnapshotStore
from deadpool_plugin.transport.unix import LocalPeer


class Peer:
    def send(self, message, fds=()):
        pass


def ready(rank: int) -> local.RankReady:
    return local.RankReady(rank, header_bytes=4096, payload_bytes=64, layout_hash="", replicas=(rank,), recording=b"")


def serving(rank: int) -> Slot:
    return Slot(rank, rank=rank, process=Process(1, rank, rehearses=False, peer=cast(LocalPeer, Peer())))


def mirroring(store: SnapshotStore) -> Mirroring:
    made = Mirroring(local_node(host(store)))
    made.enter(World(0, (0, 0), ()))
    return made


@pytest.fixture
def store():
    made = SnapshotStore()
    yield made
    free(made)


def test_slots_that_are_being_made_are_not_asked_for_again(store, monkeypatch):
    needed, create = [], SlotPair.create
    monkeypatch.setattr("deadpool_plugin.mirror.arena.check_memory", lambda need, headroom: needed.append(need))

    async def scenario():
        made, slots = mirroring(store), [serving(0), serving(1)]

        def meanwhile(rank, *arguments):
            if rank == 0:
                made.check_memory(local.RankReady(0, 4096, 64, "", (1,), b""), 0)
            return create(rank, *arguments)

        monkeypatch.setattr(SlotPair, "create", meanwhile)
        for slot in slots:
            await made.prepare(slot, present(slot.serving), ready(slot.rank))

    asyncio.run(scenario())
    each = arena_bytes(4096, 64)
    untouched = each  # of what is in the making when rank 1 is asked for
    assert needed == [2 * each, each, each + untouched, each, each]


def test_a_spare_needs_what_the_node_it_would_replace_runs_and_mirrors(store, monkeypatch):
    needed, small, large = [], arena_bytes(4096, 0), arena_bytes(4096, 64)
    monkeypatch.setattr("deadpool_plugin.mirror.arena.check_memory", lambda need, headroom: needed.append(need))

    async def scenario():
        made = mirroring(store)
        made.enter(World(0, (1, 1, 2, 2, 3, 3), (0,)))
        made.check_memory(local.RankReady(0, 4096, 64, "", (2,), b""), 2)
        made.check_memory(local.RankReady(0, 4096, 64, "", (0, 2, 4), b""), 2)  # two more nodes keep the same payload
        store.prepare_own(2, 4096, 64)
        made.check_memory(local.RankReady(0, 4096, 64, "", (2,), b""), 2)

    asyncio.run(scenario())
    assert needed == [4 * large, 2 * large + 2 * small, large, 3 * large]


def test_slots_of_a_process_that_was_replaced_meanwhile_are_not_kept(store):
    async def scenario():
        slot = serving(0)
        asked = present(slot.serving)
        slot.process = Process(2, 0, rehearses=False, peer=cast(LocalPeer, Peer()))
        await mirroring(store).prepare(slot, asked, ready(0))

    asyncio.run(scenario())
    assert store.own(0) is None and not store.has_slots(0)


def test_slots_that_are_being_made_when_the_script_begins_again_make_room_for_the_next(store, monkeypatch):
    """Both at once may be more than there is, which would have ended the job."""
    fed: list[api.Input] = []
    touch = SlotPair._touch

    def fenced_meanwhile(self, going_on):
        store.fence(1)
        touch(self, going_on)

    monkeypatch.setattr(SlotPair, "_touch", fenced_meanwhile)
    slot = serving(0)

    async def scenario():
        made = Mirroring(local_node(host(store), fed.append))
        made.enter(World(0, (0, 0), ()))
        await made.prepare(slot, present(slot.serving), ready(0))

    asyncio.run(scenario())
    assert not fed and not store.has_slots(0) and not present(slot.process).in_training
