"""A simulated job that a test drives: it runs until something is so, is struck then, and runs on.

Rules of this file: whatever strikes is one of blows.py's, which knows who is to blame for it. All a job can do by
itself is to stand still: `hold`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, TypeVar

from support import present

from deadpool_plugin.core import api, events
from deadpool_plugin.core.context import Context
from deadpool_plugin.core.types import NO_STEP, NodeId, Rank, Step

from . import run
from .cluster import HOSTS_MAX, Cluster
from .network import faked
from .node import Node
from .processes import Processes
from .schedule import Fault, scenario
from .tasks import Signal
from .worker import Process

QUIET = {
    "faults": (), "active": 3, "spares": 2, "slots": 2, "racks": 0, "copies": 1, "steps": 12, "drift": 0.0,
    "latency_s": 0.02, "compute_s": 0.1, "restarts_max": 3, "restarts_window_s": 3600.0, "wait_for_hosts": False,
    "witness": False,
}  # fmt: skip
"""Ranks 0 and 1 on node 0, 2 and 3 on node 1, 4 and 5 on node 2; nodes 3 and 4 are spares."""
WITHIN_S = 2000.0
STALL_S = 120.0
"""A test's job may stand still for longer than `auto` allows."""
A = TypeVar("A", bound=api.Action)
E = TypeVar("E", bound=events.Event)


class Job(Cluster):
    """One job. `asked`: what each controller has asked of its agent, messages aside."""

    def __init__(self, seed: int = 1, *, stall_timeout_s: float | Literal["auto"] = STALL_S, **fields: Any) -> None:
        self.stall_timeout_s = stall_timeout_s
        self.asked: list[tuple[NodeId, api.Action]] = []
        self._held: Signal | None = None
        super().__init__(scenario(seed, fixed={**QUIET, **fields}))

    # -- time --------------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], object]) -> None:
        """Let things happen until `condition` holds. Raises: Violation."""
        end = self.timeline.now + WITHIN_S
        with faked():
            while not condition():
                assert not self.is_over, f"the job has ended: {self.reasons}"
                assert self.timeline.now < end and self.timeline.step(), f"this never happens: {condition}"
                if self.broken is not None:
                    raise self.broken

    def idle(self, seconds: float) -> None:
        """Let so much time pass, or less if everybody ends before."""
        end = self.timeline.now + seconds
        self.until(lambda: self.timeline.now >= end or self.is_over)

    def train(self, step: Step = 2) -> Job:
        """Until a step is committed, all snapshots are mirrored, and everybody knows that it trains."""
        self.until(
            lambda: (
                self.committed >= step
                and self.told(events.Mirrored)
                and all(self.context(number).has_trained for number in self.nodes)
            )
        )
        return self

    def hold(self) -> None:
        """Nobody computes any more, also after a swap."""
        self._held, self.excuses = Signal(), (*self.excuses, "got any further")

    def release(self) -> None:
        """All go on."""
        held, self._held = self._held, None
        if held is not None:
            held.set()

    def end(self) -> dict[NodeId, int | None]:
        """Let all go on to their end. Returns: the exit codes of those that were not killed. Raises: Violation."""
        self.release()
        return self.play()

    def play(self) -> dict[NodeId, int | None]:
        """Let it run to its end as it is."""
        run.play(self)
        return self.exits

    def compute_s(self) -> float | Signal:  # type: ignore[override]
        return self._held or super().compute_s()

    def rehearse_s(self) -> float:
        """Never too long, as a scenario's may be by chance."""
        return 3.0 * self.rng.random()

    def unwind_s(self, node: Node) -> float:
        """The same."""
        return 0.1 * self.rng.random()

    # -- faults ------------------------------------------------------------------------------------------------

    def strike(self, kind: str, number: NodeId, **how: Any) -> None:
        """One of schedule.KINDS, and the fields of the fault."""
        assert self.blows.deal(Fault(kind, **how), self.nodes[number]), f"{kind} has struck nothing on node {number}"

    def feed(self, number: NodeId, event: api.Input) -> None:
        """An input of its agent's."""
        self.nodes[number].loop.call_soon(self.nodes[number].feed, event)

    def lose(self, rank: Rank, exit_code: int = -9) -> None:
        """The process of `rank` ends: by a signal, or with an error in its script."""
        self.blows.end(self.process(rank), exit_code)

    def isolate(self, nodes: Collection[NodeId], others: Collection[NodeId] = (), both_ways: bool = True) -> None:
        """Nothing that `nodes` say reaches the `others` (all, if none are named) any more, nor the other way round."""
        inside, outside = set(nodes), set(others or range(HOSTS_MAX)) - set(nodes)
        self.blows.cut("partition" if both_ways else "oneway", inside, outside, math.inf)

    def heal(self) -> None:
        """Everybody hears everybody."""
        for rule in self.blows.rules:
            rule.until = min(rule.until, self.timeline.now)

    def freeze(self, *numbers: NodeId) -> None:
        """Hosts stand still until they `thaw`."""
        for number in numbers:
            self.strike("pause", number, seconds=2 * WITHIN_S)

    def thaw(self, *numbers: NodeId) -> None:
        for number in numbers:
            self.nodes[number].wake()

    def join(self) -> NodeId:
        """One host more asks to become a member."""
        self.strike("join", 0)
        return max(self.nodes)

    # -- what tests look at ------------------------------------------------------------------------------------

    def stepped(self, node: Node, event: api.Input, actions: Sequence[api.Action]) -> None:
        self.asked += [(node.number, action) for action in actions if not isinstance(action, api.Send)]
        super().stepped(node, event, actions)

    def said(self, node: Node, action: api.Emit) -> None:
        """No host comes because one is waited for, but by `join`."""
        self.events[type(action.event).__name__] += 1
        self.checkers.said(node, action)

    def all(self, kind: type[A]) -> list[tuple[NodeId, A]]:
        """What was asked of that kind, and where."""
        return [(node, action) for node, action in self.asked if isinstance(action, kind)]

    def told(self, kind: type[E]) -> list[E]:
        """All events of that kind."""
        return [action.event for _, action in self.all(api.Emit) if isinstance(action.event, kind)]

    def process(self, rank: Rank) -> Process:
        processes: Processes = self.nodes[self.newest_world.node_of[rank]].processes
        return present(processes.of(rank))

    def context(self, number: NodeId) -> Context:
        return self.nodes[number].controller._ctx

    @property
    def committed(self) -> Step:
        return max(self.checkers.committed.values(), default=NO_STEP)

    @property
    def newest_committed(self) -> Step:
        """In the newest history, as far as anybody knows."""
        return max(node.controller._ctx.newest_committed for node in self.nodes.values())

    @property
    def fenced(self) -> bool:
        """Somebody has fenced its generation."""
        return any(node.controller._ctx.swapping for node in self.nodes.values())

    @property
    def exits(self) -> dict[NodeId, int | None]:
        return {number: node.exit[0] if node.exit else None for number, node in self.nodes.items()}

    @property
    def reasons(self) -> dict[NodeId, str]:
        """Why nodes have left."""
        return {number: node.exit[1] for number, node in self.nodes.items() if node.exit}
