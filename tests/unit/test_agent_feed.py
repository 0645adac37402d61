"""agent/process.py: an error in what the controller says is this node's end, and nobody else's."""

from __future__ import annotations

import types
from collections import deque

import pytest

from deadpool_plugin.agent.process import Agent
from deadpool_plugin.core import io


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
