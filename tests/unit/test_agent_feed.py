"""agent/process.py: an error in what the controller says is this node's end, and nobody else's; who says Alive; how
a node ends."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import types
from collections import deque
from typing import Any, cast

import pytest
from support import present
from support.hosts import local_node
from support.stand_in import stand_in

from deadpool_plugin import events
from deadpool_plugin.agent.node import Process, Slot
from deadpool_plugin.agent.process import Agent
from deadpool_plugin.agent.reports import Reports
from deadpool_plugin.agent.workers import Workers
from deadpool_plugin.config import Config
from deadpool_plugin.core import api, local
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.types import World
from deadpool_plugin.launch import agent as program
from deadpool_plugin.transport.tasks import Tasks
from deadpool_plugin.transport.unix import LocalPeer


@pytest.fixture
def member(monkeypatch):
    """(agent of node 3, why it has left, the events it has emitted)."""
    left: list[str] = []
    said: list[events.Event] = []
    agent = Agent.__new__(Agent)
    agent._inputs, agent._stepping, agent._node = deque(), False, local_node(node=3)
    agent._loop = cast(asyncio.AbstractEventLoop, types.SimpleNamespace(time=lambda: 0.0))
    agent._controller = cast(Controller, types.SimpleNamespace(world=World(0, (0, 3), ())))
    agent._left = cast("asyncio.Future[int]", types.SimpleNamespace(done=lambda: False))
    agent._reports = cast(Reports, types.SimpleNamespace(emit=said.append))
    monkeypatch.setattr(agent, "_leave", lambda action: left.append(action.reason))
    return agent, left, said


@pytest.mark.parametrize("error", [OSError("no more descriptors"), ValueError("a bug")])
@pytest.mark.parametrize("where", ["an action", "a callback"])
def test_what_fails_ends_this_node_and_not_the_link_whose_message_asked_for_it(member, error, where):
    agent, left, said = member

    def fails(event, now):
        raise error

    agent._controller.step = fails
    if where == "an action":
        agent.feed(api.Ticked())
    else:
        agent._unhandled({"message": "exception in callback", "exception": error})
    assert left == [str(error)] and not agent._stepping
    assert said == [events.NodeFenced(f"its agent failed: {error!r}")]


def test_what_the_loop_only_warns_of_is_noted_and_ends_nobody(member):
    agent, left, said = member
    agent._unhandled({"message": "socket.accept() out of system resource"})
    assert not left and said == [events.Note("socket.accept() out of system resource")]


@pytest.mark.parametrize(
    ("message", "part", "method"),
    [
        (local.StoreOffer("h:1"), "_workers", "store_offer"),
        (local.Failing(0, "no such token"), "_rehearsals", "failing"),
        (local.Moved(0, 3), "_rehearsals", "moved"),
        (local.Rehearsed(0, 1.0), "_rehearsals", "rehearsed"),
    ],
)  # fmt: skip
def test_what_a_process_says_reaches_the_part_whose_duty_it_is(member, message, part, method):
    agent, _, _ = member
    heard: list[object] = []
    process = Process(order=1, rank=3, rehearses=False, peer=stand_in(LocalPeer))
    slot = Slot(0, rank=3, process=process)
    setattr(agent, part, types.SimpleNamespace(**{method: lambda *arguments: heard.extend(arguments)}))
    agent._heard(slot, present(process.peer), message)
    assert heard[0] in (slot, process) and heard[-1] == message


def test_a_rank_that_gets_its_arena_late_hears_of_the_snapshots_before_it(member):
    """Its chain begins with the arena: what it was told before that is gone, and another rank's save waits."""
    agent, told = member[0], list[Any]()
    peer = cast(LocalPeer, types.SimpleNamespace(send=told.append))
    slot = Slot(0, rank=3, process=Process(order=1, rank=3, rehearses=False, peer=peer))
    agent._workers = Workers.__new__(Workers)
    agent._workers._slots, agent._workers.committed = [slot], -1
    agent._workers.announce((1, 2, 3), ())
    handed_over, profile = local.ArenaHandOver(3, 4096, 64, 8, True), local.RankReady(3, 4096, 64, "", (3,), b"")

    async def scenario():
        async def prepare(slot, peer, profile):
            await asyncio.sleep(0)
            peer.send(handed_over)

        agent._mirroring, agent._tasks = types.SimpleNamespace(prepare=prepare), Tasks()
        agent._workers.tell_imports = lambda slot, modules: None
        agent._heard(slot, peer, profile)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(scenario())
    snapshots = local.Committed(-1, (1, 2, 3), ())
    assert told == [snapshots, handed_over, snapshots]


def test_what_a_process_says_of_a_swap_is_kept_with_it(member):
    agent, _, _ = member
    peer = stand_in(LocalPeer)
    process = Process(order=1, rank=3, rehearses=False, peer=peer)
    slot = Slot(0, rank=3, process=process)
    for message in (local.Unwound(2), local.Unwound(1), local.Saving(1), local.Saving(0)):
        agent._heard(slot, peer, message)
    assert (process.unwound_for, process.saving_for, process.in_training) == (2, 1, False)
    agent.feed = lambda event: None
    agent._heard(slot, peer, local.WorkerRestored(3, 4))
    assert (process.unwound_for, process.in_training) == (4, True)


