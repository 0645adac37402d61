"""Effects of each kind of fault on a simulated job.

Rules of this file: `blamed` is every node something was done to or between which links were: the only ones that may be
counted as lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deadpool_plugin.core import api
from deadpool_plugin.core.types import NodeId, Rank

from .groups import ODD, Group, Odd
from .rules import Cut, Delay, Duplicate, Loss, Rule
from .schedule import Fault

if TYPE_CHECKING:
    from .cluster import Cluster
    from .node import Node
    from .worker import Process

PATIENT = 0.8
"""For this share of `slow_after_s` a host may stand still, its kernel answering, and is not to be lost."""
BEARABLE = 0.3
"""Of this share of lost segments nobody is to be lost."""
PARTS = 3
"""One of so many of the others hear a host that is cut off in part."""


@dataclass(eq=False)
class Mispairing:
    """The newcomers that are to issue what their peers do not: so many of one `rank`, one after the other."""

    odd: Odd
    left: int
    rank: Rank = -1


@dataclass(eq=False)
class Curse:
    """Errors that processes of `node` (-1: any) that run `rank` (-1: any) are to raise, so many. `of_host`: its host's,
    as the processes can tell."""

    node: NodeId
    rank: Rank
    left: int
    of_host: bool


@dataclass(frozen=True)
class Thin:
    """Snapshots from and to `node` take `slower` times as long until `until`."""

    node: NodeId
    until: float
    slower: float

    def concerns(self, source: NodeId, target: NodeId, now: float) -> bool:
        return now < self.until and self.node in (source, target)


class Flip(Loss):
    """A changed byte: what was sent is refused by its checksum."""


class Blows:
    """How every kind of fault is done. `rules`: those of the network that were made for it, over or not; `duplicates`
    among them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.rules: list[Rule] = []
        self.duplicates: list[Rule] = []
        self.blamed: set[NodeId] = set()
        self._blamed_all_until = 0.0
        self._mispairing: list[Mispairing] = []
        self.mispaired: Counter[Rank] = Counter()
        """How many processes of each rank have issued what their peers had not."""
        self._curses: list[Curse] = []
        self.raises: Counter[Rank] = Counter()
        """How often each rank's script has raised an error that may be its own."""
        self.thin: list[Thin] = []
        self._kinds: dict[str, Callable[[Fault, Node], bool]] = {
            "crash": lambda fault, node: self.crash(node),
            "kill": lambda fault, node: self.kill(node),
            "rack": self._rack,
            "process": lambda fault, node: self._process(fault, node, -9),
            "error": lambda fault, node: self._process(fault, node, 1),
            "poison": lambda fault, node: self._curse(node, Curse(node.number, -1, fault.count, True)),
            "cursed": lambda fault, node: self._curse(
                node, Curse(node.number, self._some_rank(fault, node), fault.count, False)
            ),
            "broken": lambda fault, node: self._curse(
                node, Curse(-1, self._some_rank(fault, node), fault.count, False)
            ),
            "storm": self._storm,
            "stuck": self._stuck,
            "hang": self._hang,
            "skip": self._hang,
            "script": self._hang,
            "slow": self._slow,
            "give_up": lambda fault, node: self._give_up(node),
            "pause": self._pause,
            "load": self._load,
            "disk": self._disk,
            "partition": self._partition,
            "oneway": self._partition,
            "part": self._partition,
            "rift": self._rift,
            "pair": self._rift,
            "deaf": self._rift,
            "reset": self._reset,
            "break": self._break,
            "loss": self._lossy,
            "delay": self._lossy,
            "duplicate": self._lossy,
            "thin": self._thin,
            "flip": self._flip,
            "corrupt": self._corrupt,
            "mispair": self._mispair,
            "stop": lambda fault, node: self._stop(node),
            "join": lambda fault, node: self._cluster.arrivals.add_host(),
        }

    def deal(self, fault: Fault, node: Node) -> bool:
        """Strike `node`; False if there was nothing to strike."""
        return self._kinds[fault.kind](fault, node)

    def stop(self) -> None:
        """Everything passes, but where there is a rift; newcomers that are to mispair still do."""
        self._blamed_all_until = 0.0
        self.thin.clear()
        self._cluster.network.flips.clear()
        self._cluster.network.rules.clear()

    # -- hosts -------------------------------------------------------------------------------------------------

    def crash(self, node: Node) -> bool:
        self.blamed.add(node.number)
        node.die()
        self._cluster.network.vanish(node.number)
        return True

    def kill(self, node: Node) -> bool:
        self.blamed.add(node.number)
        node.die()
        self._cluster.network.kill(node.number)
        return True

    def _rack(self, fault: Fault, node: Node) -> bool:
        self.crash(node)
        up = [other for other in self._cluster.nodes.values() if other.up]
        scenario = self._cluster.scenario
        together = [other for other in up if scenario.rack_of(other.number) == scenario.rack_of(node.number)]
        for other in together if scenario.racks else up[: fault.count - 1]:
            self.crash(other)
        return True

    def _give_up(self, node: Node) -> bool:
        self.blamed.add(node.number)
        node.loop.call_soon(node.feed, api.NodeGivenUp("its launcher ended it"))
        return True

    def _stop(self, node: Node) -> bool:
        self._cluster.raised = True
        if node.controller.world is None:  # it knows nobody whom it could tell
            self.blamed.add(node.number)
        node.loop.call_soon(node.feed, api.StopRequested("a person ended it", 130))
        return True

    def _pause(self, fault: Fault, node: Node) -> bool:
        if fault.seconds >= PATIENT * self._cluster.timing.slow_after_s:
            self.blamed.add(node.number)
        node.pause()
        self._cluster.timeline.after(fault.seconds, node.wake)
        return True

    def _load(self, fault: Fault, node: Node) -> bool:
        """Its kernel answers all the time, and nobody is to be lost for it."""
        cluster = self._cluster
        until = cluster.timeline.now + fault.seconds

        def stand_still() -> None:
            node.pause()
            cluster.timeline.after(1.5 * cluster.timing.silent_after_s * cluster.rng.random(), go_on)

        def go_on() -> None:
            node.wake()
            if cluster.timeline.now < until and node.up:
                cluster.timeline.after(0.5 * cluster.timing.silent_after_s * cluster.rng.random(), stand_still)

        stand_still()
        return True

    def _disk(self, fault: Fault, node: Node) -> bool:
        """Nobody is to be lost for it."""
        node.machine.frozen_until = self._cluster.timeline.now + fault.seconds
        return True

    # -- processes ---------------------------------------------------------------------------------------------

    def _process(self, fault: Fault, node: Node, exit_code: int) -> bool:
        alive = node.processes.alive
        if not alive:
            return False
        self.end(alive[fault.pick % len(alive)], exit_code)
        return True

    def end(self, process: Process, exit_code: int) -> None:
        """By a signal, or with an error in its script."""
        process.end(exit_code)
        self.blamed.add(process.node.number)
        self._raised(process.rank, exit_code)

    def _raised(self, rank: Rank, exit_code: int) -> None:
        self._cluster.raised = self._cluster.raised or exit_code > 0
        self.raises[rank] += exit_code > 0

    def _some_rank(self, fault: Fault, node: Node) -> Rank:
        ranks = self._cluster.newest_world.ranks_of(node.number)
        return ranks[fault.pick % len(ranks)] if ranks else -2

    def _curse(self, node: Node, curse: Curse) -> bool:
        if curse.rank == -2:
            return False
        self._curses.append(curse)
        return True

    def cursed(self, process: Process) -> Curse | None:
        """Choose the error that `process` raises in this step."""
        node, rank = process.node.number, process.rank
        for curse in self._curses:
            if curse.left and curse.node in (-1, node) and curse.rank in (-1, rank):
                curse.left -= 1
                self.blamed.add(node)
                if not curse.of_host:
                    self._raised(rank, 1)
                return curse
        return None

    def _storm(self, fault: Fault, node: Node) -> bool:
        timeline, rng = self._cluster.timeline, self._cluster.rng
        every = 1 + fault.pick % 2
        struck = [one for host in self._cluster.nodes.values() for one in host.processes.alive][::every]
        for process in struck:
            self.blamed.add(process.node.number)
            timeline.after(rng.random() * fault.pick % 3, process.end)
        return bool(struck)

    def _stuck(self, fault: Fault, node: Node) -> bool:
        alive = node.processes.alive
        if not alive:
            return False
        process = alive[fault.pick % len(alive)]
        process.stuck = True
        self.blamed.add(node.number)
        node.processes.stands_still(process, self._cluster.timing.slow_after_s)
        return True

    def _hang(self, fault: Fault, node: Node) -> bool:
        """Every other one does not leave its call when it is interrupted either. One in the script's own code goes on
        by itself, and nobody is to be lost for it."""
        process = self._in_training(fault, node)
        if process is None or process.hangs or process.slow_s:
            return False
        process.hangs = {"hang": "call", "skip": "join", "script": "script"}[fault.kind]
        if fault.kind == "script":
            process.slow_s = fault.seconds
        else:
            process.is_deaf = fault.pick % 2 == 1
            self.blamed.add(node.number)
        return True

    def _slow(self, fault: Fault, node: Node) -> bool:
        """Nobody is to be interrupted for it, or lost."""
        process = self._in_training(fault, node)
        if process is None or process.hangs or process.slow_s:
            return False
        process.slow_s = fault.seconds
        return True

    def _in_training(self, fault: Fault, node: Node) -> Process | None:
        training = [process for process in node.processes.alive if process.in_training and not process.finished]
        return training[fault.pick % len(training)] if training else None

    def _mispair(self, fault: Fault, node: Node) -> bool:
        """It strikes whoever takes a rank over from now on."""
        self._mispairing.append(Mispairing(ODD[fault.pick % len(ODD)], fault.count))
        return False

    def odd_of(self, rank: Rank) -> Odd | None:
        """Choose what a process that takes `rank` over issues in its first step and its peers do not."""
        found = next((one for one in self._mispairing if one.rank in (-1, rank) and one.left), None)
        if found is None:
            return None
        found.rank, found.left = rank, found.left - 1
        return found.odd

    def mispairs(self, process: Process, group: Group, odd: Odd) -> None:
        """`process` issues `odd` in `group`. Its end may be one too many for its node."""
        group.odd = odd
        process.mispaired = True
        self.mispaired[process.rank] += 1
        self.blamed.add(process.node.number)
        self._cluster.strikes.struck["mispair"] += 1
        self._cluster.note(f"fault: rank {process.rank} on node {process.node.number} issues what its peers do not")

    # -- the network -------------------------------------------------------------------------------------------

    def _blame_everybody(self, until: float) -> None:
        self.blamed |= self._cluster.nodes.keys()
        self._blamed_all_until = max(self._blamed_all_until, until)

    def meet(self, node: Node) -> None:
        """A host that comes while the network fails is struck like the others."""
        if self._cluster.timeline.now < self._blamed_all_until:
            self.blamed.add(node.number)

    def _others(self, node: Node) -> set[NodeId]:
        return set(range(1000)) - {node.number}

    def _others_up(self, node: Node) -> list[NodeId]:
        return [other.number for other in self._cluster.nodes.values() if other.up and other is not node]

    def _add(self, rules: list[Rule]) -> bool:
        self.rules += rules
        self.duplicates += [rule for rule in rules if isinstance(rule, Duplicate)]
        self._cluster.network.rules.add(self._cluster.timeline.now, rules)
        return True

    def _partition(self, fault: Fault, node: Node) -> bool:
        until, others = self._cluster.timeline.now + fault.seconds, self._others(node)
        if fault.kind == "part":
            others = {number for number in others if number % PARTS != fault.pick % PARTS}
        return self.cut(fault.kind, {node.number}, others, until)

    def cut(self, kind: str, inside: set[NodeId], outside: set[NodeId], until: float) -> bool:
        """Nothing passes from those `inside` to those `outside`, nor back but for a `kind` that is one way."""
        self._blame_everybody(until)
        rules: list[Rule] = [Cut(kind, inside, outside, until)]
        if kind != "oneway":
            rules.append(Cut(kind, outside, inside, until))
        return self._add(rules)

    def _rift(self, fault: Fault, node: Node) -> bool:
        others = self._others_up(node)
        if not others or any(rule.kind in ("rift", "pair", "deaf") for rule in self.rules):
            return False
        ends = {node.number}, {others[fault.pick % len(others)]}
        self.blamed.update(*ends)
        cluster, (one,), (other,) = self._cluster, *ends
        cluster.timeline.after(cluster.timing.slow_after_s, cluster.network.keep_alive, one, other)
        ways = (ends,) if fault.kind == "deaf" else (ends, ends[::-1])  # no connection outlives either: TCP needs both
        return self._add([Cut(fault.kind, *way, until=math.inf) for way in ways])

    def _lossy(self, fault: Fault, node: Node) -> bool:
        until, others = self._cluster.timeline.now + fault.seconds, self._others(node)
        if fault.kind == "loss" and fault.strength > BEARABLE:
            self._blame_everybody(until)
        ends = [({node.number}, others), (others, {node.number})]
        made: list[Rule] = []
        for sources, targets in ends[:1] if fault.kind == "duplicate" else ends:
            if fault.kind == "loss":
                made.append(Loss(fault.kind, sources, targets, until, probability=fault.strength))
            elif fault.kind == "delay":
                made.append(Delay(fault.kind, sources, targets, until, delay_s=fault.strength))
            else:
                made.append(Duplicate(fault.kind, sources, targets, until, probability=fault.strength))
        return self._add(made)

    def _thin(self, fault: Fault, node: Node) -> bool:
        """Nobody is to be lost for it."""
        until = self._cluster.timeline.now + fault.seconds
        self.thin.append(Thin(node.number, until, max(1.0, 100 * fault.strength)))
        return True

    def _flip(self, fault: Fault, node: Node) -> bool:
        """A control frame that fails its checksum ends its link; a bulk frame its transfer."""
        until, others = self._cluster.timeline.now + fault.seconds, self._others(node)
        flip = Flip(fault.kind, {node.number}, others, until, probability=fault.strength)
        self._cluster.network.flips.append(flip)
        self.rules.append(flip)
        self._blame_everybody(until)
        return True

    def _break(self, fault: Fault, node: Node) -> bool:
        others = self._others_up(node)
        if not others:
            return False
        other = others[fault.pick % len(others)]
        self.blamed |= {node.number, other}
        return self._cluster.network.break_links(node.number, other)

    def _reset(self, fault: Fault, node: Node) -> bool:
        """With the next of the active hosts that are left, or the one `pick` says."""
        others = [other for other in self._others_up(node) if other in self._cluster.newest_world.active]
        if not others:
            return False
        other = others[fault.pick % len(others)]
        self.blamed |= {node.number, other}
        return self._cluster.reset_training(node.number, other)

    # -- memory ------------------------------------------------------------------------------------------------

    def _corrupt(self, fault: Fault, node: Node) -> bool:
        keys = [key for key in node.store.listed if key[0] in node.store.mirrored]
        self._cluster.checkers.corrupted()
        self.blamed.add(node.number)
        return bool(keys) and node.store.corrupt(*keys[fault.pick % len(keys)])
