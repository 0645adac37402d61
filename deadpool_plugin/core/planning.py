"""From a loss to a plan: who takes the lost ranks, to which step everybody goes back, where lost state comes from.

Rules of this file: a function of its arguments; a new node takes a lost node's ranks as a whole; no plan is a result
with a reason, not an exception. May import ledger, placement and types only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .ledger import Ledger, RestorePoint
from .placement import world_after
from .types import NO_STEP, NodeId, Rank, Step, SwapPlan, Unrecoverable, World, listed


@dataclass(frozen=True)
class Situation:
    """The knowledge of a proposer when all promises are there.

    Args: ledger: the survivors' holdings, taken after they fenced this generation. stores: what they offer.
        newest_committed: the newest step somebody knows to be committed and no plan has undone.
        may_start_over: nothing is committed and nobody knows of training, so the script may begin again.
        copies: on how many other nodes each snapshot shall be. racks: of the hosts that have joined.
        able: the spares that have rehearsed some rank.
    """

    world: World
    ledger: Ledger
    lost: Collection[NodeId]
    stores: Mapping[NodeId, str]
    newest_committed: Step = NO_STEP
    lost_ranks: tuple[Rank, ...] = ()
    joined: tuple[NodeId, ...] = ()
    may_start_over: bool = False
    copies: int = 1
    racks: Mapping[NodeId, str] = field(default_factory=dict)
    able: tuple[NodeId, ...] = ()

    @property
    def survivors(self) -> tuple[NodeId, ...]:
        return tuple(node for node in self.world.members if node not in self.lost)

    @property
    def lost_nodes(self) -> tuple[NodeId, ...]:
        return tuple(node for node in self.world.members if node in self.lost)


@dataclass(frozen=True)
class NoSpare:
    """Nothing is lost, but nobody is there to take over: one may wait for a host, or end with `verdict`."""

    verdict: Unrecoverable


def plan_swap(case: Situation) -> SwapPlan | NoSpare | Unrecoverable:
    """The plan for the world without its lost nodes, or why there is none.

    Returns: a plan whose `store` is "" if no survivor offers one (yet), and always if the script begins again.
    """
    point = case.ledger.restore_point(case.world, case.survivors, case.copies, case.newest_committed)
    if isinstance(point, str) and case.may_start_over:
        point = RestorePoint(NO_STEP, ())
    if isinstance(point, str):
        return _unrecoverable(case, point, case.newest_committed)
    # Its coordinator may have died before it told anybody what was committed.
    newest = max(case.newest_committed, point.step)
    after = world_after(case.world, case.lost, case.joined, case.racks, case.copies, case.able)
    if after is None:
        spares = sum(spare not in case.lost for spare in case.world.spares) + len(case.joined)
        what = "no spare is left" if spares == 0 else f"only {spares} spare(s) are left"
        return NoSpare(_unrecoverable(case, f"{what} for lost node(s) {listed(case.lost_nodes)}", newest))
    return SwapPlan(
        world=after,
        restore_step=point.step,
        lost_nodes=case.lost_nodes,
        sources=point.sources,
        store="" if point.step == NO_STEP else choose_store(case.world, case.survivors, case.stores),
        lost_ranks=case.lost_ranks,
        joined=case.joined,
    )


def _unrecoverable(case: Situation, reason: str, newest_committed: Step) -> Unrecoverable:
    ranks = tuple(rank for rank, node in enumerate(case.world.node_of) if node in case.lost)
    return Unrecoverable(reason, ranks, newest_committed)


def choose_store(world: World, survivors: Collection[NodeId], stores: Mapping[NodeId, str]) -> str:
    """The address offered by the lowest surviving active node that offers one; then by a spare; else ""."""
    order = sorted(node for node in world.active if node in survivors) + [n for n in world.spares if n in survivors]
    return next((stores[node] for node in order if stores.get(node)), "")
