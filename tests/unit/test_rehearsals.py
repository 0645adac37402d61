"""agent/rehearsals.py: whence a recording comes, how long it is asked for, what a host has room for."""

from __future__ import annotations

import asyncio
import os
from typing import cast

import msgspec
import pytest
from support import present
from support.hosts import host, local_node
from support.stand_in import StandIn, fake, stand_in

from deadpool_plugin.agent.mirroring import Mirroring
from deadpool_plugin.agent.node import LocalNode, Process, Slot
from deadpool_plugin.agent.rehearsals import (
    HOME_AFTER_S,
    LOOK_S,
    MEMORY_FREED_S,
    PULL_STEPS,
    Rehearsal,
    Rehearsals,
)
from deadpool_plugin.agent.reports import Reports
from deadpool_plugin.agent.takeovers import TakeOvers
from deadpool_plugin.agent.workers import Workers
from deadpool_plugin.core import api, local
from deadpool_plugin.core.types import NO_STEP, SwapPlan, World
from deadpool_plugin.errors import DeadpoolError, MemoryShortage
from deadpool_plugin.events import CatchingUp, Event, RehearsalFailed
from deadpool_plugin.mirror.records import ROW_STEPS, CallHistory
from deadpool_plugin.mirror.store import SnapshotStore
from deadpool_plugin.mirror.wire import RefusedByPeer
from deadpool_plugin.transport.unix import LocalPeer

PEER = stand_in(LocalPeer)
PARKED = local.Parked(0, free=0, total=0, peak=0)


def rehearsals_of(node: LocalNode, mirroring: Mirroring | None = None) -> Rehearsals:
    return Rehearsals(node, stand_in(Workers), mirroring or Mirroring(node))


def asked(error: DeadpoolError, patience_s: float, succeeds_at: int) -> tuple[int, bool]:
    """Count the requests for a recording that fail with `error` at first, and tell whether that was the end of it."""

    async def scenario() -> tuple[int, bool]:
        slot, failed = Slot(0), list[object]()
        rehearsals = rehearsals_of(local_node(slots=[slot], node=2, patience_s=patience_s))
        attempts = 0

        async def begin(slot, rank, source, stands_in):
            nonlocal attempts
            attempts += 1
            if attempts < succeeds_at:
                raise error

        rehearsals.begin = begin  # type: ignore[assignment]
        rehearsals._fail = lambda *arguments: failed.append(arguments)  # type: ignore[method-assign]
        await rehearsals._begin_in_time(slot, 0, 1)
        return attempts, bool(failed)

    return asyncio.run(asyncio.wait_for(scenario(), timeout=30))


def test_who_runs_the_rank_since_a_moment_is_asked_again(monkeypatch):
    monkeypatch.setattr("deadpool_plugin.agent.rehearsals._RETRY_S", 0.0)
    assert asked(RefusedByPeer("no recording"), 60.0, succeeds_at=9) == (9, False)
    assert asked(RefusedByPeer("no recording"), 0.0, succeeds_at=9) == (1, True)
    assert asked(DeadpoolError("no process"), 60.0, succeeds_at=9) == (1, True)


