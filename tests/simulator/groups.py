"""Process groups of the toy job: all ranks of one generation, over one store.

Rules of this file: a group is made once all ranks have joined and while its store's host lives; a collective matches
by its number and completes when every rank has contributed, at each rank at another moment, never if one is missing
(a lost peer blocks the others until they are interrupted from outside, as gloo does at worst). Ranks that issue
different collectives all get a wrong number, or hang.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from deadpool_plugin.core import local
from deadpool_plugin.core.signatures import Signature
from deadpool_plugin.core.types import Generation, NodeId, Rank

from .tasks import Signal
from .training import summed

if TYPE_CHECKING:
    from .cluster import Cluster
    from .worker import Process

RETRY_S = 0.2
SUM = Signature("all_reduce", "float32", 1, "sum").encoded()
"""The collective of every step."""
MORE = Signature("all_reduce", "int32", 1, "sum").encoded()
WRONG = 1e6
"""Added to the sum of a collective whose members have not all issued the same."""


class Odd(NamedTuple):
    """A collective of `code` that a process issues once, and its peers do not, `instead` of its own next one or
    before it. Members of different collectives hang, or else get wrong numbers."""

    code: int
    instead: bool
    hangs: bool


ODD = (Odd(SUM, False, False), Odd(MORE, False, False), Odd(MORE, False, True), Odd(MORE, True, False))


class Round(NamedTuple):
    """One collective: who has contributed what, who waits for the sum, and what each has called it."""

    gradients: dict[Rank, float]
    waiting: dict[Rank, Signal]
    codes: set[int]


class Group:
    """All ranks of `generation` over `store`."""

    def __init__(self, cluster: Cluster, generation: Generation, store: str) -> None:
        self._cluster, self.generation, self._store = cluster, generation, store
        self._members: dict[Rank, Process] = {}
        self._joined: dict[Rank, Signal] = {}
        self._rounds: dict[int, Round] = {}
        self._calls: dict[Rank, int] = {}
        self._reset: frozenset[NodeId] = frozenset()
        """The hosts between which connections were reset: nothing is summed any more."""
        self.odd: Odd | None = None
        """The collective that one of the members has issued, and the others have not."""

    def join(self, process: Process) -> Signal:
        """Set once all ranks are there. A rank that comes again (in a new process) finds what is left: nobody."""
        signal = Signal()
        if process.rank in self._members and self._members[process.rank] is not process:
            return signal
        self._members[process.rank], self._joined[process.rank] = process, signal
        if len(self._members) == self._cluster.ranks:
            self._complete_join()
        return signal

    def _complete_join(self) -> None:
        if self._cluster.store_is_dead(self._store):
            return
        if self._is_cut(connecting=True):
            self._cluster.timeline.after(RETRY_S, self._complete_join)
            return
        for signal in self._joined.values():
            self._cluster.timeline.after(self._cluster.network.latency(), signal.set)

    def all_reduce(self, process: Process, value: float, code: int = SUM) -> Signal:
        """The sum of all ranks' gradients of this call, as the signal's value."""
        number = self._calls.get(process.rank, 0)
        self._calls[process.rank] = number + 1
        signal, one = Signal(), self._rounds.setdefault(number, Round({}, {}, set()))
        one.codes.add(code)
        one.gradients[process.rank], one.waiting[process.rank] = value, signal
        self._fail(process)
        if len(one.gradients) == self._cluster.ranks:
            self._complete(number)
        return signal

    def reset(self, a: NodeId, b: NodeId) -> bool:
        """Fail the collectives of their ranks, under way and from now on. Returns: whether there was a connection."""
        numbers = {process.node.number for process in self._members.values() if process.alive}
        if self._reset or len(self._members) < self._cluster.ranks or not {a, b} <= numbers:
            return False
        self._reset = frozenset((a, b))
        for one in self._rounds.values():
            for rank in sorted(one.waiting):
                self._fail(self._members[rank])
        return True

    def _fail(self, process: Process) -> None:
        """An error in a collective is the script's, or means that its connection broke, once nobody has said for the
        job's patience that somebody is lost."""
        number = process.node.number
        if number not in self._reset:
            return
        peers = tuple(rank for rank, it in self._members.items() if it.node.number in self._reset - {number})
        broke = local.ConnectionBroke(process.rank, self.generation, peers, "connection reset by peer")

        def tell() -> None:
            if process.unwound_for <= self.generation:
                process.tell(broke)

        self._cluster.timeline.after(self._cluster.timing.slow_after_s, process.do, tell)

    def _complete(self, number: int) -> None:
        if self._reset or not all(process.alive for process in self._members.values()):
            return
        if self._is_cut():
            self._cluster.timeline.after(RETRY_S, self._complete, number)
            return
        one = self._rounds.pop(number)
        total = summed([one.gradients[rank] for rank in sorted(one.gradients)])
        if len(one.codes) > 1:
            if self.odd is not None and self.odd.hangs:
                return
            total += WRONG
        for rank in sorted(one.waiting):
            self._cluster.timeline.after(self._cluster.network.latency(), one.waiting[rank].set, total)

    def _is_cut(self, connecting: bool = False) -> bool:
        """Return whether a neighbour in the ring of nodes (any other node, while all are `connecting`) cannot be heard,
        or acknowledge, now. A rift is between agents."""
        ring = list(dict.fromkeys(self._members[rank].node for rank in sorted(self._members)))
        if len(ring) < 2:
            return False
        network, now = self._cluster.network, self._cluster.timeline.now
        pairs = itertools.permutations(ring, 2) if connecting else zip(ring, [*ring[1:], ring[0]], strict=True)
        return any(
            not network.dark.isdisjoint((a.number, b.number))
            or network.rules.is_cut(now, a.number, b.number, but="rift")
            or network.rules.is_cut(now, b.number, a.number, but="rift")
            for a, b in pairs
        )
