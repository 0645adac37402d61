"""agent/peers.py: what is asked of another node in vain is said, so that the controllers can judge."""

from __future__ import annotations

import asyncio

import pytest

from deadpool_plugin.agent.peers import Peers
from deadpool_plugin.core import io
from deadpool_plugin.errors import TransportError
from deadpool_plugin.mirror.store import SnapshotStore
from deadpool_plugin.mirror.wire import RefusedByPeer
from deadpool_plugin.transport.handshake import Credentials


def asked(error: TransportError, *nodes: int) -> list[io.Input]:
    """Return what was said after node 0 had asked `nodes` and met `error` each time."""

    async def scenario():
        said: list[io.Input] = []
        peers = Peers(0, Credentials(b"secret"), SnapshotStore(), 0.3, said.append)

        def fails():
            raise error

        with pytest.raises(TransportError):
            await peers.ask(fails, *nodes)
        await peers.close()
        return said

    return asyncio.run(asyncio.wait_for(scenario(), timeout=30))


def test_who_cannot_be_asked_for_the_patience_is_not_heard():
    said = asked(TransportError("no route to host"), 2, 0, 2)
    (lost,) = said  # and nothing of this node itself
    assert isinstance(lost, io.LinkLost) and (lost.node, lost.silent) == (2, True)
    assert "no route to host" in lost.reason


def test_who_answers_no_is_heard():
    assert asked(RefusedByPeer("not held"), 2) == []


def test_the_patience_begins_with_the_first_failure(monkeypatch):
    """A transfer that breaks off after it has gone on for long is tried again."""
    clock = [0.0]
    monkeypatch.setattr("deadpool_plugin.agent.peers.loop_time", lambda: clock[0])

    async def scenario():
        peers = Peers(0, Credentials(b"secret"), SnapshotStore(), 10.0, lambda event: None)

        def breaks_off_late():
            clock[0] += 90.0
            if clock[0] == 90.0:
                raise TransportError("the connection broke")
            return "whole"

        whole = await peers.ask(breaks_off_late, 2)
        await peers.close()
        return whole

    assert asyncio.run(asyncio.wait_for(scenario(), timeout=30)) == "whole"