def test_a_spare_that_could_not_hold_the_mirrors_that_come_with_its_ranks_says_so_once_and_stays():
    fed: list[api.Input] = []
    told: list[Event] = []
    prepared, asked = [], []

    def check(profile: local.RankReady, node: int) -> None:
        asked.append((profile, node))
        raise MemoryShortage("snapshots need 96 GiB")

    async def scenario():
        slots = [Slot(0), Slot(1)]
        mirroring, reports, store = stand_in(Mirroring), StandIn(Reports), StandIn(SnapshotStore)
        mirroring.check_memory = check
        on = host(cast(SnapshotStore, store))
        store.prepare_own = lambda *arguments: prepared.append(arguments)
        reports.emit = told.append
        rehearsals = rehearsals_of(local_node(on, fed.append, slots, node=5, reports=reports), mirroring)
        for number, slot in enumerate(slots):
            process = slot.stand_ins[6 + number] = Process(order=1, rank=6 + number, rehearses=True)
            profile = local.RankReady(0, 4096, 64, "", (6 + number,), b"")
            rehearsal = Rehearsal(slot, process, profile, source=3, history=CallHistory(1000))
            rehearsals.by_process[process] = rehearsal
        for process in rehearsals.by_process:
            rehearsals.rehearsed(process, local.Rehearsed(process.rank, 1.0))
        await asyncio.gather(*(present(one.following) for one in rehearsals.by_process.values()))
        for process in rehearsals.by_process:
            rehearsals.parked(process, PARKED)

    asyncio.run(asyncio.wait_for(scenario(), timeout=30))
    assert [node for _, node in asked] == [3]
    reason = "memory here does not hold what node 3 runs and mirrors: snapshots need 96 GiB"
    assert [event for event in told if isinstance(event, RehearsalFailed)] == [RehearsalFailed(7, reason)]
    assert fed == [api.SpareRehearsed(0, 6), api.SpareUnable(reason), api.SpareRehearsed(1, 7)]
    assert prepared == [(6, 4096, 64), (7, 4096, 64)]


def test_a_newcomer_that_read_other_data_has_failed_as_a_script_has_and_is_not_just_lost(monkeypatch):
    """Another one begins anew, and the job ends with a verdict if that one does the same (core/processes.py)."""
    slot, killed = Slot(0, rank=6), []
    told: list[Event] = []
    rehearsals, rehearsal = following(3, slot)
    monkeypatch.setattr(rehearsals._node.reports, "emit", told.append)
    monkeypatch.setattr(rehearsals._workers, "kill", lambda *arguments: killed.append(arguments))
    rehearsals.failing(slot, rehearsal.process, local.Failing(6, "other data", differs=True))
    assert killed == [(slot, rehearsal.process, "other data", 1)]
    assert told == [RehearsalFailed(6, "other data")]
    slot.rank = -1  # a spare's is ordered again, and ends nothing
    rehearsals.failing(slot, rehearsal.process, local.Failing(6, "other data", differs=True))
    assert killed[1:] == [(slot, rehearsal.process, "other data")]


class Connection:
    """To a rehearsing process, which dies while it is told something."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def send(self, message, fds=()):
        self.process.ended, self.process.peer = True, None

    async def drained(self):
        pass


def following(told: int, slot: Slot) -> tuple[Rehearsals, Rehearsal]:
    rehearsals = rehearsals_of(local_node(host(stand_in(SnapshotStore)), slots=[slot], node=5))
    process = Process(order=1, rank=6, rehearses=True)
    if slot.rank < 0:
        slot.stand_ins[6] = process
    else:
        slot.process = process
    profile = local.RankReady(0, 4096, 64, "", (6,), b"")
    rehearsal = Rehearsal(slot, process, profile, 3, CallHistory(1 << 20), told=told)
    rehearsal.finished.set()
    rehearsals.by_process[process] = rehearsal
    return rehearsals, rehearsal


def test_people_are_told_of_one_newcomer_on_its_way_and_how_long_it_needs(monkeypatch):
    rehearsals, _ = following(0, Slot(0, rank=6))
    rehearsals._workers.committed = 100
    slots, clock = {6: Slot(0, rank=6), 7: Slot(1, rank=7)}, [100.0]
    told: list[tuple[float, CatchingUp]] = []
    monkeypatch.setattr(rehearsals._node.reports, "emit", lambda event: told.append((clock[0], event)))
    monkeypatch.setattr("deadpool_plugin.agent.rehearsals.loop_time", lambda: clock[0])
    for rank, slot in slots.items():
        slot.process = Process(order=1, rank=rank, rehearses=True)
    for second in range(30):
        clock[0] = 100.0 + second
        rehearsals.moved(slots[7], local.Moved(7, 10 + 2 * second))
        if second < 15:
            rehearsals.moved(slots[6], local.Moved(6, 3 * second))
    assert told == [
        (100.0, CatchingUp(7, 10, 100)),
        (110.0, CatchingUp(7, 30, 100, 35.0)),
        (120.0, CatchingUp(7, 50, 100, 25.0)),
    ]
    for second in range(30, 60):
        clock[0] = 100.0 + second
        rehearsals.moved(slots[6], local.Moved(6, 45))
    assert [(at, event.rank, event.step) for at, event in told[3:]] == [(140.0, 6, 45), (150.0, 6, 45)]


def test_a_host_that_has_heard_of_no_step_knows_from_the_plan_how_far_its_newcomer_has_to_go(monkeypatch):
    slot, told = Slot(0, rank=1), list[Event]()
    node = local_node(host(stand_in(SnapshotStore)), slots=[slot], node=2)
    rehearsals = Rehearsals(node, fake(committed=NO_STEP), fake())
    monkeypatch.setattr(node.reports, "emit", told.append)
    monkeypatch.setattr("deadpool_plugin.agent.rehearsals.loop_time", lambda: 100.0)
    rehearsals.swapped((0, 2), 900)
    slot.process = Process(order=1, rank=1, rehearses=True)
    rehearsals.moved(slot, local.Moved(1, 300))
    assert told == [CatchingUp(1, 300, 900)]


def test_a_process_that_takes_over_rehearses_nothing_else_in_the_next_swap():
    """An order for another rank that was still being fetched began in the process's place, and the rank never came."""

    async def scenario():
        slot = Slot(0)
        rehearsals, _ = following(3, slot)
        rehearsals.begin = lambda *arguments: asyncio.sleep(60)  # type: ignore[assignment]
        rehearsals.order(slot, 9, 1)
        rehearsals.done(slot)
        rehearsals.swapped(tuple(range(10)), 3)
        return rehearsals._beginning

    assert asyncio.run(scenario()) == {}


