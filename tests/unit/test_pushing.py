"""agent/pushing.py: a push that fails is tried again, and what stays impossible is said, more than once."""

from __future__ import annotations

import asyncio

from deadpool_plugin.agent.profile import Profile
from deadpool_plugin.agent.pushing import Pushes
from deadpool_plugin.core import io
from deadpool_plugin.core.types import World
from deadpool_plugin.mirror.store import SnapshotStore

PROFILE = Profile(header_bytes=0, payload_bytes=0, layout_hash="", replicas=(), recording=b"")


class Unreachable:
    """The buddy as this node sees it."""

    def __init__(self, heals: asyncio.Event) -> None:
        self.heals, self.done = heals, asyncio.Event()

    def to(self, node):
        return self

    def push(self, *arguments):
        on_done = arguments[-1]
        if self.heals.is_set():
            on_done(True, "")
            self.done.set()
        else:
            on_done(False, "no route")


def test_a_buddy_that_only_this_node_cannot_reach_is_tried_until_it_can_be_reached_again():
    async def scenario():
        heard: list[io.Input] = []
        heals = asyncio.Event()

        def feed(event: io.Input) -> None:
            heard.append(event)
            if len(heard) == 2:  # nobody has acted on the first word: the others hear that node
                heals.set()

        peers = Unreachable(heals)
        pushes = Pushes(0, 1, SnapshotStore(), peers, 0.05, feed)
        pushes.enter(World(0, (0, 1), ()))
        pushes.snapshot(0, 3, 0, PROFILE, b"")
        await asyncio.wait_for(peers.done.wait(), timeout=30)
        return heard

    heard = asyncio.run(scenario())
    assert [(event.node, event.silent) for event in heard] == [(1, True)] * 2
