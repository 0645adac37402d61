"""From a loss to a plan: who takes the lost ranks, to which step everybody goes back, where lost state comes from.

Rules of this file: a function of its arguments; a new node takes a lost node's ranks as a whole; no plan is a result
with a reason, not an exception. May import ledger, placement and types only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .ledger import Ledger
from .placement import world_after
from .types import NodeId, Step, SwapPlan, Unrecoverable, World


def plan_swap(
    world: World, ledger: Ledger, lost: Collection[NodeId], stores: Mapping[NodeId, str], newest_committed: Step
) -> SwapPlan | Unrecoverable:
    """The plan for `world` without its `lost` nodes, or why there is none.

    Args: ledger: the survivors' holdings, taken after they fenced this generation. stores: what they offer.
    Returns: a plan whose `store` is "" if no survivor offers one (yet).
    """
    survivors = [node for node in world.members if node not in lost]
    lost_nodes = tuple(node for node in world.members if node in lost)
    lost_ranks = tuple(rank for rank, node in enumerate(world.node_of) if node in lost)

    point = ledger.restore_point(world, survivors)
    if not isinstance(point, str):
        newest_committed = max(newest_committed, point.step)  # its coordinator may have died before it told anybody
    after = world_after(world, lost)
    if after is None:
        spares = sum(spare not in lost for spare in world.spares)
        what = "no spare is left" if spares == 0 else f"only {spares} spare(s) are left"
        return Unrecoverable(f"{what} for lost node(s) {_listed(lost_nodes)}", lost_ranks, newest_committed)
    if isinstance(point, str):
        return Unrecoverable(point, lost_ranks, newest_committed)
    return SwapPlan(
        world=after,
        restore_step=point.step,
        lost_nodes=lost_nodes,
        sources=point.sources,
        store=choose_store(world, survivors, stores),
    )


def choose_store(world: World, survivors: Collection[NodeId], stores: Mapping[NodeId, str]) -> str:
    """The address offered by the lowest surviving active node that offers one; then by a spare; else ""."""
    order = sorted(node for node in world.active if node in survivors) + [n for n in world.spares if n in survivors]
    return next((stores[node] for node in order if stores.get(node)), "")


def _listed(numbers: Collection[int]) -> str:
    return ", ".join(map(str, numbers))