def test_who_follows_for_a_process_that_dies_meanwhile_comes_to_an_end():
    """It used to go round without ever waiting: the agent's event loop stood still, and its healthy host was lost."""
    pulled = 0

    async def pull(rehearsal, source, last):
        nonlocal pulled
        pulled += 1
        assert pulled < 100, "round and round"
        for step in range(rehearsal.history.last + 1, last + 1):
            rehearsal.history.append(step, b"records")

    async def scenario():
        rehearsals, rehearsal = following(0, Slot(0))
        rehearsal.process.peer = cast(LocalPeer, Connection(rehearsal.process))
        rehearsal.history.append(0, b"records")
        rehearsals.pull = pull
        rehearsals._committed = 200
        await rehearsals._follow(rehearsal)

    asyncio.run(asyncio.wait_for(scenario(), timeout=30))
    assert pulled == 1


def test_a_long_past_is_asked_for_in_whole_rows_which_stay_as_they_are():
    source, asked = CallHistory(1 << 20), list[tuple[int, int]]()
    for step in range(3 * PULL_STEPS):
        source.append(step, b"records of %d" % step)

    async def records(node, rank, first, last):
        asked.append((first, last))
        return source.get(first, last)

    async def scenario():
        rehearsals, rehearsal = following(NO_STEP, Slot(0))
        rehearsals._mirroring.records = records
        await rehearsals.pull(rehearsal, 3, PULL_STEPS + 20)
        await rehearsals.pull(rehearsal, 3, 3 * PULL_STEPS - 1)
        return rehearsal.history

    history = asyncio.run(asyncio.wait_for(scenario(), timeout=30))
    stop, resumed = PULL_STEPS + 20, 2 * PULL_STEPS + ROW_STEPS
    ends = [(0, PULL_STEPS - 1), (PULL_STEPS, stop), (stop + 1, resumed - 1), (resumed, 3 * PULL_STEPS - 1)]
    assert asked == ends
    held = history.get(0, source.last)
    assert held == source.get(0, source.last) and len(held) == 3 * PULL_STEPS // ROW_STEPS - 1 + ROW_STEPS


