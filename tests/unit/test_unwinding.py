"""agent/unwinding.py: which processes are asked to leave what they are in, and what becomes of those that do not."""

from __future__ import annotations

import asyncio

from deadpool_plugin.agent.slots import Process, Slot
from deadpool_plugin.agent.unwinding import Unwinding
from deadpool_plugin.transport import local


def serving(rank: int, **state: bool) -> Slot:
    process = Process(1, rank, rehearses="took_over" in state, peer=object(), **state)
    return Slot(rank, rank=rank, process=process)


class Killed(list):
    def kill(self, slot, process, reason):
        self.append(slot.rank)


def test_who_trains_and_does_not_leave_its_call_is_killed_and_nobody_else():
    async def scenario():
        stuck, unwinds = serving(0, in_training=True), serving(1, in_training=True)
        begins, follows = serving(2), serving(3, took_over=True)
        killed = Killed()
        unwinding = Unwinding([stuck, unwinds, begins, follows], killed, deadline_s=0.0)
        unwinding.begin(5)
        unwinding.unwound(unwinds, None, local.Unwound(1, 5))
        await asyncio.sleep(0.01)
        return killed

    assert asyncio.run(scenario()) == [0], "who follows past steps joins the newest generation when it is through"
