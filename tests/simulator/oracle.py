"""Somebody who sees the whole job says what was recoverable, and holds plans, verdicts and exits to it.

Rules of this file: dumb on purpose: it looks at every node's memory itself and counts by hand. A node may be taken for
lost only if something was done to it, or to its links; who survives by the deciding node's count, is well and holds
every rank's snapshot of some step together makes a verdict wrong.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from deadpool_plugin.core import api
from deadpool_plugin.core.events import JobStopped
from deadpool_plugin.core.pairing import MISPAIRS
from deadpool_plugin.core.processes import RAISES_MAX
from deadpool_plugin.core.types import EXIT_FENCED, EXIT_UNRECOVERABLE, NO_STEP, NodeId, Step, SwapPlan, World

from .memory import served
from .violation import Violation

if TYPE_CHECKING:
    from .cluster import Cluster
    from .node import Node


def is_majority(world: World, nodes: Collection[NodeId], witness: bool) -> bool:
    """More than half of the members, or just half with the first active node among them (or with the witness)."""
    there = len(set(world.members) & set(nodes))
    half = len(world.members) / 2
    return there > half or (there == half and (witness or world.node_of[0] in nodes))


def restorable_steps(cluster: Cluster, survivors: list[NodeId]) -> list[Step]:
    """The steps of which every rank's header and payload are in the survivors' memory."""
    nodes = [cluster.nodes[number] for number in survivors]
    steps = sorted({step for node in nodes for _, step in node.store.listed})
    return [
        step
        for step in steps
        if all(
            any(served(node, rank, step)[0] for node in nodes)
            and any(served(node, same, step)[1] for node in nodes for same in cluster.replicas[rank])
            for rank in range(cluster.ranks)
        )
    ]


def judge_plan(cluster: Cluster, plan: SwapPlan) -> None:
    """A plan goes back no further than what was committed, if not more is lost than `copies` cover."""
    generation = plan.world.generation - 1
    committed = cluster.checkers.committed.get(generation, NO_STEP)
    covered = len(plan.lost_nodes) <= cluster.policy.copies and not cluster.strikes.struck["corrupt"]
    if covered and plan.restore_step < committed:
        raise Violation(
            "RESTORABLE",
            f"generation {generation + 1} goes back to step {plan.restore_step}, step {committed} was committed",
        )
    # Step 0 is what a script that begins again comes to.
    trained = any(before <= generation and step > 0 for before, step in cluster.checkers.committed.items())
    if plan.restore_step == NO_STEP and trained:
        raise Violation("RESTORABLE", f"generation {generation + 1} begins the script again after a committed step")
    _must_be_blamed(cluster, plan.lost_nodes, min(plan.world.members), f"generation {generation + 1}")


def _must_be_blamed(cluster: Cluster, lost: tuple[NodeId, ...], by: NodeId, who: str) -> None:
    """Whom `by` counts as lost was struck; or `by` was, and they had turned away from it, so that it heard no more."""
    blamed = cluster.blows.blamed
    gone = {number for number, node in cluster.nodes.items() if not node.up}  # and was judged when it left
    innocent = sorted(set(lost) - blamed - gone)
    if by in blamed:
        innocent = [number for number in innocent if by not in cluster.nodes[number].controller._ctx.suspects]
    if innocent:
        raise Violation("RIGHT_VERDICT", f"{who} counts nodes {innocent} as lost, to which nothing was done")


def judge_verdict(cluster: Cluster, node: Node, stopped: JobStopped) -> None:
    """`node` has decided that the job ends."""
    context = node.controller._ctx
    code, reason = stopped.exit_code, stopped.reason
    if code != EXIT_UNRECOVERABLE:
        if code and not cluster.raised:
            raise Violation("RIGHT_VERDICT", f"node {node.number} ends the job with {code}: {reason}")
        blamed = re.match(r"script of rank (\d+) ", reason)
        if blamed and context.has_trained and cluster.blows.raises[int(blamed[1])] < RAISES_MAX:
            raise Violation("RIGHT_VERDICT", f"node {node.number} blames a script too early: {reason}")
        if reason.startswith("the script of every rank") and len(+cluster.blows.raises) < cluster.ranks:
            raise Violation("RIGHT_VERDICT", f"node {node.number} blames every script, but not all raised: {reason}")
        return
    if cluster.strikes.struck["hang"] + cluster.strikes.struck["skip"] > 2 and "got any further" in reason:
        return  # three processes have hung one after the other in one step
    if any(excuse in reason for excuse in cluster.excuses):
        return
    if reason.startswith(MISPAIRS):
        if max(cluster.blows.mispaired.values(), default=0) < 2:
            raise Violation("RIGHT_VERDICT", f"no rank has mispaired twice, and node {node.number} says: {reason}")
        return
    world, lost = context.world, tuple(context.suspects)
    if node.number not in cluster.newest_world.members:
        return  # the others have gone on without it, so it speaks for itself only
    own, lost_ranks = world.ranks_of(node.number), stopped.lost_ranks
    if own and set(own) <= set(lost_ranks):
        lost += (node.number,)  # it gives itself up
    survivors = [number for number in world.members if number not in lost]
    if node.number in cluster.blows.blamed and not is_majority(world, survivors, cluster.policy.witness):
        return  # it has been cut off or stood still, and speaks for itself only
    _must_be_blamed(cluster, lost, node.number, f"the verdict of node {node.number}")
    well = [number for number in survivors if cluster.nodes[number].up]
    kept = cluster.witnessed.get(world.generation + 1)
    others_were_first = kept is not None and node.number not in kept.world.members
    if not is_majority(world, well, cluster.policy.witness) or others_were_first:
        return
    floor = context.plan.restore_step if context.plan is not None else 0
    steps = [step for step in restorable_steps(cluster, well) if step >= floor]
    went_on = any(plan.restore_step != NO_STEP for plan in cluster.plans.values())
    may_start_over = not (cluster.checkers.committed or cluster.events["TrainingStarted"] or went_on)
    free = len(set(world.spares) & set(well)) + len(context.joinable)
    vacant = len(set(world.active) - set(survivors))
    if (steps or may_start_over) and (free >= vacant or cluster.policy.wait_for_hosts):
        raise Violation(
            "RIGHT_VERDICT",
            f"node {node.number} calls the job unrecoverable ({reason}), but nodes {well} hold steps {steps} and "
            f"{free} host(s) are free for {vacant}",
        )


def judge_exit(cluster: Cluster, node: Node, action: api.Leave) -> None:
    """`node` leaves; out of the job it may be only if something was done to it, or to so many that nobody decides.

    Whoever comes when the job has ended may leave, too, or who has been told of some members only (who told it counts
    the others as lost, and the one that decides may be among them); and of two that count each other as lost, one of
    which was struck, either may be the one that goes.
    """
    if action.exit_code == EXIT_FENCED and node.number not in cluster.blows.blamed:
        world = _newest_world_known(cluster)
        if any(_count_each_other_as_lost(node, cluster.nodes[other]) for other in cluster.blows.blamed):
            return
        up = {member for member in world.members if cluster.nodes[member].up}
        joining = node.controller._joining
        if node.controller.world is None and (not up or (joining is not None and not up <= set(joining._members))):
            return
        if is_majority(world, set(world.members) - cluster.blows.blamed, cluster.policy.witness):
            raise Violation("RIGHT_VERDICT", f"node {node.number}, to which nothing was done, leaves: {action.reason}")


def _newest_world_known(cluster: Cluster) -> World:
    """Return the newest world of nodes that are up: whoever decided a newer one told nobody who could tell others."""
    worlds = [node.controller.world for node in cluster.nodes.values() if node.up and node.controller.world is not None]
    return max(worlds, key=lambda world: world.generation, default=cluster.newest_world)


def _count_each_other_as_lost(node: Node, other: Node) -> bool:
    ours, theirs = node.controller._ctx.watch.evidence, other.controller._ctx.watch.evidence
    return other.up and other.number in ours and node.number in theirs