def test_a_swap_does_not_take_a_rehearsal_that_begins_for_the_one_before_it():
    """The order was cut off for the sake of the dead process before it, and nobody orders the same again."""

    async def scenario():
        slot = Slot(0)
        rehearsals, rehearsal = following(7, slot)
        rehearsal.process.ended = True
        slot.stand_ins.clear()
        begun, asked = asyncio.Event(), []

        async def begin(slot, rank, source, stands_in):
            asked.append((rank, source))
            await begun.wait()

        rehearsals.begin = begin  # type: ignore[assignment]
        rehearsals.order(slot, 6, 1)
        await asyncio.sleep(0)
        rehearsals.swapped((0, 0, 1, 1, 2, 2, 3, 3), 9)
        begun.set()
        [task] = rehearsals._beginning.values()
        await task
        assert asked == [(6, 1), (6, 3)], "and whoever runs the rank since then is asked"

    asyncio.run(asyncio.wait_for(scenario(), timeout=30))


class Told:
    """The agent's end of a connection."""

    def __init__(self) -> None:
        self.told: list[local.LocalMessage] = []

    def send(self, message, fds=()):
        self.told.append(message)

    def close(self):
        pass

    def read_rest(self):
        pass

    async def drained(self):
        pass


class Parking:
    """One node whose agent parks processes. `clock`: the loop's time; `short`, `fits`: what its memory is like."""

    def __init__(self, monkeypatch, slots: int = 2, stands_by: bool = False, **config: object) -> None:
        self.clock, self.short, self.fits = 100.0, False, True
        self.fed: list[api.Input] = []
        self.asked: list[tuple[object, ...]] = []  # what fits_beside was asked

        def fits_beside(*arguments: object) -> bool:
            self.asked.append(arguments)
            return self.fits

        on = host(SnapshotStore(), is_short=lambda: self.short, fits_beside=fits_beside)
        self.slots = [Slot(number, -1 if stands_by else number) for number in range(slots)]
        for slot in self.slots:
            slot.standby, slot.standby_pid = cast(LocalPeer, Told()), os.getpid()
            if not stands_by:
                self.runs(slot)
        node = local_node(on, self.fed.append, self.slots, node=1, **config)
        node.world = World(0, (0, 2), (1,)) if stands_by else World(0, (1,) * slots)
        self.workers = Workers(node, lambda slot: None)
        mirroring = Mirroring(node)
        mirroring.enter(node.world)
        self.rehearsals = Rehearsals(node, self.workers, mirroring)
        self.takeovers = TakeOvers(node, self.workers, mirroring, self.rehearsals)
        for rank in range(2):
            profile = local.RankReady(rank, 4096, 64, "", (rank,), b"", modules=b"torch")
            mirroring.profiles[rank] = profile
            on.store.recordings[rank] = msgspec.msgpack.encode(profile)
        monkeypatch.setattr("deadpool_plugin.agent.rehearsals.loop_time", lambda: self.clock)
        monkeypatch.setattr("deadpool_plugin.agent.rehearsals._RETRY_S", 0.0)

    @staticmethod
    def runs(slot: Slot) -> None:
        peer = cast(LocalPeer, Told())
        slot.process = Process(order=1, rank=slot.rank, rehearses=False, in_training=True, peer=peer)

    async def passes(self, seconds: float) -> Parking:
        """Training goes on for so long."""
        for _ in range(int(seconds)):
            self.clock += 1.0
            step = self.rehearsals._committed + 1
            for rank in range(8):
                self.rehearsals._store.history(rank).append(step, b"records")
            self.rehearsals.committed(step)
            for _ in range(4):
                await asyncio.sleep(0)
        return self

    @property
    def stand_ins(self) -> list[int]:
        return [rank for slot in self.slots for rank in slot.stand_ins]

    def rehearsed(self) -> None:
        """What is under way is done."""
        for slot in self.slots:
            for rank, process in slot.stand_ins.items():
                process.peer = process.peer or cast(LocalPeer, Told())
                if not self.rehearsals.by_process[process].finished.is_set():
                    self.rehearsals.rehearsed(process, local.Rehearsed(rank, 1.0))

    async def parked(self) -> None:
        """What is under way is done, and has been told of the steps until now."""
        self.rehearsed()
        await self.passes(2)
        for slot in self.slots:
            for process in slot.stand_ins.values():
                rehearsal = self.rehearsals.by_process[process]
                if rehearsal.parks and not rehearsal.parked:
                    self.rehearsals.parked(process, PARKED)


