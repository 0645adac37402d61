"""agent/workers.py: which processes are asked to leave what they are in, and the end of those that do not."""

from __future__ import annotations

import asyncio

import pytest
from support import present
from support.hosts import local_node
from support.stand_in import stand_in

from deadpool_plugin.agent.node import Process, Slot
from deadpool_plugin.agent.workers import Workers
from deadpool_plugin.transport.unix import LocalPeer

PEER = stand_in(LocalPeer)


def serving(rank: int, in_training: bool = False, took_over: bool = False) -> Slot:
    process = Process(1, rank, rehearses=took_over, peer=PEER, in_training=in_training, took_over=took_over)
    return Slot(rank, rank=rank, process=process)


class Monitor(Workers):
    """`killed`: the ranks whose processes it was to kill; `reason`: the last one's."""

    def __init__(self, *slots: Slot, patience_s: float) -> None:
        super().__init__(local_node(slots=slots, patience_s=patience_s), lambda slot: None)
        self.killed: list[int] = []
        self.reason = ""

    def kill(self, slot: Slot, process: Process, reason: str, exit_code: int = 0) -> None:
        if not process.ended:
            process.ended = True
            self.killed.append(slot.rank)
            self.reason = reason


def unwinds(slot: Slot, generation: int) -> None:
    present(slot.process).unwound_for = generation


def test_who_trains_and_does_not_leave_its_call_is_killed_and_nobody_else():
    async def scenario():
        stuck, leaves = serving(0, in_training=True), serving(1, in_training=True)
        begins, follows = serving(2), serving(3, took_over=True)
        monitor = Monitor(stuck, leaves, begins, follows, patience_s=0.0)
        monitor.await_unwinding(5)
        unwinds(leaves, 5)
        await asyncio.sleep(0.01)
        return monitor.killed

    assert asyncio.run(scenario()) == [0], "who follows past steps joins the newest generation when it is through"


@pytest.mark.parametrize("found_in_a_save_by, killed_after_s", [(5, 300.0), (4, 20.0)])
def test_who_says_that_it_is_in_a_save_has_longer_and_not_for_ever(found_in_a_save_by, killed_after_s, monkeypatch):
    async def scenario():
        saves, leaves, timers = serving(0, in_training=True), serving(1, in_training=True), []
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda delay, *work: timers.append((delay, work)))
        monitor = Monitor(saves, leaves, patience_s=10.0)
        monitor.await_unwinding(5)
        for slot in (saves, leaves):
            present(slot.process).saving_for = found_in_a_save_by
        unwinds(leaves, 5)
        for delay, (function, *given) in sorted(timers):
            function(*given)
            if monitor.killed:
                return delay, monitor

    after_s, monitor = asyncio.run(scenario())
    assert (after_s, monitor.killed) == (killed_after_s, [0]) and f"after {killed_after_s:g} s" in monitor.reason


def test_the_time_in_which_a_process_is_stopped_is_not_its_own():
    async def scenario():
        monitor = Monitor(serving(0, in_training=True), patience_s=0.005)
        monitor.await_unwinding(5)
        monitor.pause()
        await asyncio.sleep(0.1)
        assert not monitor.killed
        monitor.await_unwinding(5)
        await asyncio.sleep(0.1)
        return monitor.killed

    assert asyncio.run(scenario()) == [0]
