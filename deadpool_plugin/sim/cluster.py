"""One simulated job: nodes, network, stores, and whoever watches them.

Rules of this file: it owns the seed's generator, from which everything random is drawn in the order of events; it
decides nothing about the protocol.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from ..core import io
from ..core.messages import AnyMessage
from ..core.policy import Policy
from ..core.timing import Timing
from ..core.types import Generation, NodeId, Rank, SwapPlan, World
from .arrivals import Arrivals
from .blows import Blows
from .checkers import Checkers
from .clock import Timeline
from .coverage import Coverage
from .groups import Group
from .network import Network
from .node import Node
from .rules import Rules
from .schedule import Scenario
from .strikes import Strikes
from .training import Reference, reference
from .transcript import Transcript
from .worker import Process

TIMING = Timing(
    heartbeat_interval_s=0.5, silent_after_s=10.0, phase_timeout_s=20.0, decision_timeout_s=300.0,
    start_timeout_s=300.0, stall_timeout_s=120.0,
)  # fmt: skip
"""Times that follow from the configuration's default patience, but less time to start and to stall."""
LONG_PASTS = 0.002
LONG_PAST = 1.5
"""Rehearsals longer than `start_timeout_s`: their share (LONG_PASTS), and by which factor they are longer."""
LONG_CALLS = 0.005
"""Share of interrupted processes that are in something long, such as a save; some are in it for too long."""


