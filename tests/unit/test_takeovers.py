"""agent/takeovers.py: orders are for the newest plan only, and a process that ends meanwhile is no error here."""

from __future__ import annotations

import asyncio
import gc
import types
from typing import cast

import pytest
from support.hosts import host, local_node
from support.stand_in import StandIn, stand_in
from support.stores import free

from deadpool_plugin import events
from deadpool_plugin.agent import workers as agent_workers
from deadpool_plugin.agent.mirroring import Mirroring
from deadpool_plugin.agent.node import Process, Slot
from deadpool_plugin.agent.rehearsals import Rehearsal, Rehearsals
from deadpool_plugin.agent.reports import Reports
from deadpool_plugin.agent.takeovers import TakeOvers
from deadpool_plugin.core import local
from deadpool_plugin.core.types import Source, SwapPlan, World
from deadpool_plugin.errors import TransportError
from deadpool_plugin.mirror.records import CallHistory
from deadpool_plugin.mirror.store import SnapshotStore
from deadpool_plugin.transport.unix import LocalPeer

PROFILE = local.RankReady(0, 4096, 0, "", (0,), b"")
PLAN = SwapPlan(World(4, (0,)), restore_step=7, lost_nodes=(1,), sources=(), store="h:1")


class Peer:
    """A process's connection, which ends with the first message."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.told: list[local.LocalMessage] = []

    def send(self, message, fds=()):
        self.told.append(message)
        self.process.peer = None


class Workers(StandIn):
    """`meanwhile`: what happens while it is looked up what has been printed."""

    committed, paused = 9, False

    def __init__(self, meanwhile) -> None:
        super().__init__(agent_workers.Workers)
        self.meanwhile = meanwhile

    def tell_committed(self, peer):
        peer.send(local.Committed(self.committed))

    async def take(self, slot, process, step):
        self.meanwhile()
        process.took_over = True
        return True


def handed_over(meanwhile, cancel: bool = False, ready: bool = False, said=None) -> list[local.LocalMessage]:
    """Return what a process is told that has rehearsed rank 0; `meanwhile` gets its slot and the store.

    `ready`: it had before the plan came; `said`: gets the events.
    """

    async def scenario():
        reports = StandIn(Reports)
        reports.emit = ([] if said is None else said).append
        process = Process(1, 0, rehearses=True)
        slot, peer = Slot(0, rank=0, process=process), Peer(process)
        process.peer = cast(LocalPeer, peer)
        history = cast(CallHistory, types.SimpleNamespace(last=-1))
        rehearsal = Rehearsal(slot, process, local.RankReady(0, 4096, 0, "", (0,), b""), 0, history)
        store = SnapshotStore()
        store.fence(PLAN.world.generation)
        store.create_own(0, 4096, 0)
        workers = cast(agent_workers.Workers, Workers(lambda: meanwhile(slot, store)))
        mirroring = stand_in(Mirroring)
        node = local_node(host(store), slots=[slot], reports=reports)
        rehearsals = Rehearsals(node, workers, mirroring)
        takeovers = TakeOvers(node, workers, mirroring, rehearsals)
        rehearsals.by_process[process] = rehearsal

        async def bring(*arguments):
            pass

        takeovers._bring = bring
        if ready:
            rehearsal.finished.set()
            rehearsal.device_bytes = 0
        taking = asyncio.create_task(takeovers._take_over(PLAN, slot, None, ()))
        await asyncio.sleep(0)
        rehearsal.finished.set()
        if cancel:
            taking.cancel()
        await asyncio.wait([taking])
        assert taking.cancelled() if cancel else taking.result() is None
        free(store)
        return peer.told

    return asyncio.run(scenario())


def test_a_process_that_ends_with_the_order_is_told_the_rest_in_vain():
    told = handed_over(lambda slot, store: None)
    assert [type(message) for message in told] == [local.TakeOver, local.Committed]


@pytest.mark.parametrize("ready", [True, False])
def test_it_is_said_whether_the_process_was_ready_before_the_plan(ready):
    said: list[events.Event] = []
    handed_over(lambda slot, store: None, ready=ready, said=said)
    assert said == [events.RankTakenOver(rank=0, covered=ready)]


def test_a_process_whose_connection_has_ended_is_told_nothing():
    said: list[events.Event] = []
    assert handed_over(lambda slot, store: setattr(slot.process, "peer", None), said=said) == []
    assert said == []


def test_an_order_of_an_older_plan_is_not_handed_out():
    """The fence cancels the take-over in the moment in which its rehearsal ends."""
    assert handed_over(lambda slot, store: None, cancel=True) == []


def test_a_fetch_that_fails_as_it_is_given_up_ends_nobody():
    """As a time limit does that expires in the same moment."""

    async def scenario():
        unhandled = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        mirroring, workers = stand_in(Mirroring), stand_in(agent_workers.Workers)

        async def bring(*arguments):
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                raise TransportError("no answer") from None

        async def pull(*arguments):
            await asyncio.sleep(0)
            raise TransportError("refused")

        rehearsals = stand_in(Rehearsals)
        takeovers = TakeOvers(local_node(host(SnapshotStore())), workers, mirroring, rehearsals)
        mirroring.bring, rehearsals.pull = bring, pull
        process, history = Process(1, 0, rehearses=True), cast(CallHistory, types.SimpleNamespace())
        with pytest.raises(TransportError, match="refused"):
            rehearsal = Rehearsal(Slot(0), process, PROFILE, 0, history)
            await takeovers._bring(PLAN.restore_step, Source(0, 2, 2, 0), rehearsal)
        await asyncio.sleep(0)
        gc.collect()
        return unhandled

    assert asyncio.run(scenario()) == []


def test_a_survivor_that_ends_while_its_restore_step_is_fetched_is_not_told_to_join():
    async def scenario():
        process, mirrored = Process(1, 0, rehearses=False), []
        slot = Slot(0, rank=0, process=process)
        process.peer = cast(LocalPeer, Peer(process))
        mirroring, workers = stand_in(Mirroring), stand_in(agent_workers.Workers)

        async def refill(source, step):
            process.peer = None

        mirroring.refill, mirroring.mirror_again = refill, lambda *arguments: mirrored.append(arguments)
        takeovers = TakeOvers(local_node(host(SnapshotStore())), workers, mirroring, stand_in(Rehearsals))
        await takeovers._refill(PLAN, slot, Source(0, 2, 2, 0))
        return mirrored

    assert asyncio.run(scenario()) == [(0, 7)], "what was fetched is mirrored all the same"
