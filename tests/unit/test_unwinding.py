"""agent/unwinding.py: which processes are asked to leave what they are in, and what becomes of those that do not."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from support.stand_in import stand_in

from deadpool_plugin.agent.lives import Lives
from deadpool_plugin.agent.slots import Process, Slot
from deadpool_plugin.agent.unwinding import Unwinding
from deadpool_plugin.core import local
from deadpool_plugin.transport.unix import LocalPeer

PEER = stand_in(LocalPeer)


def serving(rank: int, in_training: bool = False, took_over: bool = False) -> Slot:
    process = Process(1, rank, rehearses=took_over, peer=PEER, in_training=in_training, took_over=took_over)
    return Slot(rank, rank=rank, process=process)


class Killed(list[int]):
    reason = ""

    def kill(self, slot, process, reason):
        if not process.ended:
            process.ended = True
            self.append(slot.rank)
            self.reason = reason


def test_who_trains_and_does_not_leave_its_call_is_killed_and_nobody_else():
    async def scenario():
        stuck, unwinds = serving(0, in_training=True), serving(1, in_training=True)
        begins, follows = serving(2), serving(3, took_over=True)
        killed = Killed()
        unwinding = Unwinding([stuck, unwinds, begins, follows], cast(Lives, killed), deadline_s=0.0, saving_s=0.0)
        unwinding.begin(5)
        unwinding.unwound(unwinds, local.Unwound(5))
        await asyncio.sleep(0.01)
        return killed

    assert asyncio.run(scenario()) == [0], "who follows past steps joins the newest generation when it is through"


@pytest.mark.parametrize("found_in_a_save_by, killed_after_s", [(5, 300.0), (4, 20.0)])
def test_who_says_that_it_is_in_a_save_has_longer_and_not_for_ever(found_in_a_save_by, killed_after_s, monkeypatch):
    async def scenario():
        saves, unwinds = serving(0, in_training=True), serving(1, in_training=True)
        killed, timers = Killed(), []
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda delay, *work: timers.append((delay, work)))
        unwinding = Unwinding([saves, unwinds], cast(Lives, killed), deadline_s=20.0, saving_s=300.0)
        unwinding.begin(5)
        for slot in (saves, unwinds):
            unwinding.saving(slot, local.Saving(found_in_a_save_by))
        unwinding.unwound(unwinds, local.Unwound(5))
        for delay, (function, *given) in sorted(timers):
            function(*given)
            if killed:
                return delay, killed

    after_s, killed = asyncio.run(scenario())
    assert (after_s, killed) == (killed_after_s, [0]) and f"after {killed_after_s:g} s" in killed.reason


def test_the_time_in_which_a_process_is_stopped_is_not_its_own():
    async def scenario():
        stopped, killed = serving(0, in_training=True), Killed()
        unwinding = Unwinding([stopped], cast(Lives, killed), deadline_s=0.01, saving_s=0.02)
        unwinding.begin(5)
        unwinding.pause()
        await asyncio.sleep(0.1)
        assert not killed
        unwinding.begin(5)
        await asyncio.sleep(0.1)
        return killed

    assert asyncio.run(scenario()) == [0]