class Cluster:
    """`scenario` at work. `raised`: a script has failed, or a person has ended the job."""

    def __init__(self, scenario: Scenario, transcript: Transcript | None = None) -> None:
        self.scenario, self.transcript = scenario, transcript
        self.rng = random.Random(f"run {scenario.seed}")
        self.timeline = Timeline()
        self.timing = TIMING
        self.policy = Policy(
            scenario.copies,
            scenario.restarts_max,
            scenario.wait_for_hosts,
            scenario.witness,
            scenario.restarts_window_s,
        )
        self.witnessed: dict[Generation, SwapPlan] = {}
        self.world = scenario.world
        self.ranks, self.last_step = scenario.ranks, scenario.steps
        self.shard_of = tuple(rank % scenario.shards for rank in range(self.ranks))
        self.replicas: dict[Rank, tuple[Rank, ...]] = {
            rank: tuple(other for other, shard in enumerate(self.shard_of) if shard == self.shard_of[rank])
            for rank in range(self.ranks)
        }
        rules = Rules(self.rng)
        self.network = Network(self.timeline, rules, self.rng, scenario.latency_s, self.timing.silent_after_s)
        self.network.deliver = self._deliver
        self.network.lost = self._lost
        self.plans: dict[Generation, SwapPlan] = {}
        self.events: Counter[str] = Counter()
        self.checkers = Checkers(self)
        self.coverage = Coverage()
        self.raised = False
        self._groups: dict[tuple[Generation, str], Group] = {}
        self._hosts_of_stores: dict[str, Process] = {}
        self.nodes: dict[NodeId, Node] = {}
        self._up: set[NodeId] = set()
        for number in sorted(self.world.members):
            self.add_node(number)
        for a in self.nodes:
            for b in self.nodes:
                if a < b:
                    self.network.link(a, b)
        for node in self.nodes.values():
            self.timeline.after(self.rng.random() * TIMING.heartbeat_interval_s, node.do, node.enter, self.world)
        self.arrivals = Arrivals(self)
        self.blows = Blows(self)
        self.strikes = Strikes(self, scenario.faults)
        self.strikes.reached(0)

    def add_node(self, number: NodeId) -> Node:
        """A host that is no member and knows nobody."""
        self._up.add(number)
        drift = self.scenario.drift * (2 * self.rng.random() - 1)
        self.nodes[number] = Node(self, number, self.scenario.slots, drift, offset_s=1000.0 * self.rng.random())
        return self.nodes[number]

    @property
    def newest_world(self) -> World:
        return self.plans[max(self.plans)].world if self.plans else self.world

    @property
    def is_over(self) -> bool:
        return not self._up

    # -- groups and stores ---------------------------------------------------------------------------------------

    def group(self, generation: Generation, store: str) -> Group:
        key = (generation, store)
        if key not in self._groups:
            self._groups[key] = Group(self, generation, store)
        return self._groups[key]

    def reset_training(self, a: NodeId, b: NodeId) -> bool:
        """The connections of the newest generation's group between two hosts are gone; False if there are none."""
        return bool(self._groups) and self._groups[max(self._groups)].reset(a, b)

    def new_store(self, process: Process) -> str:
        address = f"node{process.node.number}:{len(self._hosts_of_stores) + 1}"
        self._hosts_of_stores[address] = process
        return address

    def store_is_dead(self, address: str) -> bool:
        return not self._hosts_of_stores[address].alive

    @property
    def reference(self) -> Reference:
        return reference(self.shard_of)

    def claim(self, node: Node, plan: SwapPlan) -> None:
        """The witness keeps the first plan of each generation, whatever becomes of who asks."""
        self.witnessed.setdefault(plan.world.generation, plan)
        self.look(node, plan.world.generation)

    def look(self, node: Node, generation: Generation) -> None:
        if generation in self.witnessed:
            kept = self.witnessed[generation]
            self.timeline.after(self.network.latency(), node.do, node.feed, io.Claimed(kept))

    # -- how long things take ------------------------------------------------------------------------------------

    def compute_s(self) -> float:
        return self.scenario.compute_s * (0.5 + self.rng.random())

    def copy_s(self) -> float:
        return 0.3 * self.scenario.compute_s * self.rng.random()

    def transfer_s(self) -> float:
        return 0.5 * self.scenario.compute_s * self.rng.random()

    def start_s(self) -> float:
        return self.rng.random()

    def rehearse_s(self) -> float:
        drawn = self.rng.random()
        return LONG_PAST * self.timing.start_timeout_s if drawn < LONG_PASTS else 3.0 * drawn

    def local_s(self) -> float:
        return 0.002 * self.rng.random()

    def unwind_s(self) -> float:
        drawn = self.rng.random()
        return 1.5 * self.timing.phase_timeout_s * self.rng.random() if drawn < LONG_CALLS else 0.1 * drawn

    def end_s(self) -> float:
        return 0.5 * self.rng.random()

    def flips_a_bit(self, source: NodeId, target: NodeId) -> bool:
        return bool(self.blows.flips) and self.blows.flips_a_bit(source, target)

    # -- what happens ------------------------------------------------------------------------------------------

    def _deliver(self, target: NodeId, source: NodeId, message: AnyMessage) -> None:
        if self.flips_a_bit(source, target):
            self.network.break_link(source, target, "a frame failed its checksum")
        else:
            node = self.nodes[target]
            node.do(node.received, source, message)

    def _lost(self, target: NodeId, source: NodeId, reason: str) -> None:
        node = self.nodes[target]
        node.do(node.link_lost, source, reason)

    def gone(self, node: Node) -> None:
        """Nothing runs on `node` any more, and nothing is in its memory."""
        self._up.discard(node.number)
        self.timeline.halted = self.timeline.halted or self.is_over
        self.checkers.node_gone(node.number)

    def stepped(self, node: Node, event: io.Input, actions: Sequence[io.Action]) -> None:
        """`node`'s controller has taken in `event` and answers `actions`, none of which is carried out yet."""
        if self.transcript is not None:
            self.transcript.stepped(self.timeline.now, node.number, event, actions)
        if actions:
            self.checkers.stepped(node, event, actions)
        if self.strikes.listens:
            self.strikes.moment(f"Got {type(event).__name__}", node)

    def acted(self, node: Node, action: io.Action) -> None:
        """`node` has carried out `action`."""
        if isinstance(action, io.Send):
            self.strikes.moment(f"Send {type(action.message).__name__}", node)
        elif isinstance(action, io.Emit):
            self.strikes.moment(f"Emit {action.kind}", node)
        else:
            self.strikes.moment(type(action).__name__, node)

    def said(self, node: Node, action: io.Emit) -> None:
        self.events[action.kind] += 1
        self.checkers.said(node, action)
        if action.kind == "WaitingForHost":
            self.timeline.after(5 * self.rng.random(), self.arrivals.add_host)

    def note(self, text: str) -> None:
        if self.transcript is not None:
            self.transcript.note(self.timeline.now, text)
