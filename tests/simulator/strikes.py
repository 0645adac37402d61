"""When each fault of a simulated job strikes, and whom.

Rules of this file: a strike that finds nothing to strike has no effect and is not counted; network faults count once
they have held up or changed something, newcomers that mispair once they have. What is done to whoever is struck:
blows.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deadpool_plugin.core.placement import buddies_of

from .schedule import Fault

if TYPE_CHECKING:
    from .cluster import Cluster
    from .node import Node

PATIENCES, STEPS = 3, 3
"""After so many times the job's patience, or so many steps, a fault whose moment has not come strikes anyway."""
COUNTED_LATER = {"loss", "delay", "duplicate", "flip", "partition", "oneway", "part", "rift", "pair", "deaf", "mispair"}


@dataclass(eq=False)
class Armed:
    """A fault that waits for its moment, and how often that has come."""

    fault: Fault
    seen: int = 0


class Strikes:
    """The faults of one run."""

    def __init__(self, cluster: Cluster, faults: tuple[Fault, ...]) -> None:
        self._cluster = cluster
        self._waiting = list(faults)
        self.armed: list[Armed] = []
        self._under_way = 0
        self.struck: Counter[str] = Counter()

    # -- when --------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Every fault has struck and none lasts on."""
        return not (self._waiting or self.armed or self._under_way)

    @property
    def effects(self) -> Counter[str]:
        """Effective faults by kind."""
        found = Counter(self.struck)
        found.update(rule.kind for rule in self._cluster.blows.rules if rule.effects)
        return found

    def reached(self, step: int) -> None:
        """Some rank has made `step` steps."""
        for armed in [armed for armed in self.armed if armed.fault.at_step + STEPS <= step]:
            self._late(armed)
        for fault in [fault for fault in self._waiting if fault.at_step <= step]:
            self._waiting.remove(fault)
            if fault.moment:
                armed = Armed(fault)
                self.armed.append(armed)
                self._cluster.timeline.after(PATIENCES * self._cluster.timing.slow_after_s, self._late, armed)
            else:
                self._soon(fault, None)

    def _late(self, armed: Armed) -> None:
        if armed in self.armed:
            self.armed.remove(armed)
            self._soon(armed.fault, None)

    def moment(self, name: str, actor: Node) -> None:
        """`name` has just happened at `actor`."""
        for armed in [armed for armed in self.armed if armed.fault.moment == name]:
            armed.seen += 1
            if armed.seen >= armed.fault.nth:
                self.armed.remove(armed)
                self._soon(armed.fault, actor)

    def _soon(self, fault: Fault, actor: Node | None) -> None:
        self._under_way += 1
        if fault.delay_s:
            self._cluster.timeline.after(fault.delay_s, self._strike, fault, actor)
        else:
            self._strike(fault, actor)

    def _strike(self, fault: Fault, actor: Node | None) -> None:
        node = self._whom(fault, actor)
        if node is not None and self._cluster.blows.deal(fault, node):
            if fault.kind not in COUNTED_LATER:
                self.struck[fault.kind] += 1
            self._cluster.note(f"fault: {fault.kind} strikes node {node.number}")
        self._cluster.timeline.after(fault.seconds, self._ended)

    def _ended(self) -> None:
        self._under_way -= 1
        self._cluster.timeline.halted = self.over

    def _whom(self, fault: Fault, actor: Node | None) -> Node | None:
        """Choose the node that is struck; None if none is left of that kind."""
        cluster = self._cluster
        world = cluster.newest_world
        up = [node for node in cluster.nodes.values() if node.up and not node.paused]
        members = [node for node in up if node.number in world.members]
        active = [node for node in members if node.number in world.active]
        chosen = {
            "leader": members[:1],
            "active": active,
            "spare": [node for node in members if node.number in world.spares],
            "buddy": [n for n in members if n.number in buddies_of(world, world.active[0], cluster.policy.copies)],
            "actor": [actor] if actor is not None and actor.up else [],
        }.get(fault.who) or up
        return chosen[fault.pick % len(chosen)] if chosen else None

    # -- the end -----------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Faults stop: whoever stands still wakes, and everything passes."""
        self._waiting.clear()
        self.armed.clear()
        self._cluster.blows.stop()
        for node in self._cluster.nodes.values():
            node.wake()
