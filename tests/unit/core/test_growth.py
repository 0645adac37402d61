"""Costs of a loss for each node when the job grows, in function calls: nothing more for a member, and linearly more for
the coordinator. (Calls are counted, not seconds, so that the test says the same on every machine.)"""

from __future__ import annotations

import statistics
import sys
from collections import deque

import pytest

from deadpool_plugin.core import api
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.policy import Timing
from deadpool_plugin.core.types import Holding, NodeId, World

FEW, MANY = 16, 64


class Job:
    """Controllers whose messages all arrive in the order in which they were sent; `calls` each of them has made."""

    def __init__(self, nodes: int) -> None:
        self.world = World(0, tuple(range(nodes - 1)), (nodes - 1,))
        self.controllers = {node: Controller(node, Timing()) for node in self.world.members}
        self.calls = dict.fromkeys(self.controllers, 0)
        self.plans: set[NodeId] = set()
        self._queue: deque[tuple[NodeId, api.Input]] = deque()
        self.feed_all(api.WorldFormed(self.world))
        self.feed(0, api.StoreOffered("store"))
        for rank, home in enumerate(self.world.node_of):
            self.feed(home, api.WorkerReady(rank))
        for rank, home in enumerate(self.world.node_of):
            for holder in (home, self.world.active[(home + 1) % len(self.world.active)]):
                self.feed(holder, api.SnapshotHeld(Holding(rank, 0, True, (rank,)), 0))
            self.feed(home, api.StoreOffered(f"store {rank}"))
        assert {controller._ctx.committed for controller in self.controllers.values()} == {0}

    def feed_all(self, event: api.Input) -> None:
        for node in list(self.controllers):
            self._queue.append((node, event))
        self._deliver()

    def feed(self, node: NodeId, event: api.Input) -> None:
        self._queue.append((node, event))
        self._deliver()

    def _deliver(self) -> None:
        while self._queue:
            node, event = self._queue.popleft()
            if node in self.controllers:
                for action in self._counted(node, event):
                    if isinstance(action, api.Send):
                        self._queue.append((action.to, api.Received(node, action.message)))
                    elif isinstance(action, api.Reconfigure):
                        self.plans.add(node)

    def _counted(self, node: NodeId, event: api.Input) -> list[api.Action]:
        count = 0

        def one(frame: object, what: str, argument: object) -> None:
            nonlocal count
            count += what in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(one)
        try:
            return self.controllers[node].step(event, 0.0)
        finally:
            sys.setprofile(before)
            self.calls[node] += count

    def lose(self, node: NodeId) -> None:
        del self.controllers[node]
        self.calls = dict.fromkeys(self.controllers, 0)
        self.feed_all(api.LinkLost(node, "connection reset"))
        assert self.plans == self.controllers.keys()


@pytest.mark.parametrize("victim", [0, 5], ids=["coordinator", "member"])
def test_a_loss_costs_a_member_the_same_in_every_job_and_the_coordinator_linearly_more(victim):
    few, many = Job(FEW), Job(MANY)
    for job in (few, many):
        job.lose(victim)
    leader = 1 if victim == 0 else 0
    members = [statistics.median(calls for node, calls in job.calls.items() if node != leader) for job in (few, many)]
    assert members[1] <= 1.05 * members[0], members
    leaders = [job.calls[leader] for job in (few, many)]
    assert leaders[1] <= 1.1 * MANY / FEW * leaders[0], leaders
