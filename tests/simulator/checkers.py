"""The named invariants, looked at after every event by somebody who sees the whole job.

Rules of this file: what is checked here is computed from the simulated world, never by the code under test; the first
violation ends the run with a sentence. See design, "Named invariants"; verdicts are the oracle's (oracle.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deadpool_plugin.core import api, events
from deadpool_plugin.core.messages import Accepted, Prepare, Promise, Verdict
from deadpool_plugin.core.spares import ATTEMPTS_MAX
from deadpool_plugin.core.types import NO_STEP, Generation, NodeId, Rank, Step, SwapPlan, World

from . import oracle
from .machine import is_whole
from .memory import Memory
from .restarts import Restarts
from .training import State
from .violation import Violation
from .worker import state_of

if TYPE_CHECKING:
    from .cluster import Cluster
    from .node import Node
    from .worker import Process


class Checkers:
    """One run's. Raises Violation wherever it looks."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._accepted: dict[Generation, set[NodeId]] = {}
        self._silent: dict[tuple[Generation, NodeId], set[NodeId]] = {}
        """Whom each proposer of a generation would replace for nothing but its silence."""
        self._histories: dict[Generation, int] = {}
        self.committed: dict[Generation, Step] = {}
        """The newest step that was called committed in each generation."""
        self.memory = Memory(cluster)
        self._restarts = Restarts(cluster.policy, cluster.timing.slow_after_s)
        self._runs: dict[NodeId, list[Generation]] = {}
        """In which generation each node has run `spare_command`."""

    # -- ONE_WORLD_PER_GENERATION ------------------------------------------------------------------------------

    def stepped(self, node: Node, event: api.Input, actions: Sequence[api.Action]) -> None:
        controller = node.controller
        accepted = controller._swaps.voter.acceptor.accepted
        if accepted is not None:
            self._accepted.setdefault(accepted[1].world.generation, set()).add(node.number)
        fence = node.store.generation
        for action in actions:
            if isinstance(action, api.Send):
                if isinstance(action.message, (Promise, Accepted)) and fence < action.message.ballot.generation:
                    raise Violation("NO_STALE_WRITE", f"node {node.number} votes before it is fenced: {action.message}")
                if isinstance(action.message, Prepare):
                    ballot = action.message.ballot
                    self._silent[ballot.generation, ballot.node] = set(action.message.silent)
            elif isinstance(action, api.AbortWorkers):
                fence = max(fence, action.generation)
            elif isinstance(action, api.RunSpareCommand):
                self._runs.setdefault(node.number, []).append(node.controller.generation)
                self._asked_rightly(node, action)
            elif isinstance(action, api.EndRank):
                self._blamed_rightly(node, action)
            elif not isinstance(action, api.Emit):
                continue
            elif isinstance(action.event, events.SwapPlanned):
                self._accepted.setdefault(controller.generation, set()).add(node.number)
                self._cut_off_first(node, action.event)
            elif isinstance(action.event, events.JobStopped):
                told = isinstance(event, api.Received) and isinstance(event.message, Verdict)
                if not told:
                    oracle.judge_verdict(self._cluster, node, action.event)

    def _cut_off_first(self, proposer: Node, planned: events.SwapPlanned) -> None:
        """Whoever is replaced for its silence has stopped what it ran by then; only one that stands still cannot.

        Who has not heard of training has not either: nothing it could tear is written before a step is committed
        (core/README.md).
        """
        generation = proposer.controller.generation
        for number in self._silent.get((generation, proposer.number), set()) & set(planned.lost_nodes):
            node = self._cluster.nodes[number]
            runs = any(
                process.in_training and not process.held and process.unwound_for <= node.controller.generation
                for process in node.processes.alive
            )
            if runs and node.up and not node.paused and node.controller._ctx.has_trained:
                raise Violation("NO_STALE_WRITE", f"node {number} still runs what generation {generation} gives away")

    def reconfigured(self, node: Node, plan: SwapPlan) -> None:
        """`node` acts on `plan`."""
        generation = plan.world.generation
        known = self._cluster.plans.setdefault(generation, plan)
        if known != plan:
            raise Violation("ONE_WORLD_PER_GENERATION", f"generation {generation} has the plans {known} and {plan}")
        if node.store.generation < generation:
            raise Violation("NO_STALE_WRITE", f"node {node.number} enters generation {generation} without a fence")
        before = self._world_before(generation)
        accepted = self._accepted.get(generation, set())
        if not oracle.is_majority(before, accepted, self._cluster.witnessed.get(generation) == plan):
            raise Violation(
                "ONE_WORLD_PER_GENERATION",
                f"node {node.number} acts on generation {generation}, which only nodes {sorted(accepted)} "
                f"of {before.members} have accepted",
            )
        self._world_is_kept(before, plan)
        oracle.judge_plan(self._cluster, plan)
        self.memory.disarm(generation)

    def _asked_rightly(self, node: Node, action: api.RunSpareCommand) -> None:
        """Only hosts are asked for that the job lacks, a bounded number of times."""
        cluster, world = self._cluster, node.controller.world
        given = len(cluster.world.members)
        members = world.members if world is not None else ()
        there = [number for number in members if cluster.nodes[number].up and number not in cluster.blows.blamed]
        if action.hosts > given - len(there):
            asked = f"node {node.number} asks for {action.hosts} host(s)"
            raise Violation("BOUNDED", f"{asked}, and {len(there)} of {given} are there")
        joined = max((generation for generation, plan in cluster.plans.items() if plan.joined), default=0)
        if sum(generation >= joined for generation in self._runs[node.number]) > ATTEMPTS_MAX:
            raise Violation("BOUNDED", f"node {node.number} asks for hosts again and again")

    def _blamed_rightly(self, node: Node, action: api.EndRank) -> None:
        """Nobody is ended who issues what its peers do. Of newcomers alone nobody can say which of them is right, nor
        of those whose peers are lost or stand still."""
        ended, nodes = node.processes.of(action.rank), self._cluster.nodes
        if action.reason.startswith("it hung"):
            return  # `_hangs` has looked at it
        judge = nodes[node.controller._ctx.coordinator].controller._ctx
        heard = [nodes[number] for number in judge.living if nodes[number].up and not nodes[number].paused]
        some_survive = any(
            process.in_training and not process.took_over for at in heard for process in at.processes.alive
        )
        if ended is not None and not ended.mispaired and (some_survive or not ended.took_over):
            where = f"the process of rank {action.rank} on node {node.number}"
            raise Violation("RIGHT_VERDICT", f"{where} is ended, which issues what its peers do: {action.reason}")

    def _world_before(self, generation: Generation) -> World:
        return self._cluster.plans[generation - 1].world if generation > 1 else self._cluster.world

    def _world_is_kept(self, before: World, plan: SwapPlan) -> None:
        """World size and rank order stay, and nobody moves but the ranks of the lost."""
        if len(before.node_of) != len(plan.world.node_of):
            raise Violation("STABLE_WORLD", f"{len(before.node_of)} ranks became {len(plan.world.node_of)}")
        moved = {was for was, now in zip(before.node_of, plan.world.node_of, strict=True) if was != now}
        if not moved <= {*plan.lost_nodes, *plan.vacated}:
            raise Violation("STABLE_WORLD", f"ranks of nodes {sorted(moved - {*plan.lost_nodes})} moved for nothing")
        raised = {
            node for node in plan.vacated for rank in before.ranks_of(node) if self._cluster.blows.raises[rank] > 1
        }
        if not set(plan.vacated) <= raised & {*plan.world.spares}:
            raise Violation("RIGHT_VERDICT", f"nodes {plan.vacated} are made spares, though no error came back there")

    # -- BIT_EXACT -----------------------------------------------------------------------------------------------

    def updated(self, process: Process) -> None:
        """A rank has made a step: a wrong one only together with who issues other collectives."""
        expected = self._cluster.reference.state(process.rank, process.step)
        pairs = process.group is not None and process.group.odd is None
        if process.state is None or (process.state.numbers != expected.numbers and pairs):
            raise Violation(
                "BIT_EXACT", f"rank {process.rank} is at {process.state} after step {process.step}, not at {expected}"
            )
        self._cluster.strikes.reached(process.step)

    def restored(self, process: Process, step: Step, is_held: bool, state: State | None) -> None:
        """A rank takes the restore step out of its arena."""
        where = f"rank {process.rank} on node {process.node.number}"
        if not is_held:
            raise Violation("RESTORABLE", f"{where} shall restore step {step}, which its arena does not hold")
        if state is None:
            raise Violation("BIT_EXACT", f"{where} restores step {step} from header and payload of two histories")
        expected = self._cluster.reference.state(process.rank, step)
        if state.numbers != expected.numbers:
            raise Violation("BIT_EXACT", f"{where} restores {state} as step {step}, not {expected}")
        generation = process.joined
        if self._histories.setdefault(generation, state.history) != state.history:
            raise Violation("BIT_EXACT", f"{where} restores step {step} of another history than others of {generation}")

    def saves(self, process: Process, step: Step) -> None:
        """A save of a step that a swap could go back behind has begun."""
        # It may have heard of a newer generation's commit before it has unwound for that.
        newest = max((at for generation, at in self.committed.items() if generation >= process.joined), default=NO_STEP)
        is_void = process.is_void(step) and any(self._cluster.blows.mispaired.values())  # else none can go on from it
        if step > process.entered and newest < step and not is_void:
            raise Violation("RESTORABLE", f"rank {process.rank} saves step {step}, which is not committed")

    def joined_group(self, process: Process, generation: Generation) -> None:
        if generation and generation not in self._cluster.plans:
            raise Violation("NO_STALE_WRITE", f"rank {process.rank} joins undecided generation {generation}")

    # -- RESTORABLE ----------------------------------------------------------------------------------------------

    def said(self, node: Node, action: api.Emit) -> None:
        generation = node.controller.generation
        event = action.event
        if isinstance(event, events.StepCommitted):
            step = event.step
            self.committed[generation] = max(self.committed.get(generation, NO_STEP), step)
            self._is_right(node.controller.world, step)
        elif isinstance(event, events.Stalled) and event.cure:
            self._hangs(node, event)
        elif isinstance(event, events.RankLost):
            self._restarts.lost(node.number, event.rank, self._cluster.timeline.now)
        elif isinstance(event, events.NodeFenced) and _is_for_restarts(event.reason):
            self._restarts.gave_up(node.number, self._cluster.timeline.now, event.reason)
        elif isinstance(event, events.Mirrored) and generation == max(self._cluster.plans, default=0):
            self.memory.arm(node.controller.world, generation)

    def _hangs(self, node: Node, event: events.Stalled) -> None:
        """Whoever is said to hang does, or does not run, or mispairs: nobody who is slow, or waits."""
        world = node.controller.world
        for rank in event.ranks:
            assert world is not None
            at = self._cluster.nodes[world.node_of[rank]]
            process = at.processes.of(rank)
            if process is None or process.hangs or process.held or process.stuck or process.mispaired:
                continue
            if not at.up or at.paused:
                continue
            if node.number not in self._cluster.blows.blamed:
                where = f"rank {rank} on node {at.number}"
                raise Violation("RIGHT_VERDICT", f"{where} does not hang, and node {node.number} says: {event.what}")

    def _is_right(self, world: World | None, step: Step) -> None:
        """No rank's committed step has been made of collectives that did not pair."""
        for rank, home in enumerate(world.node_of if world is not None else ()):
            pair = self._cluster.nodes[home].store.own(rank)
            if pair is None or (header := pair.open(step)) is None or not is_whole(pair, header):
                continue
            state = state_of(pair, step)
            if state is not None and state.numbers != self._cluster.reference.state(rank, step).numbers:
                raise Violation("BIT_EXACT", f"step {step} is committed, which rank {rank} has made to be {state}")

    def memory_changed(self, node: NodeId, rank: Rank, step: Step) -> None:
        self.memory.changed(node, rank, step)

    def node_gone(self, node: NodeId) -> None:
        self.memory.gone(node)

    def corrupted(self) -> None:
        self.memory.corrupted()

    def left(self, node: Node, action: api.Leave) -> None:
        oracle.judge_exit(self._cluster, node, action)


def _is_for_restarts(reason: str) -> bool:
    """Return whether a node says that it leaves for its own ranks' losses. It may quote others that have."""
    return reason.startswith("rank ") and "restarts_max" in reason
