"""One simulated job: nodes, network, stores, and whoever watches them.

Rules of this file: it owns the seed's generator, from which everything random is drawn in the order of events; it
decides nothing about the protocol.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from deadpool_plugin.agent.world import policy_of, timing_of
from deadpool_plugin.config import Config
from deadpool_plugin.core import api, events
from deadpool_plugin.core.types import Generation, NodeId, Rank, SwapPlan, World

from .arrivals import Arrivals
from .blows import Blows
from .checkers import Checkers
from .clock import Timeline
from .coverage import Coverage
from .groups import Group
from .machine import Witness
from .network import Network
from .node import Node
from .rules import Rules
from .schedule import Scenario
from .strikes import Strikes
from .training import Reference, reference
from .transcript import Transcript
from .worker import Process

NOWHERE = Path("/nowhere")
HOSTS_MAX = 400
START_S = 300.0
"""Less time to start than the configuration's default."""
COMMAND_S = 25.0
"""How long `spare_command` may run, and its host may take then."""
LONG_PASTS = 0.002
LONG_PAST = 1.5
"""Rehearsals longer than `start_timeout_s`: their share (LONG_PASTS), and by which factor they are longer."""
LONG_CALLS = 0.005
"""Share of interrupted processes that are in something long, such as a save; some are in it for too long."""


def config_of(scenario: Scenario, stall_timeout_s: float | Literal["auto"]) -> Config:
    """The configuration of the job, as its user would write it."""
    return Config(
        spares=scenario.spares,
        racks={rack: [str(n) for n in range(HOSTS_MAX) if scenario.rack_of(n) == rack] for rack in scenario.rack_names},
        copies=scenario.copies,
        restarts_max=scenario.restarts_max,
        restarts_window_s=scenario.restarts_window_s,
        on_no_spare="wait" if scenario.wait_for_hosts else "stop",
        witness=NOWHERE / "witness" if scenario.witness else None,
        spare_command=["bring", "{output_dir}"] if scenario.command else None,
        spare_command_limit_s=COMMAND_S,
        start_timeout_s=START_S,
        stall_timeout_s=stall_timeout_s,
        output_dir=NOWHERE,
        mirror_every=scenario.mirror_every or "auto",
    )


