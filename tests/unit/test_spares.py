"""agent/spares.py: where a rehearsal's recording comes from, and how long it is asked for."""

from __future__ import annotations

import asyncio

from deadpool_plugin.agent.slots import Slot
from deadpool_plugin.agent.spares import Spares
from deadpool_plugin.errors import DeadpoolError
from deadpool_plugin.mirror.wire import RefusedByPeer


class Anything:
    """Whatever the part under test has and does not use here."""

    def __getattr__(self, name):
        return lambda *arguments, **fields: None


def asked(error: DeadpoolError, patience_s: float, succeeds_at: int) -> tuple[int, bool]:
    """How often a recording was asked for that cannot be had for `error` before, and whether that was the end of it."""

    async def scenario():
        workers, peers, failed = Anything(), Anything(), []
        workers.handlers, peers.patience_s = {}, patience_s
        spares = Spares(2, workers, Anything(), peers, Anything(), 1000, lambda event: None)
        attempts = 0

        async def begin(slot, rank, source):
            nonlocal attempts
            attempts += 1
            if attempts < succeeds_at:
                raise error

        spares.begin, spares._fail = begin, lambda *arguments: failed.append(arguments)
        await spares._start(Slot(0), 0, 1)
        return attempts, bool(failed)

    return asyncio.run(asyncio.wait_for(scenario(), timeout=30))


def test_who_runs_the_rank_since_a_moment_is_asked_again(monkeypatch):
    monkeypatch.setattr("deadpool_plugin.agent.spares._RETRY_S", 0.0)
    assert asked(RefusedByPeer("no recording"), 60.0, succeeds_at=9) == (9, False)
    assert asked(RefusedByPeer("no recording"), 0.0, succeeds_at=9) == (1, True)
    assert asked(DeadpoolError("no process"), 60.0, succeeds_at=9) == (1, True)