def test_processes_are_parked_at_home_one_after_another_once_training_goes_well(monkeypatch):
    async def scenario():
        job = Parking(monkeypatch)
        assert (await job.passes(HOME_AFTER_S)).stand_ins == []
        assert (await job.passes(2 * LOOK_S)).stand_ins == [0]
        assert (await job.passes(2 * LOOK_S)).stand_ins == [0], "the first is not done"
        job.rehearsed()
        await job.passes(2)
        process = job.slots[0].stand_ins[0]
        told = cast(Told, process.peer).told
        before = told[: told.index(local.Park())]
        steps = sum(len(one.records) for one in before if isinstance(one, local.History))
        assert steps > HOME_AFTER_S, "it parks once it has been told of the steps of before"
        assert (await job.passes(2 * LOOK_S)).stand_ins == [0], "it may be on its way through them"
        await job.parked()
        assert (await job.passes(2 * LOOK_S)).stand_ins == [0, 1]
        parked, like, under_way, _ = job.asked[-1]
        assert (parked, like, under_way) == (1, [process.pid], 0)
        job.rehearsed()
        assert job.fed == [], "the controller knows nothing of it"
        job.short = True
        assert (await job.passes(LOOK_S)).stand_ins == [0], "the memory is needed"
        assert local.EndProcess(2) in cast(Told, job.slots[1].standby).told
        job.short = False
        assert (await job.passes(4 * LOOK_S)).stand_ins == [0], "it will be needed again"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("park_at_home", "on_device", "parked"),
    [(None, False, [0]), (None, True, []), (True, True, [0]), (False, False, [])],
)
def test_where_processes_are_parked_at_home(monkeypatch, park_at_home, on_device, parked):
    async def scenario():
        job = Parking(monkeypatch, park_at_home=park_at_home)
        profiles = job.rehearsals._mirroring.profiles
        for rank, profile in profiles.items():
            profiles[rank] = msgspec.structs.replace(profile, on_device=on_device)
        assert (await job.passes(HOME_AFTER_S + 2 * LOOK_S)).stand_ins == parked

    asyncio.run(scenario())


def test_a_host_without_memory_parks_nothing_at_home(monkeypatch):
    async def scenario():
        job = Parking(monkeypatch)
        job.fits = False
        assert (await job.passes(HOME_AFTER_S + 4 * LOOK_S)).stand_ins == [] and job.fed == []

    asyncio.run(scenario())


def test_a_rank_that_loses_its_process_gets_the_one_that_is_parked(monkeypatch):
    async def scenario():
        job = Parking(monkeypatch, slots=1)
        await job.passes(HOME_AFTER_S + 2 * LOOK_S)
        job.rehearsed()
        (slot,), before = job.slots, present(job.slots[0].process)
        parked = slot.stand_ins[0]
        job.workers.store_offer(slot, before, local.StoreOffer("host:1"))
        job.workers.store_offer(slot, parked, local.StoreOffer("host:2"))
        assert job.fed[-1] == api.StoreOffered("host:1", 0), "not the stand-in's"
        job.workers._on_lost = job.rehearsals.replace
        job.workers.ended(slot, before, -9)
        assert slot.process is parked and slot.stand_ins == {}
        assert local.RunsRank(parked.order) in cast(Told, slot.standby).told
        assert api.StoreOffered("host:2", 0, stand_in=True) in job.fed
        assert api.WorkerLost(0, "process 0 killed by SIGKILL") in job.fed
        job.workers.ended(slot, parked, -9)
        assert [type(one) for one in job.fed[-2:]] == [api.StoreLost, api.WorkerLost], "it is the rank's process now"

    asyncio.run(scenario())


