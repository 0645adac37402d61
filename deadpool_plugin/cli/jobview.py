"""The state of a job as its events tell it: read them with `Follower.poll`, fold them in with `JobView.apply`.

Rules of this file: no clock, no drawing; times are in epoch seconds. Events come from every node's own log, so their
order across nodes is only that of the nodes' clocks and one may be missing: what depends on order is decided by the
generation, and what only a node outside the job claims does not count.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Literal, NamedTuple

import msgspec

from .. import events
from ..agent.reports import named, sentence
from ..core.placement import rehearsals
from ..core.types import NO_STEP, Generation, NodeId, Rank, Step, World
from ..launch.fate import Fate

SILENT_S = 5 * events.ALIVE_S
"""A job that has not ended says so, whatever it does or waits for: without a word for so long it is gone."""
LAST_WORD_S = 10.0
"""Within such a time of each other the hosts say how the job has ended, and their exit codes."""
SLOW_S = 5.0
SLOW_STEPS = 10
"""A job that trains and has done no step for so many seconds, and so many usual steps, is said to do none."""
RECENT_BYTES = 1 << 16
"""Read at a time of each file of what recurs: hundreds of steps. So what is read does not grow with the job."""

State = Literal["joining", "active", "rehearsing", "spare", "lost", "fenced"]
Doing = Literal["unknown", "starting", "training", "swapping", "waiting", "ending", "silent", "ended"]


class Follower:
    """The new events of `folder/events.*.jsonl`; folder and files may appear later. Thread: one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unreadable = 0
        """Lines that were left out: the writer may be newer than this reader."""
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[events.Event]:
        """Read the lines completed since the last call, of what recurs the last ones; in the order of time. Blocks."""
        found: list[events.Event] = []
        for path in sorted(self.folder.glob("events.*.jsonl")):
            with path.open("rb") as file:
                size, offset = file.seek(0, 2), self._offsets.get(path, 0)
                offset = file.seek(offset if offset <= size else 0)  # a file that shrank began anew
                if path.match("events.*.recent?.jsonl") and size - offset > RECENT_BYTES:
                    file.seek(size - RECENT_BYTES)
                    offset = size - RECENT_BYTES + len(file.readline())  # the rest of a line
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    offset += len(line)
                    try:
                        found.append(events.decoder.decode(line))
                    except msgspec.DecodeError:
                        self.unreadable += 1
            self._offsets[path] = offset
        return sorted(found, key=lambda event: event.time)


class Line(NamedTuple):
    """A sentence for people, and the node that said it."""

    time: float
    node: NodeId
    text: str


@dataclass
class Swap:
    """One change of generation."""

    plan: events.SwapPlanned
    began: float
    duration_s: float | None = None
    """Until every rank is in training again."""
    first_step_s: float | None = None
    """Until the slowest rank so far had done its first step after the swap."""


@dataclass
class Node:
    ranks: tuple[Rank, ...] = ()
    training: bool = False
    ready_for: tuple[Rank, ...] = ()
    cannot: bool = False
    generation: Generation = 0
    accusers: dict[NodeId, tuple[Generation, float]] = field(default_factory=dict)
    """The nodes that count this node as lost, in which generation and since when; it is decided only when a swap is."""


class Row(NamedTuple):
    """One node, as it is shown. `stands_in_for`: the ranks that a spare has rehearsed."""

    node: NodeId
    host: str
    state: State
    ranks: tuple[Rank, ...]
    stands_in_for: tuple[Rank, ...]
    generation: Generation
    step: Step
    loss: float | None


SpareCommand = Literal["", "running", "awaited", "failed", "exhausted"]
_SPARE_COMMAND: dict[type[events.Event], SpareCommand] = {
    events.SpareCommandStarted: "running", events.SpareCommandDone: "awaited", events.SpareCommandFailed: "failed",
    events.SpareCommandExhausted: "exhausted", events.HostJoined: "",
}  # fmt: skip


