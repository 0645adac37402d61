"""The named invariants, looked at after every event by somebody who sees the whole job.

Rules of this file: what is checked here is computed from the simulated world, never by the code under test; the first
violation ends the run with a sentence. See design, "Named invariants"; verdicts are the oracle's (oracle.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ..core import io
from ..core.messages import Accepted, Promise, Verdict
from ..core.types import NO_STEP, Generation, NodeId, Rank, Step, SwapPlan, World
from . import oracle
from .store import Snapshot

if TYPE_CHECKING:
    from .cluster import Cluster
    from .node import Node
    from .worker import Process


class Violation(Exception):
    """An invariant does not hold; `invariant` is its name."""

    def __init__(self, invariant: str, sentence: str) -> None:
        self.invariant, self.sentence = invariant, sentence
        super().__init__(f"{invariant}: {sentence}")


def is_majority(world: World, nodes: Collection[NodeId], witness: bool) -> bool:
    """More than half of the members, or just half with the first active node among them (or with the witness)."""
    there = len(set(world.members) & set(nodes))
    half = len(world.members) / 2
    return there > half or (there == half and (witness or world.node_of[0] in nodes))


class Checkers:
    """One run's. Raises Violation wherever it looks."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._accepted: dict[Generation, set[NodeId]] = {}
        self._histories: dict[Generation, int] = {}
        self.committed: dict[Generation, Step] = {}
        """The newest step that was called committed in each generation."""
        self.memory = Memory(cluster)

    # -- ONE_WORLD_PER_GENERATION ------------------------------------------------------------------------------

    def stepped(self, node: Node, event: io.Input, actions: Sequence[io.Action]) -> None:
        controller = node.controller
        accepted = controller._swaps.voter.acceptor.accepted
        if accepted is not None:
            self._accepted.setdefault(accepted[1].world.generation, set()).add(node.number)
        for action in actions:
            if isinstance(action, io.Send) and isinstance(action.message, (Promise, Accepted)):
                self._fenced_first(node, action.message.ballot.generation, actions)
            elif isinstance(action, io.Emit) and action.kind == "SwapPlanned":
                self._accepted.setdefault(controller.generation, set()).add(node.number)
                self._cut_off_first(node, action)
            elif isinstance(action, io.Emit) and action.kind == "JobStopped":
                told = isinstance(event, io.Received) and isinstance(event.message, Verdict)
                if not told:
                    oracle.judge_verdict(self._cluster, node, action)

    def _fenced_first(self, node: Node, generation: Generation, actions: Sequence[io.Action]) -> None:
        """NO_STALE_WRITE: whoever votes has fenced the generation before."""
        fences = [action.generation for action in actions if isinstance(action, io.AbortWorkers)]
        if max([node.store.fence, *fences]) < generation:
            raise Violation("NO_STALE_WRITE", f"node {node.number} votes for generation {generation} without a fence")

    def _cut_off_first(self, proposer: Node, planned: io.Emit) -> None:
        """Whoever is replaced for its silence has stopped what it ran by then; only one that stands still cannot."""
        lost, generation = planned.fields["lost_nodes"], proposer.controller.generation
        assert isinstance(lost, tuple)
        for number in proposer.controller._ctx.watch.silent & set(lost):
            node = self._cluster.nodes[number]
            runs = any(process.in_training and not process.held for process in node.processes.alive)
            if runs and node.up and not node.paused and node.store.fence <= node.controller.generation:
                raise Violation("NO_STALE_WRITE", f"node {number} still runs what generation {generation} gives away")

    def reconfigured(self, node: Node, plan: SwapPlan) -> None:
        """`node` acts on `plan`."""
        generation = plan.world.generation
        known = self._cluster.plans.setdefault(generation, plan)
        if known != plan:
            raise Violation("ONE_WORLD_PER_GENERATION", f"generation {generation} has the plans {known} and {plan}")
        if node.store.fence < generation:
            raise Violation("NO_STALE_WRITE", f"node {node.number} enters generation {generation} without a fence")
        before = self._world_before(generation)
        accepted = self._accepted.get(generation, set())
        if not is_majority(before, accepted, self._cluster.witnessed.get(generation) == plan):
            raise Violation(
                "ONE_WORLD_PER_GENERATION",
                f"node {node.number} acts on generation {generation}, which only nodes {sorted(accepted)} "
                f"of {before.members} have accepted",
            )
        self._world_is_kept(before, plan)
        oracle.judge_plan(self._cluster, plan)
        self.memory.disarm(generation)

    def _world_before(self, generation: Generation) -> World:
        return self._cluster.plans[generation - 1].world if generation > 1 else self._cluster.world

    def _world_is_kept(self, before: World, plan: SwapPlan) -> None:
        """World size and rank order stay, and nobody moves but the ranks of the lost."""
        if len(before.node_of) != len(plan.world.node_of):
            raise Violation("STABLE_WORLD", f"{len(before.node_of)} ranks became {len(plan.world.node_of)}")
        moved = {was for was, now in zip(before.node_of, plan.world.node_of, strict=True) if was != now}
        if not moved <= set(plan.lost_nodes):
            raise Violation("STABLE_WORLD", f"ranks of nodes {sorted(moved - set(plan.lost_nodes))} moved for nothing")

    # -- BIT_EXACT -----------------------------------------------------------------------------------------------

    def updated(self, process: Process) -> None:
        """A rank has made a step."""
        expected = self._cluster.reference.state(process.rank, process.step)
        if process.state is None or process.state.numbers != expected.numbers:
            raise Violation(
                "BIT_EXACT", f"rank {process.rank} is at {process.state} after step {process.step}, not at {expected}"
            )
        self._cluster.strikes.reached(process.step)

    def restored(self, process: Process, step: Step, snapshot: Snapshot | None) -> None:
        """A rank takes the restore step out of its arena."""
        where = f"rank {process.rank} on node {process.node.number}"
        if snapshot is None:
            raise Violation("RESTORABLE", f"{where} shall restore step {step}, which its arena does not hold")
        state = snapshot.state
        if state is None:
            raise Violation("BIT_EXACT", f"{where} restores step {step} from header and payload of two histories")
        expected = self._cluster.reference.state(process.rank, step)
        if state.numbers != expected.numbers:
            raise Violation("BIT_EXACT", f"{where} restores {state} as step {step}, not {expected}")
        generation = process._joined
        if self._histories.setdefault(generation, state.history) != state.history:
            raise Violation("BIT_EXACT", f"{where} restores step {step} of another history than others of {generation}")

    def joined_group(self, process: Process, generation: Generation) -> None:
        if generation and generation not in self._cluster.plans:
            raise Violation("NO_STALE_WRITE", f"rank {process.rank} joins undecided generation {generation}")

    # -- RESTORABLE ----------------------------------------------------------------------------------------------

    def said(self, node: Node, action: io.Emit) -> None:
        generation = node.controller.generation
        if action.kind == "StepCommitted":
            step = action.fields["step"]
            assert isinstance(step, int)
            self.committed[generation] = max(self.committed.get(generation, NO_STEP), step)
        elif action.kind == "Protected" and generation == max(self._cluster.plans, default=0):
            self.memory.arm(node.controller.world, generation)

    def memory_changed(self, node: NodeId, rank: Rank, step: Step) -> None:
        self.memory.changed(node, rank, step)

    def node_gone(self, node: NodeId) -> None:
        self.memory.gone(node)

    def corrupted(self) -> None:
        self.memory.corrupted()

    def left(self, node: Node, action: io.Leave) -> None:
        oracle.judge_exit(self._cluster, node, action)


