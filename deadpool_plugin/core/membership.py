"""Single-decree Paxos: one plan per generation, decided by the members of the generation before.

Rules of this file: one Acceptor and at most one Proposal per generation and node; both forget everything when the
generation is decided. Any two quorums share a member, so no generation has two worlds (ONE_WORLD_PER_GENERATION).
Source: Lamport, Paxos Made Simple, section 2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .messages import Prepare, Promise
from .types import Ballot, NodeId, SwapPlan, World


def is_quorum(world: World, nodes: Collection[NodeId], witness: bool = False) -> bool:
    """Return whether `nodes` may decide for `world`: more than half, or without a `witness` half with the first one."""
    return 2 * len(nodes) >= len(world.members) and is_quorum_without(world, world.positions.keys() - nodes, witness)


def is_quorum_without(world: World, lost: Collection[NodeId], witness: bool = False) -> bool:
    """Return whether all members but `lost` (distinct members) are a quorum. Costs the same in a world of any size."""
    total, present = len(world.members), len(world.members) - len(lost)
    return 2 * present > total or (2 * present == total and world.active[0] not in lost and not witness)


def is_half(world: World, nodes: Collection[NodeId]) -> bool:
    """Return whether `nodes` are enough to decide what a witness keeps: whatever any half accepts is that one plan."""
    return 2 * len(world.positions.keys() & nodes) >= len(world.members)


def value_of_quorum(world: World, values: Mapping[NodeId, float], least: float, witness: bool) -> float:
    """The largest value such that members with at least that are a quorum; who has none counts as `least`."""
    found = sorted((values.get(node, least) for node in world.members), reverse=True)
    half, odd = divmod(len(found), 2)
    of_a_majority = found[half]
    if odd or witness:
        return of_a_majority
    return max(of_a_majority, min(found[half - 1], values.get(world.active[0], least)))


@dataclass
class Acceptor:
    """A voter's promises for the next generation."""

    promised: Ballot | None = None
    accepted: tuple[Ballot, SwapPlan] | None = None

    def prepare(self, ballot: Ballot) -> bool:
        """Promise to accept nothing below `ballot`; False if a larger one was promised already."""
        if self.promised is not None and ballot < self.promised:
            return False
        self.promised = ballot
        return True

    def accept(self, ballot: Ballot, plan: SwapPlan) -> bool:
        """Accept `plan`; False if a larger ballot was promised meanwhile."""
        if not self.prepare(ballot):
            return False
        self.accepted = (ballot, plan)
        return True


@dataclass
class Proposal:
    """A proposer's current round. First it collects promises, then, once `plan` is set, acceptances."""

    ballot: Ballot
    lost: dict[NodeId, str]
    deadline: float
    silent: tuple[NodeId, ...] = ()
    promises: dict[NodeId, Promise] = field(default_factory=dict)
    plan: SwapPlan | None = None
    accepted: set[NodeId] = field(default_factory=set)
    claim: SwapPlan | None = None  # the plan that the witness was asked to keep
    claimed: bool = False
    waits_with: tuple[NodeId, ...] | None = None  # while it waits for hosts: the candidates that are too few

    def prepare(self) -> Prepare:
        return Prepare(self.ballot, tuple(self.lost), self.silent)

    def is_complete(self, world: World) -> bool:
        """Return whether every member that is not lost has promised. It is asked often, so the count comes first."""
        return len(self.promises) + len(self.lost) >= len(world.members) and not self.missing(world)

    def missing(self, world: World) -> tuple[NodeId, ...]:
        return tuple(node for node in world.members if self.waits_for(node))

    def waits_for(self, member: NodeId) -> bool:
        answered: Collection[NodeId] = self.promises if self.plan is None else self.accepted
        return member not in self.lost and member not in answered

    def inherited(self) -> SwapPlan | None:
        """The plan this round must propose because an earlier one may have been decided: that of the largest ballot."""
        earlier = [promise.accepted for promise in self.promises.values() if promise.accepted is not None]
        return max(earlier, key=lambda pair: pair[0])[1] if earlier else None
