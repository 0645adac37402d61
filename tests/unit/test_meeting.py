"""agent/meeting.py: how long hosts wait for each other at the start."""

from __future__ import annotations

import asyncio

import pytest

from deadpool_plugin.agent import meeting
from deadpool_plugin.agent.meeting import Lines
from deadpool_plugin.agent.world import Place
from deadpool_plugin.config import Config


class Met(Exception):
    pass


@pytest.mark.parametrize(("patience_s", "waits_s"), [(1.0, 300.0), (20.0, 600.0)])
def test_little_patience_with_a_lost_host_is_not_little_with_one_that_starts(monkeypatch, patience_s, waits_s):
    async def meet(*arguments):
        raise Met(arguments[-1])

    monkeypatch.setattr(meeting, "meet", meet)
    lines = Lines.__new__(Lines)
    lines._node, lines._place, lines._config = 1, Place(1, 2, 1, "m", 5), Config(patience_s=patience_s)
    lines._credentials = None
    with pytest.raises(Met) as met:
        asyncio.run(lines.meet(None))
    assert met.value.args == (waits_s,)