class Cluster:
    """`scenario` at work. `raised`: a script has failed, or a person has ended the job."""

    excuses: tuple[str, ...] = ()
    """Words of verdicts that a test brings about by what the oracle knows nothing of."""
    stall_timeout_s: float | Literal["auto"] = "auto"

    def __init__(self, scenario: Scenario, transcript: Transcript | None = None) -> None:
        self.scenario, self.transcript = scenario, transcript
        self.rng = random.Random(f"run {scenario.seed}")
        self.timeline = Timeline()
        self.config = config_of(scenario, self.stall_timeout_s)
        self.timing, self.policy = timing_of(self.config), policy_of(self.config)
        self.witness = Witness()
        self.broken: BaseException | None = None
        self.world = scenario.world
        self.ranks, self.last_step = scenario.ranks, scenario.steps
        self.shard_of = tuple(rank % scenario.shards for rank in range(self.ranks))
        self.replicas: dict[Rank, tuple[Rank, ...]] = {
            rank: tuple(other for other, shard in enumerate(self.shard_of) if shard == self.shard_of[rank])
            for rank in range(self.ranks)
        }
        self.network = Network(self.timeline, Rules(self.rng), self.rng, scenario.latency_s)
        self.plans: dict[Generation, SwapPlan] = {}
        self.events: Counter[str] = Counter()
        self.checkers = Checkers(self)
        self.coverage = Coverage()
        self.raised = self._has_begun = False
        self._groups: dict[tuple[Generation, str], Group] = {}
        self._hosts_of_stores: dict[str, Process] = {}
        self.nodes: dict[NodeId, Node] = {}
        self._up: set[NodeId] = set()
        for number in sorted(self.world.members):
            self.add_node(number)
        for node in self.nodes.values():
            self.timeline.after(self.rng.random() * self.timing.heartbeat_interval_s, node.begin)
        self.arrivals = Arrivals(self)
        self.blows = Blows(self)
        self.strikes = Strikes(self, scenario.faults)
        if scenario.early:
            self._begin()

    def _begin(self) -> None:
        """From now on faults strike."""
        self._has_begun = True
        self.strikes.reached(0)

    def add_node(self, number: NodeId) -> Node:
        """A host that is no member and knows nobody."""
        self._up.add(number)
        drift = self.scenario.drift * (2 * self.rng.random() - 1)
        self.nodes[number] = Node(self, number, drift, offset_s=1000.0 * self.rng.random())
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

    @property
    def witnessed(self) -> dict[Generation, SwapPlan]:
        return self.witness.kept

    # -- how long things take ------------------------------------------------------------------------------------

    def compute_s(self) -> float:
        return self.scenario.compute_s * (0.5 + self.rng.random())

    def copy_s(self) -> float:
        return 0.3 * self.scenario.compute_s * self.rng.random()

    def transfer_s(self, source: NodeId, target: NodeId) -> float:
        slower = max(
            [1.0, *(thin.slower for thin in self.blows.thin if thin.concerns(source, target, self.timeline.now))]
        )
        return slower * self.scenario.transfer * self.scenario.compute_s * self.rng.random()

    def saves(self, rank: Rank, step: int) -> bool:
        """Return whether the script of `rank` saves after `step`."""
        every = self.scenario.save_every
        return bool(every) and step % every == 0 and (self.scenario.all_save or rank == 0)

    def start_s(self) -> float:
        return self.rng.random()

    def rehearse_s(self) -> float:
        drawn = self.rng.random()
        return LONG_PAST * self.timing.start_timeout_s if drawn < LONG_PASTS else 3.0 * drawn

    def local_s(self) -> float:
        return 0.002 * self.rng.random()

    def unwind_s(self, node: Node) -> float:
        drawn = self.rng.random()
        if drawn >= LONG_CALLS:
            return 0.1 * drawn
        self.blows.blamed.add(node.number)  # whose process may be killed for it
        return 1.5 * self.timing.phase_timeout_s * self.rng.random()

    def end_s(self) -> float:
        return 0.5 * self.rng.random()

    # -- what happens ------------------------------------------------------------------------------------------

    def copies(self, source: NodeId, target: NodeId) -> int:
        """How often a message is heard: more often than TCP allows, and as often as core must bear."""
        rules = [rule for rule in self.blows.duplicates if self.timeline.now < rule.until]
        return max([rule.judge(source, target, self.rng).copies for rule in rules], default=1)

    def broke(self, error: BaseException) -> None:
        """A rule is broken, or an agent is: the run ends."""
        self.broken = self.broken or error
        self.timeline.halted = True

    def gone(self, node: Node) -> None:
        """`node` has left the job: nothing of its memory can be had any more."""
        self.checkers.node_gone(node.number)

    def stopped(self, node: Node) -> None:
        """Nothing runs on `node` any more."""
        self._up.discard(node.number)
        self.timeline.halted = self.timeline.halted or self.is_over

    @property
    def nobody_watches(self) -> bool:
        """Return whether an input that nothing is done about need not be told (`stepped`)."""
        return self._has_begun and self.transcript is None and not self.strikes.armed

    def stepped(self, node: Node, event: api.Input, actions: Sequence[api.Action]) -> None:
        """`node`'s controller has taken in `event` and answers `actions`, none of which is carried out yet."""
        if self.transcript is not None:
            self.transcript.stepped(self.timeline.now, node.number, event, actions)
        if not self._has_begun and isinstance(event, api.WorldFormed):
            self._begin()
        if actions:
            self.checkers.stepped(node, event, actions)
        if self.strikes.armed:
            self.strikes.moment(f"Got {type(event).__name__}", node)

    def acted(self, node: Node, action: api.Action) -> None:
        """`node` has carried out `action`."""
        if isinstance(action, api.Send):
            self.strikes.moment(f"Send {type(action.message).__name__}", node)
        elif isinstance(action, api.Emit):
            self.strikes.moment(f"Emit {type(action.event).__name__}", node)
        else:
            self.strikes.moment(type(action).__name__, node)

    def said(self, node: Node, action: api.Emit) -> None:
        self.events[type(action.event).__name__] += 1
        self.checkers.said(node, action)
        if isinstance(action.event, events.WaitingForHost) and not self.scenario.command:
            self.timeline.after(5 * self.rng.random(), self.arrivals.add_host)

    def note(self, text: str) -> None:
        if self.transcript is not None:
            self.transcript.note(self.timeline.now, text)