def test_the_ends_that_a_supervisor_or_a_standby_process_reports(member):
    agent, heard = member[0], list[object]()
    monitor = types.SimpleNamespace(
        ended=lambda *arguments: heard.append(arguments), standby_ended=lambda *arguments: heard.append(arguments)
    )
    agent._workers = cast(Workers, monitor)
    slot = Slot(0, rank=3, process=Process(order=4, rank=3, rehearses=False))
    for message in (local.WorkerExited(3, -9), local.WorkerExited(4, -9), local.StandbyExited(9)):
        agent._heard(slot, stand_in(LocalPeer), message)
    assert heard == [(slot, slot.process, -9), (slot, "exit code 9")]


def test_a_standby_process_that_can_fork_no_more_is_the_nodes_end(member):
    agent, given_up = member[0], list[str]()
    agent._workers = cast(Workers, types.SimpleNamespace(give_up=given_up.append))
    reason = "process 7 was killed and does not end (state D)"
    agent._heard(Slot(0, rank=3), stand_in(LocalPeer), local.CannotEnd(reason))
    assert given_up == [f"local rank 0 cannot get a new process: {reason}"]


def test_the_node_that_coordinates_says_again_and_again_that_the_job_has_not_ended(monkeypatch):
    monkeypatch.setattr(events, "ALIVE_S", 0.0)
    said: list[events.Event] = []
    agent = Agent.__new__(Agent)
    controller, monitor = types.SimpleNamespace(world=None, leads=True), types.SimpleNamespace(ending=False)
    agent._controller, agent._workers = cast(Controller, controller), cast(Workers, monitor)
    agent._reports = cast(Reports, types.SimpleNamespace(emit=said.append))

    async def says(world, leads, ending=False):
        controller.world, controller.leads, monitor.ending = world, leads, ending
        said.clear()
        for _ in range(8):
            await asyncio.sleep(0)
        return set(said)

    async def scenario():
        world = World(0, (0, 1, 2), (3,))
        task = asyncio.create_task(agent._say_alive())
        assert not await says(None, leads=True), "it has not met the others"
        assert not await says(world, leads=False), "the node before it does"
        assert await says(world, leads=True) == {events.Alive()}
        assert await says(world, leads=False, ending=True) == {events.Alive()}, (
            "its scripts are at work after the training"
        )
        task.cancel()

    asyncio.run(scenario())


@pytest.fixture
def ending():
    """(agent, its monitor, slot, what it says): its job has ended well; rank 3 is at work (its pid is ours)."""
    said: list[Any] = []
    slot = Slot(0, rank=3, supervisor=stand_in(LocalPeer), standby_pid=os.getpid())
    slot.process = Process(order=1, rank=3, rehearses=False, in_training=True, pid=os.getpid())
    agent = Agent.__new__(Agent)
    agent._node, agent._config = local_node(slots=[slot], node=1), Config().model_copy(update={"patience_s": 0.01 / 30})
    agent._reports = cast(Reports, types.SimpleNamespace(say=said.append))
    agent._workers = monitor = Workers(agent._node, said.append)
    monitor.ending = True
    return agent, monitor, slot, said


@pytest.mark.parametrize(("ended_by", "exit_code"), [(0, 0), (3, 3), (-9, 137)])
def test_a_script_may_work_on_after_training_as_long_as_it_likes(ending, ended_by, exit_code):
    agent, monitor, slot, said = ending

    async def scenario():
        task = asyncio.create_task(agent._last_work())
        while not said:  # the first of many time-outs
            await asyncio.sleep(0.01)
        done, _ = await asyncio.wait([task], timeout=0.1)
        assert not done
        monitor.ended(slot, slot.process, ended_by)
        slot.standby_ended = True
        monitor.changed.set()
        return await asyncio.wait_for(task, 30)

    assert asyncio.run(scenario()) == exit_code
    assert said == ["node 1: training is over; the script(s) of rank(s) 3 still run"]


def test_a_process_that_hangs_in_its_end_is_said_and_no_success(ending):
    """In a driver, say: nobody knows how it would have ended."""
    agent, _, slot, said = ending
    slot.process.pid = 0
    assert asyncio.run(asyncio.wait_for(agent._last_work(), 30)) == 1
    assert said == ["node 1: the process(es) of rank(s) 3 did not end and are killed"]


def test_a_spares_processes_that_are_killed_at_the_end_are_no_failure(ending):
    _, monitor, slot, _ = ending
    slot.rank, slot.process = -1, Process(order=2, rank=5, rehearses=True)
    monitor.ended(slot, slot.process, -9)
    assert monitor.late_exit_code == 0 and not monitor.unended


def test_a_thread_that_a_file_system_holds_does_not_hold_the_agent(monkeypatch):
    let_go = threading.Event()

    class Held:
        def __init__(self, *arguments):
            asyncio.get_running_loop().run_in_executor(None, let_go.wait)

        async def run(self):
            return 86

    async def reachable(*arguments):
        return "", ""

    monkeypatch.setattr(program, "reachable", reachable)
    monkeypatch.setattr(program, "Machine", lambda *arguments: None)
    monkeypatch.setattr(program, "Agent", Held)
    monkeypatch.setattr("deadpool_plugin.launch.job_files.secret_of", lambda *_: b"")
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "m"}
    for name, value in {**place, "MASTER_PORT": "5", "DEADPOOL_CONFIG": "", "DEADPOOL_JOB_TAG": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "_exit", sys.exit)
    timer = threading.Timer(20.0, let_go.set)
    timer.start()
    try:
        with pytest.raises(SystemExit) as ended:
            program.serve(socket.socket(socket.AF_UNIX).detach())
        assert ended.value.code == 86 and not let_go.is_set()
    finally:
        timer.cancel()
        let_go.set()