class Memory:
    """RESTORABLE: while the job says it is protected, some step is held by so many nodes that `copies` may be lost.

    A step counts for a rank by the nodes that hold its header, and by those that hold its payload (or a replica's); the
    fewer of both must be one more than the losses still to be survived.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world: World | None = None
        self._generation: Generation = 0
        self._needed = self._corrupt = 0
        self._headers: dict[tuple[Rank, Step], set[NodeId]] = {}
        self._payloads: dict[tuple[Rank, Step], set[NodeId]] = {}
        self._unsafe: dict[Step, set[Rank]] = {}

    def changed(self, node: NodeId, rank: Rank, step: Step) -> None:
        """`node` may hold something else of (rank, step) than before."""
        home = self._cluster.nodes[node]
        header = home.up and serves(home, rank, step, payload=False)
        _put(self._headers.setdefault((rank, step), set()), node, header)
        _put(self._payloads.setdefault((rank, step), set()), node, header and serves(home, rank, step, payload=True))
        if self._world is None:
            return
        unsafe = self._unsafe.setdefault(step, set(range(len(self._world.node_of))))
        was_safe = not unsafe
        for same in self._cluster.replicas[rank]:
            _put(unsafe, same, not self._is_safe(same, step))
        if was_safe and unsafe:
            self._judge(f"node {node} changed what it holds of rank {rank}, step {step}")

    def gone(self, node: NodeId) -> None:
        """`node` and its memory are no more."""
        for held in (*self._headers.values(), *self._payloads.values()):
            held.discard(node)
        if self._world is not None and node in self._world.members:
            self.one_less()

    def arm(self, world: World | None, generation: Generation) -> None:
        """The job is protected from now on."""
        assert world is not None
        self._world, self._generation = world, generation
        gone = sum(not self._cluster.nodes[node].up for node in world.members) + self._corrupt
        self._needed = 1 + min(self._cluster.policy.copies, len(world.members) - 1) - gone
        if self._needed < 1:
            self._world = None
        self._look_everywhere()

    def disarm(self, generation: Generation) -> None:
        """The world changes: unprotected."""
        if generation > self._generation:
            self._world = None

    def corrupted(self) -> None:
        """A copy is not what it was, which nobody knows before it is read."""
        self._corrupt += 1
        self.one_less()

    def one_less(self) -> None:
        """One copy is lost: fewer losses can still be survived."""
        self._needed -= 1
        if self._needed < 1:
            self._world = None
        self._look_everywhere()

    def _look_everywhere(self) -> None:
        if self._world is None:
            return
        ranks = range(len(self._world.node_of))
        steps = {step for (_, step), nodes in self._headers.items() if nodes}
        self._unsafe = {step: {rank for rank in ranks if not self._is_safe(rank, step)} for step in steps}
        self._judge(f"{self._needed - 1} more may be lost")

    def _is_safe(self, rank: Rank, step: Step) -> bool:
        replicas, payloads = self._cluster.replicas[rank], self._payloads
        if len(self._headers.get((rank, step), ())) < self._needed:
            return False
        if len(replicas) == 1:
            return len(payloads.get((rank, step), ())) >= self._needed
        return len(set().union(*(payloads.get((same, step), ()) for same in replicas))) >= self._needed

    def _judge(self, why: str) -> None:
        if all(self._unsafe.values()):
            held = {step: f"all but rank(s) {sorted(ranks)[:8]}" for step, ranks in sorted(self._unsafe.items())}
            raise Violation(
                "RESTORABLE",
                f"generation {self._generation} is protected, but no step is held for all ranks on {self._needed} "
                f"nodes ({why}): {held}",
            )


def _put(found: set[int], item: int, belongs: bool) -> None:
    if belongs:
        found.add(item)
    else:
        found.discard(item)


def serves(node: Node, rank: Rank, step: Step, payload: bool) -> bool:
    """Whether `node` can serve that snapshot: listed, in its slot, unchanged."""
    holding = node.store.listed.get((rank, step))
    pair = node.store.pair(rank)
    found = pair.get(step) if pair is not None else None
    if holding is None or found is None:
        return False
    return not payload or (holding.payload and found.payload is not None and found.is_whole)
