"""A plan that goes behind a committed step, in the agent: what it tells its processes, and which ones it replaces."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from itertools import pairwise
from typing import cast

import msgspec
import pytest
from support import present
from support.hosts import host, local_node
from support.stand_in import StandIn, stand_in

from deadpool_plugin import events
from deadpool_plugin.agent.mirroring import Mirroring
from deadpool_plugin.agent.node import Process, Slot
from deadpool_plugin.agent.process import Agent
from deadpool_plugin.agent.rehearsals import Rehearsal, Rehearsals
from deadpool_plugin.agent.reports import sentence
from deadpool_plugin.agent.workers import Workers
from deadpool_plugin.core import api, local
from deadpool_plugin.core.types import NO_STEP, World
from deadpool_plugin.mirror.records import ROW_STEPS, CallHistory, unpack
from deadpool_plugin.mirror.store import SnapshotStore
from deadpool_plugin.transport.unix import LocalPeer

WORLD = World(1, (0, 1), (2,))


def test_what_was_committed_after_the_restore_step_is_not_told_to_newcomers(tmp_path):
    workers = Workers(local_node(output_dir=tmp_path), lambda slot: None)
    workers.commit(9)
    workers.enter(WORLD, 10)
    assert workers.committed == 9
    workers.enter(WORLD, 7)
    assert workers.committed == 7
    workers.commit(8)
    assert workers.committed == 8
    workers.form(WORLD)
    assert workers.committed == NO_STEP


def rehearsing(slot: Slot, rank: int, told: int) -> Rehearsal:
    process = slot.stand_ins[rank] = Process(order=1, rank=rank, rehearses=True)
    history = CallHistory(100_000)
    for step in range(told + 1):
        history.append(step, b"records of %d" % step)
    return Rehearsal(slot, process, stand_in(local.RankReady), source=0, history=history, told=told)


@pytest.mark.parametrize("stands_by", [True, False])
def test_a_process_that_followed_too_far_is_of_no_use(stands_by):
    """A spare's controller has another one begin; where the rank has lost its process that begins at once."""
    fed: list[api.Input] = []
    ended, begun = [], []

    async def scenario():
        slots = [Slot(0), Slot(1)]
        node = local_node(host(stand_in(SnapshotStore)), fed.append, slots, node=2)
        workers = StandIn(Workers)
        workers.end_stand_in = lambda slot, rank: ended.append((slot.local_rank, rank))
        rehearsals = Rehearsals(node, cast(Workers, workers), Mirroring(node))

        async def begin(slot, rank, source, stands_in):
            begun.append((slot.local_rank, rank, source))

        rehearsals.begin = begin  # type: ignore[assignment]
        both = rehearsing(slots[0], 0, told=9), rehearsing(slots[1], 1, told=7)
        rehearsals.by_process = {one.process: one for one in both}
        if not stands_by:
            for slot in slots:
                slot.rank, slot.process = slot.local_rank, slot.stand_ins.pop(slot.local_rank)
        rehearsals.swapped((5, 6), restore_step=7)
        await asyncio.gather(*rehearsals._beginning.values())
        return rehearsals

    rehearsals = asyncio.run(scenario())
    assert (fed, ended, begun) == (([api.SpareDropped(0, 0)], [(0, 0)], []) if stands_by else ([], [], [(0, 0, 5)]))
    kept = {one.rank: one.source for one in rehearsals.by_process.values()}
    assert kept == {1: 6}, "the other one has followed no further than the job went back"


class Reader:
    """A process that reads what it is told when it is let."""

    def __init__(self):
        self.told, self.may_read = [], asyncio.Semaphore(0)

    def send(self, message):
        self.told.append(message.records)

    async def drained(self):
        await self.may_read.acquire()


def test_a_long_past_is_told_piece_by_piece_as_it_is_read():
    async def scenario():
        slot = Slot(0)
        rehearsal = rehearsing(slot, 0, told=2 * ROW_STEPS + 4)
        rehearsal.told, rehearsal.process.peer = 4, cast(LocalPeer, reader)
        telling = asyncio.create_task(rehearsal.tell())
        told = []
        for _ in range(3):
            await asyncio.wait([telling], timeout=0)
            told.append(len(reader.told))
            reader.may_read.release()
        await telling
        return told, rehearsal.told

    reader = Reader()
    told, last = asyncio.run(scenario())
    assert told == [1, 2, 3]
    ends = pairwise((5, ROW_STEPS, 2 * ROW_STEPS, 2 * ROW_STEPS + 5))
    records = [[b"records of %d" % step for step in range(*piece)] for piece in ends]
    assert [[record for part in piece for record in unpack(part)] for piece in reader.told] == records
    assert list(map(len, reader.told)) == [ROW_STEPS - 5, 1, 5], "a row goes as it is"
    assert last == 2 * ROW_STEPS + 4


def test_a_process_that_cannot_go_back_so_far_is_ended_and_replaced_with_its_reason():
    async def scenario():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        slot = Slot(0, rank=3)
        slot.process = Process(order=1, rank=3, rehearses=False, pid=child.pid, peer=stand_in(LocalPeer))
        fed: list[api.Input] = []
        lost: list[Slot] = []
        agent = Agent.__new__(Agent)
        agent._workers = Workers(local_node(feed=fed.append, slots=[slot]), lost.append)
        try:
            agent._heard(slot, present(slot.process.peer), local.OutOfReach("its calls begin later"))
            assert child.wait(10) == -signal.SIGKILL
        finally:
            child.kill()
            child.wait()
        return fed, lost, slot

    fed, lost, slot = asyncio.run(scenario())
    assert fed == [api.WorkerLost(3, "its calls begin later")] and lost == [slot]


def test_people_are_told_which_steps_are_done_again_and_why():
    undone = events.StepsUndone(first=8, last=9, reason="nobody holds it")
    catching_up = events.CatchingUp(node=2, rank=3, step=400, target=902)
    said = "rank 3's new process on node 2 replays past steps; it has reached step 400"
    assert sentence(catching_up) == f"{said} of 902 (44 %)"
    assert sentence(msgspec.structs.replace(catching_up, left_s=61.7)) == f"{said} of 902 (44 %); about 62 s are left"
    assert sentence(msgspec.structs.replace(catching_up, target=-1)) == said
    assert sentence(undone) == "steps 8 to 9 had been committed and are done again: nobody holds it"
    assert sentence(events.StepsUndone(first=9, last=9, reason="x")) == (
        "step 9 had been committed and is done again: x"
    )
