"""Call records that fill their memory: people hear of it beforehand, then, and of each spare that it makes useless."""

from __future__ import annotations

import asyncio
import types
from typing import TypeVar, cast

from support import present
from support.hosts import host, local_node
from support.stand_in import fake, stand_in

from deadpool_plugin import events
from deadpool_plugin.agent.mirroring import Mirroring
from deadpool_plugin.agent.node import Process, Slot
from deadpool_plugin.agent.rehearsals import Rehearsal, Rehearsals
from deadpool_plugin.agent.reports import sentence
from deadpool_plugin.agent.workers import Workers
from deadpool_plugin.core import api, local
from deadpool_plugin.mirror import wire
from deadpool_plugin.mirror.records import CallHistory
from deadpool_plugin.mirror.store import SnapshotStore
from deadpool_plugin.transport.unix import LocalPeer

E = TypeVar("E", bound=events.Event)


class Told:
    """Reports that remember."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []

    def emit(self, event: events.Event) -> None:
        self.events.append(events.stamped(event, node=3, generation=0))

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


def mirroring_of(store: SnapshotStore, fed: list[api.Input], told: Told) -> Mirroring:
    """Make that of a node whose ranks' call records may take 1,000 bytes."""
    node = local_node(host(store), fed.append, reports=told)
    node.config = fake(copies=1, history_limit_bytes=1000)
    return Mirroring(node)


def test_it_is_said_once_at_four_fifths_and_once_when_it_is_full() -> None:
    fed: list[api.Input] = []
    store, told = SnapshotStore(history_limit_bytes=1000), Told()
    mirroring = mirroring_of(store, fed, told)
    for step in range(200):
        for rank in (4, 5):
            store.history(rank).append(step, bytes(10 if step < 20 else 7))
        mirroring.watch_history((4, 5), step)
    filling, full = told.of(events.HistoryFilling)
    assert (filling.rank, filling.step, filling.full) == (4, 128, False)
    assert (full.rank, full.full) == (4, True) and full.step == 20 + 800 // 7
    assert fed == [api.RecordsDropped()]
    assert "fill 80 % of history_limit_mib at step 128" in sentence(filling)
    assert "from now on only spares that have followed so far can take over" in sentence(full)


def test_a_rank_without_records_is_passed_over() -> None:
    told = Told()
    mirroring = mirroring_of(SnapshotStore(history_limit_bytes=1000), [], told)
    mirroring.watch_history((0,), 64)
    assert not told.events


def test_a_spare_that_comes_too_late_to_follow_says_so_once() -> None:
    fed: list[api.Input] = []

    async def scenario() -> Told:
        slot, told, store = Slot(0), Told(), SnapshotStore(history_limit_bytes=100)
        for step in range(30):
            store.history(4).append(step, bytes(10))
        process = slot.stand_ins[4] = Process(order=1, rank=4, rehearses=True, peer=stand_in(LocalPeer))
        node = local_node(host(store), fed.append, [slot], node=3, reports=told, patience_s=1.0)
        rehearsals = Rehearsals(node, stand_in(Workers), Mirroring(node))
        rehearsals.by_process[process] = rehearsal = Rehearsal(
            slot, process, stand_in(local.RankReady), source=3, history=CallHistory(100)
        )
        rehearsal.finished.set()
        for step in (29, 30):
            rehearsals.committed(step)
            await present(rehearsal.following)
        return told

    (failed,) = asyncio.run(scenario()).of(events.RehearsalFailed)
    assert fed == [api.SpareUnable(failed.reason)], "and the job is told that it is not covered"
    assert failed.rank == 4 and "held are 20 to 29" in failed.reason and "raise history_limit_mib" in failed.reason


def test_a_process_is_told_no_more_at_once_than_one_message_takes(monkeypatch) -> None:
    monkeypatch.setattr(wire, "RECORDS_BYTES_MAX", 100)
    sent: list[list[bytes]] = []

    async def scenario() -> None:
        async def drained() -> None:
            pass

        slot, history = Slot(0), CallHistory(1 << 20)
        peer = types.SimpleNamespace(send=lambda message: sent.append(message.records), drained=drained)
        slot.process = Process(order=1, rank=4, rehearses=True, peer=cast(LocalPeer, peer))
        for step, size in enumerate((40, 40, 40, 500, 10)):
            history.append(step, bytes(size))
        rehearsal = Rehearsal(slot, slot.process, stand_in(local.RankReady), source=3, history=history)
        await rehearsal.tell()
        assert rehearsal.told == 4

    asyncio.run(scenario())
    assert [[len(one) for one in records] for records in sent] == [[40, 40], [40], [500], [10]]