def test_the_death_of_what_is_parked_at_home_is_no_loss(monkeypatch):
    async def scenario():
        job = Parking(monkeypatch, slots=1)
        await job.passes(HOME_AFTER_S + 2 * LOOK_S)
        job.rehearsed()
        job.workers.ended(job.slots[0], job.slots[0].stand_ins[0], -9)
        assert job.fed == [] and job.stand_ins == []
        assert (await job.passes(2 * LOOK_S)).stand_ins == [0], "another one takes its place"
        process = job.slots[0].stand_ins[0]
        peer = process.peer = cast(LocalPeer, Told())
        peer.tag = job.slots[0]
        job.workers.kill(job.slots[0], process, "it could not follow")
        assert job.fed == [] and job.stand_ins == [] and peer.tag is None, "what it still says is not heard"
        assert local.EndProcess(process.order) in cast(Told, job.slots[0].standby).told

    asyncio.run(scenario())


def test_a_rank_whose_rehearsal_at_home_fails_again_is_left_alone(monkeypatch):
    """Two processes of a script may want the same port."""

    async def scenario():
        job = Parking(monkeypatch)
        await job.passes(HOME_AFTER_S + LOOK_S)
        for _ in range(2):
            assert (await job.passes(LOOK_S)).stand_ins == [0]
            job.workers.kill(job.slots[0], job.slots[0].stand_ins[0], "OSError: Address already in use")
        assert (await job.passes(2 * LOOK_S)).stand_ins == [1], "the other one may do better"
        job.rehearsed()
        assert (await job.passes(4 * LOOK_S)).stand_ins == [1] and job.fed == []

    asyncio.run(scenario())


def test_a_spare_parks_as_many_hosts_as_memory_allows(monkeypatch):
    async def scenario():
        job = Parking(monkeypatch, slots=1, stands_by=True)
        slot = job.slots[0]
        job.fits = False
        job.rehearsals.order(slot, 0, 1)
        await job.passes(1)
        assert job.stand_ins == [0], "its first host, whatever there is"
        imports, order = cast(Told, slot.standby).told
        assert imports == local.Imports(b"torch") and isinstance(order, local.RunRank), "imports come before the fork"
        job.rehearsed()
        await job.passes(2)
        assert job.fed == [], "it may still be on its way through the steps of before"
        await job.parked()
        assert job.fed == [api.SpareRehearsed(0, 0)]
        job.rehearsals.order(slot, 1, 1)
        await job.passes(MEMORY_FREED_S + 1)
        assert job.fed[1:] == [api.SpareFull(0, 1)] and job.stand_ins == [0]
        job.short = True
        await job.passes(LOOK_S)
        assert job.fed[2:] == [api.SpareShort()]
        job.rehearsals.end(slot, 0)
        assert job.stand_ins == [] and job.rehearsals.by_process == {}

    asyncio.run(scenario())


def test_a_spare_that_takes_a_host_over_ends_what_it_has_parked_of_others(monkeypatch):
    async def scenario():
        job = Parking(monkeypatch, slots=1, stands_by=True)
        (slot,) = job.slots
        for rank in (1, 0):
            job.rehearsals.order(slot, rank, 1)
            await job.passes(1)
            job.rehearsed()
        assert job.stand_ins == [1, 0]
        taker, other, taken = slot.stand_ins[0], slot.stand_ins[1], []
        other.pid = 2**22 + 1  # there is none

        async def take_over(plan, slot, source, others):
            taken.append((slot.process, others))

        monkeypatch.setattr(job.takeovers, "_take_over", take_over)
        plan = SwapPlan(World(1, (1, 2)), restore_step=1, lost_nodes=(0,), sources=(), store="h:1")
        job.takeovers.act(plan)
        await asyncio.sleep(0)
        assert slot.process is taker and taken == [(taker, [other.pid])] and job.stand_ins == []
        told = cast(Told, slot.standby).told
        assert told[-2:] == [local.RunsRank(taker.order), local.EndProcess(other.order)]

    asyncio.run(scenario())


