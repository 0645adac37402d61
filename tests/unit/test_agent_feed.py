"""agent/process.py: an error in what the controller says is this node's end, and nobody else's; who says Alive."""

from __future__ import annotations

import asyncio
import types
from collections import deque

import pytest

from deadpool_plugin import events
from deadpool_plugin.agent.process import Agent
from deadpool_plugin.core import io
from deadpool_plugin.core.types import World


@pytest.mark.parametrize("error", [OSError("no more descriptors"), ValueError("a bug")])
def test_an_action_that_fails_ends_this_node_and_not_the_link_whose_message_asked_for_it(error, capsys):
    def fails(event, now):
        raise error

    agent, left = Agent.__new__(Agent), []
    agent._inputs, agent._stepping, agent._node = deque(), False, 3
    agent._controller = types.SimpleNamespace(step=fails)
    agent._reports = types.SimpleNamespace(say=lambda line: None)
    agent._leave = left.append
    agent.feed(io.Ticked())
    assert [action.reason for action in left] == [str(error)] and not agent._stepping


def test_the_node_that_coordinates_says_again_and_again_that_the_job_has_not_ended(monkeypatch):
    monkeypatch.setattr(events, "ALIVE_S", 0.0)
    said = []
    agent = Agent.__new__(Agent)
    agent._node, agent._lost_links = 1, set()
    agent._controller = types.SimpleNamespace(world=None)
    agent._lines = types.SimpleNamespace(roster=types.SimpleNamespace(missed=set()))
    agent._reports = types.SimpleNamespace(emit=said.append)

    async def says(**known):
        for name, value in known.items():
            owner = {"world": agent._controller, "missed": agent._lines.roster, "_lost_links": agent}[name]
            setattr(owner, name, value)
        said.clear()
        for _ in range(8):
            await asyncio.sleep(0)
        return set(said)

    async def scenario():
        task = asyncio.create_task(agent._say_alive())
        assert not await says(), "it has not met the others"
        assert not await says(world=World(0, (0, 1, 2), (3,))), "the node before it does"
        assert await says(missed={0}) == {"Alive"}, "which is silent"
        assert not await says(missed=set()), "and is heard again"
        assert await says(_lost_links={0}) == {"Alive"}
        assert await says(_lost_links=set(), world=World(1, (3, 1, 2), ())) == {"Alive"}
        task.cancel()

    asyncio.run(scenario())
