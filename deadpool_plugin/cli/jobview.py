"""The state of a job as its events tell it: fold them in with `JobView.apply`, read the properties.

Rules of this file: pure (no clock, no files, no drawing). Events come from every node's own log, so their order
across nodes is only that of the nodes' clocks and one may be missing: what depends on order is decided by the
generation, and what only a node outside the job claims does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from .. import events
from ..agent.reports import _line as sentence
from ..core.placement import rehearsals
from ..core.types import NO_STEP, Generation, NodeId, Rank, Step, World

State = Literal["joining", "active", "rehearsing", "spare", "lost", "fenced"]
Protection = Literal["not yet", "Protected", "Unprotected"]
LINES_MAX = 200


@dataclass(frozen=True)
class Line:
    """A sentence for people, and the node that said it."""

    time: float
    node: NodeId
    text: str


@dataclass(frozen=True)
class Loss:
    step: Step
    value: float


@dataclass
class Swap:
    """One change of generation; `duration_s` is None until every rank is in training again."""

    generation: Generation
    began: float
    restore_step: Step
    lost: tuple[NodeId, ...]
    takers: dict[NodeId, NodeId]
    duration_s: float | None = None
    first_step_s: float | None = None
    """Until the slowest rank so far had done its first step after the swap."""


@dataclass
class Node:
    host: str = ""
    joined: bool = False
    ranks: tuple[Rank, ...] = ()
    training: bool = False
    ready_for: tuple[Rank, ...] = ()
    cannot: bool = False
    removed: bool = False
    fenced: bool = False
    generation: Generation = 0
    accusers: dict[NodeId, Generation] = field(default_factory=dict)
    """Who counts this node as lost, since which generation; it is decided only when a swap is."""


@dataclass(frozen=True)
class Row:
    """One node as the table shows it. `stands_in_for`: the ranks a spare has rehearsed."""

    node: NodeId
    host: str
    state: State
    ranks: tuple[Rank, ...]
    stands_in_for: tuple[Rank, ...]
    generation: Generation
    step: Step
    loss: Loss | None


@dataclass
class JobView:
    """Thread: one. A job that starts in the folder of an earlier one replaces it."""

    nodes: dict[NodeId, Node] = field(default_factory=dict)
    world: World | None = None
    generation: Generation = 0
    training: bool = False
    committed: Step = NO_STEP
    protection: Protection = "not yet"
    protection_reason: str = ""
    swaps: list[Swap] = field(default_factory=list)
    outcome: str = ""
    """How the job ended; "" while it has not."""
    lines: deque[Line] = field(default_factory=lambda: deque(maxlen=LINES_MAX))
    lines_total: int = 0
    _steps: dict[Rank, tuple[Generation, Step]] = field(default_factory=dict)
    _losses: dict[Rank, Loss] = field(default_factory=dict)
    _protection_since: Generation = 0
    _lost_at: float | None = None

    # ---- what to read

    @property
    def step(self) -> Step:
        """The newest step that any rank has done and that still counts."""
        return self._newest_step(self._steps)

    @property
    def loss(self) -> Loss | None:
        return self._newest_loss(self._losses)

    @property
    def swapping_since(self) -> float | None:
        """When the loss was noticed that training has not got over yet (epoch seconds); None if there is none."""
        return None if self.outcome else self._lost_at

    def state(self, number: NodeId) -> State:
        node = self.nodes[number]
        if node.fenced:
            return "fenced"
        if node.removed or any(self._counts(accuser) for accuser in node.accusers):
            return "lost"
        if not node.joined or (node.ranks and not node.training):
            return "joining"
        if node.ranks:
            return "active"
        rehearsing = self.training and not node.cannot and node.ready_for != self._tasks(number)
        return "rehearsing" if rehearsing else "spare"

    def rows(self) -> list[Row]:
        """Every node that has been in the job, by number."""
        return [
            Row(
                number,
                node.host,
                self.state(number),
                node.ranks,
                () if node.ranks or node.removed else node.ready_for,
                node.generation,
                self._newest_step(node.ranks),
                self._newest_loss(node.ranks),
            )
            for number, node in sorted(self.nodes.items())
        ]

    # ---- what happens

    def apply(self, event: events.Event) -> None:
        """Fold `event` in; kinds that change nothing here are ignored."""
        if self._starts_another_job(event):
            vars(self).update(vars(JobView()))
        node = self.nodes.setdefault(event.node, Node())
        node.generation = max(node.generation, event.generation)
        self.generation = max(self.generation, event.generation)
        self._tell(event)
        handler = self._handlers().get(type(event))
        if handler is not None:
            handler(event, node)

    def _starts_another_job(self, event: events.Event) -> bool:
        known = self.nodes.get(event.node)
        joined = known is not None and known.joined
        if isinstance(event, events.WorldFormed):
            return self.world is not None or joined
        return isinstance(event, events.NodeJoined) and joined

    def _tell(self, event: events.Event) -> None:
        text = sentence(event)
        if isinstance(event, events.WorldFormed):
            active = len(set(event.node_of))
            text = f"{active} node(s) run {len(event.node_of)} rank(s), {len(event.spares)} node(s) stand by"
        ending = isinstance(event, (events.JobFinished, events.JobStopped))
        if text and not (ending and self.outcome):  # every node says that the job has ended
            self.lines.append(Line(event.time, event.node, text))
            self.lines_total += 1

    def _handlers(self) -> dict[type[events.Event], Callable[..., None]]:
        return {
            events.NodeJoined: self._node_joined,
            events.WorldFormed: self._world_formed,
            events.TrainingStarted: self._training_started,
            events.SpareReady: self._spare_ready,
            events.RehearsalFailed: self._rehearsal_failed,
            events.StepDone: self._step_done,
            events.StepCommitted: self._step_committed,
            events.Protected: self._protected,
            events.Unprotected: self._unprotected,
            events.NodeLost: self._node_lost,
            events.NodeFenced: self._node_fenced,
            events.SwapPlanned: self._swap_planned,
            events.SwapDone: self._swap_done,
            events.FirstStepDone: self._first_step_done,
            events.JobFinished: self._job_finished,
            events.JobStopped: self._job_stopped,
        }

    # ---- start

    def _node_joined(self, event: events.NodeJoined, node: Node) -> None:
        node.host, node.joined = event.host, True
        if self.world is None:
            node.ranks = event.ranks

    def _world_formed(self, event: events.WorldFormed, node: Node) -> None:
        self._enter(World(event.generation, event.node_of, event.spares))

    def _training_started(self, event: events.TrainingStarted, node: Node) -> None:
        self.training = True
        for each in self.nodes.values():
            each.training = bool(each.ranks)

    def _spare_ready(self, event: events.SpareReady, node: Node) -> None:
        node.ready_for, node.cannot = event.ranks, False

    def _rehearsal_failed(self, event: events.RehearsalFailed, node: Node) -> None:
        node.cannot = True

    # ---- every step

    def _step_done(self, event: events.StepDone, node: Node) -> None:
        if event.generation < self._steps.get(event.rank, (0, NO_STEP))[0]:
            return
        self._steps[event.rank] = event.generation, event.step
        if event.loss is not None:
            self._losses[event.rank] = Loss(event.step, event.loss)
        if self.world is None or event.generation >= self.world.generation:
            node.training = True
        node.accusers = {who: since for who, since in node.accusers.items() if since >= event.generation}

    def _step_committed(self, event: events.StepCommitted, node: Node) -> None:
        self.committed = max(self.committed, event.step)

    def _protected(self, event: events.Protected, node: Node) -> None:
        self._protect("Protected", event.generation, f"step {event.step} survives the loss of any node")

    def _unprotected(self, event: events.Unprotected, node: Node) -> None:
        self._protect("Unprotected", event.generation, event.reason)

    def _protect(self, protection: Protection, generation: Generation, reason: str) -> None:
        if generation >= self._protection_since:
            self.protection, self.protection_reason, self._protection_since = protection, reason, generation

    # ---- a swap

    def _node_lost(self, event: events.NodeLost, node: Node) -> None:
        for number in event.lost if isinstance(event.lost, tuple) else (event.lost,):
            self.nodes.setdefault(number, Node()).accusers[event.node] = event.generation
        if self._lost_at is None:
            self._lost_at = event.time

    def _node_fenced(self, event: events.NodeFenced, node: Node) -> None:
        node.fenced = True
        if not any(self.state(number) == "lost" and not each.removed for number, each in self.nodes.items()):
            self._settle()

    def _swap_planned(self, event: events.SwapPlanned, node: Node) -> None:
        generation = event.generation + 1
        if self.world is not None and self.world.generation >= generation:
            return  # a second coordinator carried out the same decision
        takers = {int(lost): int(str(taker)) for lost, taker in event.takers.items()}
        began = event.time - event.duration_s if self._lost_at is None else self._lost_at
        self.swaps.append(Swap(generation, began, event.restore_step, event.lost_nodes, takers))
        self._lost_at = began
        self.generation = max(self.generation, generation)
        for lost in event.lost_nodes:
            self.nodes.setdefault(lost, Node()).removed = True
        for rank, (since, step) in self._steps.items():
            if since < generation:
                self._steps[rank] = since, min(step, event.restore_step)
        if self.world is not None:
            spares = [spare for spare in self.world.spares if spare not in {*event.lost_nodes, *takers.values()}]
            node_of = tuple(takers.get(owner, owner) for owner in self.world.node_of)
            self._enter(World(generation, node_of, tuple(spares)))

    def _swap_done(self, event: events.SwapDone, node: Node) -> None:
        self._training_started(events.TrainingStarted(), node)
        for number, each in self.nodes.items():
            if self._counts(number):
                each.generation = max(each.generation, event.generation)
        for swap in self._swaps_of(event.generation):
            swap.duration_s = event.duration_s
        if self.world is None or self.world.generation <= event.generation:
            self._settle()

    def _first_step_done(self, event: events.FirstStepDone, node: Node) -> None:
        for swap in self._swaps_of(event.generation):
            swap.first_step_s = max(swap.first_step_s or 0.0, event.duration_s)

    def _swaps_of(self, generation: Generation) -> Iterator[Swap]:
        return (swap for swap in self.swaps if swap.generation == generation)

    def _settle(self) -> None:
        self._lost_at = None

    # ---- the end

    def _job_finished(self, event: events.JobFinished, node: Node) -> None:
        self.outcome = self.outcome or "finished"

    def _job_stopped(self, event: events.JobStopped, node: Node) -> None:
        self.outcome = self.outcome or f"stopped with exit code {event.exit_code}: {event.reason}"

    # ---- helpers

    def _enter(self, world: World) -> None:
        self.world = world
        for number in world.members:
            self.nodes.setdefault(number, Node())
        for number, node in self.nodes.items():
            before, node.ranks = node.ranks, world.ranks_of(number)
            node.training = node.training and before == node.ranks

    def _counts(self, number: NodeId) -> bool:
        """Whether the node is part of the job as far as anyone knows."""
        node = self.nodes.get(number, Node())
        return not (node.removed or node.fenced)

    def _tasks(self, spare: NodeId) -> tuple[Rank, ...]:
        """The ranks that a spare is to rehearse in this generation."""
        return tuple(task.rank for task in rehearsals(self.world) if task.spare == spare) if self.world else ()

    def _newest_step(self, ranks: Iterable[Rank]) -> Step:
        return max((self._steps[rank][1] for rank in ranks if rank in self._steps), default=NO_STEP)

    def _newest_loss(self, ranks: Iterable[Rank]) -> Loss | None:
        """The loss of the newest step; of the lowest rank where several have one."""
        known = [self._losses[rank] for rank in sorted(ranks) if rank in self._losses]
        return max(known, key=lambda loss: loss.step, default=None)
