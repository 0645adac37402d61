"""More is lost than `copies` cover, and the job goes back behind a step that was committed: it says so and goes on."""

from __future__ import annotations

from support import present

from deadpool_plugin.core.api import HoldingsDropped
from deadpool_plugin.core.types import NO_STEP, NodeId
from simulator import run
from simulator.cluster import Cluster
from simulator.network import faked
from simulator.schedule import scenario

QUIET = {
    "faults": (), "drift": 0.0, "active": 4, "spares": 2, "slots": 1, "shards": 4, "copies": 1, "racks": 0,
    "latency_s": 0.02,
}  # fmt: skip
LOST = 0
"""The rank whose node is lost together with the newest committed copy on its buddy."""


def step(cluster: Cluster) -> None:
    assert cluster.timeline.step(), "nothing happens any more"


def keeper(cluster: Cluster, committed: int) -> NodeId | None:
    """The buddy that holds the newest committed step of rank LOST and the one before."""
    held = [node for node in cluster.nodes.values() if LOST in node.store.mirrored]
    whole = [n.number for n in held if {(LOST, committed), (LOST, committed - 1)} <= {*n.store.listed}]
    return whole[0] if whole and committed >= 6 else None


def go_behind(cluster: Cluster) -> int:
    """The buddy finds its newest copy damaged, and the node that runs the rank dies. Returns the step undone."""
    known = lambda: cluster.nodes[1].controller._ctx.committed  # noqa: E731
    while keeper(cluster, known()) is None:
        step(cluster)
    undone = known()
    buddy = cluster.nodes[keeper(cluster, undone) or 0]
    cluster.checkers.corrupted()
    cluster.strikes.struck["corrupt"] += 1
    cluster.blows.blamed.add(buddy.number)
    buddy.store.mirrored[LOST].invalidate(undone)
    buddy.loop.call_soon(buddy.feed, HoldingsDropped(LOST, undone - 1))
    cluster.blows.kill(cluster.nodes[LOST])
    return undone


def test_what_is_undone_is_said_and_done_again():
    cluster = Cluster(scenario(8, fixed=QUIET))  # in one of five, a rank overwrites the older step before it is fenced
    with faked():
        undone = go_behind(cluster)
        while not cluster.plans:
            step(cluster)
        assert cluster.plans[1].restore_step == undone - 1 and cluster.events["StepsUndone"] == 1
        members = [cluster.nodes[number] for number in cluster.plans[1].world.members]
        while not all(node.controller.generation == 1 for node in members):
            step(cluster)
            for node in members:
                if node.controller.generation == 1 and cluster.checkers.committed.get(1, NO_STEP) < undone:
                    assert present(node.agent)._workers.committed < undone, (
                        "it was committed in a history that did not happen"
                    )
                    assert node.controller._ctx.newest_committed < undone
    run.play(cluster)
    assert cluster.events["JobFinished"] and cluster.events["StepsUndone"] == 1
