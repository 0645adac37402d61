"""Controllers of all nodes of a job, wired to each other."""

from __future__ import annotations

from collections import deque

from deadpool_plugin.core import api
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.policy import Policy, Timing
from deadpool_plugin.core.types import NodeId, World


class Wired:
    """Messages arrive in the order in which they were sent; `actions` has all that anybody was told to do."""

    def __init__(self, world: World, policy: Policy = Policy()) -> None:
        self.controllers = {node: Controller(node, Timing(), policy) for node in world.members}
        self.actions, self.now = list[tuple[NodeId, api.Action]](), 0.0
        self._queue: deque[tuple[NodeId, api.Input]] = deque()

    def feed(self, node: NodeId, event: api.Input) -> None:
        self._queue.append((node, event))
        while self._queue:
            to, what = self._queue.popleft()
            if to not in self.controllers:
                continue
            for action in self.controllers[to].step(what, self.now):
                self.actions.append((to, action))
                if isinstance(action, api.Send):
                    self._queue.append((action.to, api.Received(to, action.message)))

    def lose(self, lost: NodeId) -> None:
        del self.controllers[lost]
        for node in tuple(self.controllers):
            self.feed(node, api.LinkLost(lost, "connection reset"))