def test_a_rehearsal_that_ends_right_after_a_swap_is_not_taken_for_one_that_has_gone_through_all_steps(monkeypatch):
    async def scenario():
        job = Parking(monkeypatch, slots=1, stands_by=True)
        job.rehearsals.order(job.slots[0], 0, 1)
        await job.passes(4)
        job.rehearsals.swapped((1, 2), restore_step=3)
        job.rehearsed()
        for _ in range(9):
            await asyncio.sleep(0)
        told = cast(Told, job.slots[0].stand_ins[0].peer).told
        assert told == [], "nobody has said yet what there is to go through"
        await job.passes(2)
        assert isinstance(told[0], local.History) and told[1] == local.Park()

    asyncio.run(scenario())


def test_a_spare_parks_on_its_devices_what_they_have_room_for(monkeypatch):
    """Two slots, each with a device: one rehearsal after another on each, while its largest so far fits once more."""

    async def scenario():
        job = Parking(monkeypatch, slots=2, stands_by=True)
        job.rehearsals._node.world = World(0, (0, 0, 2, 2, 3, 3, 4, 4), (1,))
        for rank, profile in job.rehearsals._mirroring.profiles.items():
            recording = msgspec.msgpack.encode(msgspec.structs.replace(profile, on_device=True))
            job.rehearsals._store.recordings[rank] = recording
            for other in (rank + 2, rank + 4, rank + 6):
                job.rehearsals._store.recordings[other] = recording

        def parks(rank: int, free: int) -> None:
            process = job.slots[rank % 2].stand_ins[rank]
            job.rehearsals.parked(process, local.Parked(rank, free, total=80, peak=10))

        for rank in (0, 1):
            job.rehearsals.order(job.slots[rank], rank, 1)
        await job.passes(4)
        assert job.stand_ins == [0, 1]
        for rank in (2, 3, 4):
            job.rehearsals.order(job.slots[rank % 2], rank, 1)
        job.rehearsed()
        await job.passes(2 * MEMORY_FREED_S)
        assert job.stand_ins == [0, 1], "what is left is not known"
        parks(0, free=60)
        await job.passes(4)
        assert job.stand_ins == [0, 2, 1], "the other device is still in use"
        parks(1, free=31)  # it takes 49 of 80, and 10 more at its peak
        await job.passes(MEMORY_FREED_S + 4)
        assert job.stand_ins == [0, 2, 1] and api.SpareFull(1, 3) in job.fed
        job.rehearsed()
        parks(2, free=40)
        await job.passes(4)
        assert job.stand_ins == [0, 2, 4, 1]
        job.rehearsals.order(job.slots[0], 6, 1)
        job.rehearsed()
        parks(4, free=29)  # the first has taken 30 at its peak
        await job.passes(MEMORY_FREED_S + 4)
        assert api.SpareFull(0, 6) in job.fed
        job.rehearsals.end(job.slots[0], 4)
        job.rehearsals.order(job.slots[0], 6, 1)
        await job.passes(4)
        assert job.stand_ins == [0, 2, 6, 1]

    asyncio.run(scenario())


def test_what_an_ended_process_still_had_of_a_device_keeps_nobody_out_for_good(monkeypatch):
    async def scenario():
        job = Parking(monkeypatch, slots=1, stands_by=True)
        job.rehearsals.order(job.slots[0], 0, 1)
        await job.passes(4)
        process = job.slots[0].stand_ins[0]
        job.rehearsals.parked(process, local.Parked(0, free=5, total=80, peak=40))  # 45 of it another one's
        job.rehearsals.parked(process, PARKED)  # a rank that uses no device
        job.rehearsals.end(job.slots[0], 0)
        job.rehearsals.order(job.slots[0], 1, 1)
        await job.passes(4)
        assert job.stand_ins == [1] and job.fed == 2 * [api.SpareRehearsed(0, 0)]

    asyncio.run(scenario())


def test_training_waits_until_its_device_is_free_of_what_was_parked(monkeypatch):
    async def scenario():
        job = Parking(monkeypatch, slots=1, stands_by=True)
        looked = []

        class Processes:
            def has_left(self, pid):
                looked.append(pid)
                return len(looked) > 5

        job.takeovers._node.host.processes = Processes()  # type: ignore[assignment]
        await job.takeovers._left([])
        assert not looked
        await job.takeovers._left([7])
        assert looked == [7] * 6

    asyncio.run(scenario())