@dataclass
class JobView:
    """Thread: one. A job that starts in the folder of an earlier one replaces it."""

    nodes: defaultdict[NodeId, Node] = field(default_factory=lambda: defaultdict(Node))
    world: World | None = None
    generation: Generation = 0
    training: bool = False
    step: Step = NO_STEP
    """The newest that any rank has done and that still counts."""
    stepped_at: float = 0.0
    """When a new step was done, or training began or went on after a swap, whichever was last."""
    committed: Step = NO_STEP
    committed_at: float = 0.0
    protection: str = "not yet"
    """Or Mirrored (state is safe, but no spare can take some node), Protected, Unprotected: the last that was said."""
    protection_at: float = 0.0
    """Since when the job has been protected, or has not."""
    uncovered: tuple[NodeId, ...] = ()
    """The nodes that no spare can take."""
    history: Literal["ok", "filling", "full"] = "ok"
    """The fullest call records of any rank."""
    spare_command: SpareCommand = ""
    """The state of its newest run; awaited: the host that it is to bring. "" once a host has joined."""
    swaps: list[Swap] = field(default_factory=list)
    fate: Fate = field(default_factory=Fate)
    outcome: str = ""
    """How the job ended, "" while it has not; so with `exit_code`."""
    exit_code: int = 0
    heard_at: float = 0.0
    """When the newest event was written."""
    stall: events.Stalled | None = None
    """The newest word about what holds training up, until it gets on."""
    newcomer: events.CatchingUp | None = None
    """The newest word on a process that was on its way through past steps."""
    lines: deque[Line] = field(default_factory=lambda: deque(maxlen=200))
    """A reader may take them away."""
    _steps: dict[Rank, tuple[Generation, Step]] = field(default_factory=dict)
    _losses: dict[Rank, tuple[Step, float]] = field(default_factory=dict)
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """The seconds that each of the newest steps has taken."""
    _joined_last: list[events.NodeJoined] = field(default_factory=list)
    """Those that no other event has followed so far."""
    _protection_since: Generation = 0
    _waiting: Generation = -1

    # ---- what to read

    @property
    def loss(self) -> float | None:
        return self._newest_loss(self._losses)

    @property
    def swapping_since(self) -> float | None:
        """When the loss was noticed that training has not got over yet; None if there is none."""
        if self.outcome:
            return None
        if self.swaps and self.swaps[-1].duration_s is None:
            return self.swaps[-1].began
        undecided = self.nodes.keys() - self.fate.replaced
        return min((since for number in undecided for since in self._accused(number)), default=None)

    @property
    def waiting(self) -> bool:
        """Everyone waits for a host to join."""
        return self._waiting == self.generation and not self.outcome

    def stalled_s(self, now: float) -> float:
        """Return for how long no step has been done, if that is well above a step's usual time; else 0."""
        if not self.training or not self.stepped_at or self.outcome or self.waiting or self.swapping_since is not None:
            return 0.0
        usual_s = median_low(self._paces) if self._paces else 0.0  # one slow step among them, as a save, is not usual
        idle_s = now - self.stepped_at
        return idle_s if idle_s >= max(SLOW_S, SLOW_STEPS * usual_s) else 0.0

    @property
    def holds_up(self) -> events.Stalled | None:
        """The newest stall, if training still waits, as far as the job has said."""
        stall = self.stall
        is_old = stall is None or stall.generation < self.generation or stall.time < self.stepped_at
        return None if is_old or self.outcome or self.swapping_since is not None else stall

    @property
    def catching_up(self) -> events.CatchingUp | None:
        """The newcomer that the swap under way waits for, as far as its host has said."""
        is_old = self.newcomer is None or self.newcomer.generation < self.generation
        return None if is_old or self.swapping_since is None else self.newcomer

    def doing(self, now: float) -> Doing:
        if self.outcome:
            return "ended" if self.over(now) else "ending"
        if not self.nodes:
            return "unknown"
        if now - self.heard_at >= SILENT_S:
            return "silent"
        if self.waiting:
            return "waiting"
        if self.swapping_since is not None:
            return "swapping"
        return "training" if self.training else "starting"

    def over(self, now: float) -> bool:
        """Return whether it has ended, and each node that is not lost has said how its scripts did, or is silent."""
        silent_s = now - self.heard_at
        excused = ("lost", "fenced") if silent_s >= LAST_WORD_S else ("lost",)
        owing = self.fate.hosts.keys() - self.fate.codes.keys()
        return bool(self.outcome) and (silent_s >= SILENT_S or all(self.state(number) in excused for number in owing))

    def state(self, number: NodeId) -> State:
        node = self.nodes[number]
        if number in self.fate.fenced:
            return "fenced"
        if number in self.fate.replaced or self._accused(number):
            return "lost"
        if number not in self.fate.hosts or (node.ranks and not node.training):
            return "joining"
        if node.ranks:
            return "active"
        tasks = tuple(task.rank for task in rehearsals(self.world) if task.spare == number) if self.world else ()
        return "rehearsing" if self.training and not node.cannot and not {*tasks} <= {*node.ready_for} else "spare"

    def rows(self) -> list[Row]:
        rows = []
        for number in sorted(self.nodes.keys() | self.fate.replaced):
            node = self.nodes[number]
            stands_in_for = () if node.ranks or number in self.fate.replaced else node.ready_for
            step = max((self._steps[rank][1] for rank in node.ranks if rank in self._steps), default=NO_STEP)
            loss = self._newest_loss(node.ranks)
            host, state = self.fate.hosts.get(number, ""), self.state(number)
            rows.append(Row(number, host, state, node.ranks, stands_in_for, node.generation, step, loss))
        return rows

    # ---- what happens

    def apply(self, event: events.Event) -> None:
        """Fold `event` in; kinds that change nothing here are ignored."""
        is_start, formed = isinstance(event, (events.WorldFormed, events.NodeJoined)), self.world is not None
        if is_start and (event.node in self.fate.hosts or (formed and isinstance(event, events.WorldFormed))):
            # It is another job, of which hosts that the one before did not have may have spoken first.
            first = [joined for joined in self._joined_last if joined.node not in self.fate.members]
            vars(self).update(vars(JobView()))
            for joined in first:
                self.apply(joined)
        if not is_start:
            self._joined_last.clear()
        node = self.nodes[event.node]
        node.generation = max(node.generation, event.generation)
        self.generation = max(self.generation, event.generation)
        self.heard_at = max(self.heard_at, event.time)
        text = named(sentence(event), self.fate.hosts)
        if isinstance(event, events.WorldFormed):
            active = len(set(event.node_of))
            text = f"{active} node(s) run {len(event.node_of)} rank(s), {len(event.spares)} node(s) stand by"
        if text and not (self.outcome and isinstance(event, (events.JobFinished, events.JobStopped))):  # all say so
            self.lines.append(Line(event.time, event.node, text))
        self.spare_command = _SPARE_COMMAND.get(type(event), self.spare_command)
        match event:
            case events.NodeJoined():
                self._joined_last.append(event)
                node.ranks = event.ranks if self.world is None else node.ranks
            case events.WorldFormed():
                self._enter(World(event.generation, event.node_of, event.spares))
            case events.TrainingStarted():
                self._all_in_training(event)
            case events.SpareReady():
                node.ready_for, node.cannot = tuple(sorted({*node.ready_for, *event.ranks})), False
            case events.CoverLost():
                node.ready_for = tuple(rank for rank in node.ready_for if rank not in event.ranks)
            case events.RehearsalFailed():
                node.cannot = True
            case events.StepDone():
                self._step_done(event, node)
            case events.StepCommitted():
                if event.generation >= self.generation:  # else a plan has said since what of it counts
                    self.committed, self.committed_at = max(self.committed, event.step), event.time
            case events.Mirrored() | events.Protected() | events.Unprotected():
                self._protect(type(event).__name__, event)
            case events.HistoryFilling():
                self.history = "full" if event.full or self.history == "full" else "filling"
            case events.WaitingForHost():
                self._waiting = event.generation
            case events.NodeLost():
                if self.protection != "not yet":
                    self._protect("Unprotected", event)
                for number in event.lost:
                    self.nodes[number].accusers[event.node] = event.generation, event.time
            case events.SwapPlanned():
                self._swap_planned(event)
            case events.SwapDone():
                self._all_in_training(event)
                for number in self.nodes.keys() - self.fate.removed:
                    self.nodes[number].generation = max(self.nodes[number].generation, event.generation)
                for swap in self._swaps_of(event):
                    swap.duration_s = event.duration_s
            case events.Stalled():
                self.stall = event
            case events.CatchingUp():
                self.newcomer = event
            case events.FirstStepDone():
                for swap in self._swaps_of(event):
                    swap.first_step_s = max(swap.first_step_s or 0.0, event.duration_s)
        self.fate.add(event)
        if isinstance(event, events.FATE):
            self.exit_code, self.outcome, _ = self.fate.ended() or (0, "", ())

    def _step_done(self, event: events.StepDone, node: Node) -> None:
        if event.generation < self._steps.get(event.rank, (0, NO_STEP))[0]:
            return
        self._steps[event.rank] = event.generation, event.step
        if event.loss is not None:
            self._losses[event.rank] = event.step, event.loss
        if self.world is None or event.generation >= self.world.generation:
            node.training = True
        if event.generation >= self.generation and event.step > self.step:
            if self.step > NO_STEP:
                taken_s = max(0.0, event.time - self.stepped_at)  # hosts' clocks differ
                self._paces.append(taken_s / (event.step - self.step))
            self.step, self.stepped_at = event.step, max(self.stepped_at, event.time)
        node.accusers = {who: said for who, said in node.accusers.items() if said[0] >= event.generation}

    def _protect(self, protection: str, event: events.Event) -> None:
        if event.generation >= self._protection_since:
            if not self.protection_at or (protection == "Protected") != (self.protection == "Protected"):
                self.protection_at = event.time
            self.uncovered = event.uncovered if isinstance(event, events.Mirrored) else ()
            self.protection, self._protection_since = protection, event.generation

    def _all_in_training(self, event: events.Event) -> None:
        self.training, self.stepped_at = True, max(self.stepped_at, event.time)
        for node in self.nodes.values():
            node.training = bool(node.ranks)

    def _swap_planned(self, event: events.SwapPlanned) -> None:
        generation = event.generation + 1
        if self.world is not None and self.world.generation >= generation:
            return  # a second coordinator carried out the same decision
        began = self.swapping_since
        self.swaps.append(Swap(event, event.time - event.duration_s if began is None else began))
        self.generation, self.committed = max(self.generation, generation), min(self.committed, event.restore_step)
        self.step = min(self.step, event.restore_step)
        for rank, (since, step) in self._steps.items():
            if since < generation:
                self._steps[rank] = since, min(step, event.restore_step)
        if self.world is not None:
            takers = {int(lost): int(str(taker)) for lost, taker in event.takers.items()}
            gone = {*event.lost_nodes, *takers.values()}
            node_of = tuple(takers.get(owner, owner) for owner in self.world.node_of)
            spares = (*self.world.spares, *event.joined, *event.vacated)
            self._enter(World(generation, node_of, tuple(spare for spare in spares if spare not in gone)))

    def _enter(self, world: World) -> None:
        self.world = world
        for number in {*self.nodes, *world.members}:
            node = self.nodes[number]
            before, node.ranks = node.ranks, world.ranks_of(number)
            node.training = node.training and before == node.ranks
            node.ready_for = () if node.ranks else node.ready_for

    def _accused(self, number: NodeId) -> list[float]:
        """Return since when the nodes that are still in the job count this one as lost."""
        accusers = self.nodes[number].accusers.items()
        return [since for accuser, (_, since) in accusers if accuser not in self.fate.removed]

    def _swaps_of(self, event: events.Event) -> list[Swap]:
        return [swap for swap in self.swaps if swap.plan.generation + 1 == event.generation]

    def _newest_loss(self, ranks: Iterable[Rank]) -> float | None:
        """Find the loss of the newest step; of the lowest rank where several have one."""
        known = [self._losses[rank] for rank in sorted(ranks) if rank in self._losses]
        return max(known, key=lambda told: told[0])[1] if known else None
