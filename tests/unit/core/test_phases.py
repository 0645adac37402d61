"""phases.py: every move of the table is made by some schedule, none besides, and the README shows the table."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from deadpool_plugin.core import io
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.messages import Status
from deadpool_plugin.core.phases import MOVES, IllegalMove, Phase, diagram, moved
from deadpool_plugin.core.policy import Policy
from deadpool_plugin.core.types import NO_STEP, SwapPlan, World

from .cluster import TIMING, Cluster
from .test_controller import PLAN, decided, formed, hear

README = Path(__file__).resolve().parents[3] / "deadpool_plugin" / "core" / "README.md"
WAIT = Policy(wait_for_hosts=True, restarts_max=9)


class Watched(Cluster):
    """Notes every move of every node, also those within one step."""

    def __init__(self, *arguments, **more):
        self.moves: set[tuple[Phase, Phase]] = set()
        super().__init__(*arguments, **more)
        for node in self.nodes.values():
            self.watch(node)

    def watch(self, node) -> None:
        controller, mark = node.controller, node.controller._mark

        def noted() -> None:
            before = controller.phase
            mark()
            self.moves.add((before, controller.phase))

        controller._mark = noted

    def join(self, number) -> None:
        super().join(number)
        self.watch(self.nodes[number])


def moves_of(cluster: Watched) -> set[tuple[Phase, Phase]]:
    assert cluster.run()
    return cluster.moves


def losses(policy=Policy()) -> Watched:
    cluster = Watched(World(0, (0, 1, 2), (3,)), seed=1, policy=policy)
    cluster.form()
    return cluster


def during_training() -> Watched:
    cluster = losses()
    assert cluster.run(lambda: bool(cluster.said("Mirrored")) and cluster.knows_of_training())
    cluster.kill(0)
    assert cluster.run(lambda: 1 in cluster.plans)
    cluster.kill_rank(1, 1)
    return cluster


def before_training() -> Watched:
    cluster = losses()
    cluster.kill(1)
    return cluster


def while_nobody_stands_by(train: bool, stop: bool = False) -> Watched:
    """Node 2 is lost and everybody waits; then a host joins, or a person ends it."""
    cluster = Watched(World(0, (0, 1, 2)), seed=1, policy=WAIT)
    cluster.form()
    if train:
        assert cluster.run(lambda: bool(cluster.said("Mirrored")) and cluster.knows_of_training())
    cluster.kill(2)
    assert cluster.run(lambda: bool(cluster.said("WaitingForHost")))
    cluster.idle(5.0)
    if stop:
        cluster.nodes[1].inputs.append(io.StopRequested("operator", 143))
    else:
        cluster.join(7)
    return cluster


def stopped_at(phase: Phase) -> Watched:
    """A person ends the job through a node in `phase`."""
    cluster = losses()
    if phase is not Phase.STARTING:
        assert cluster.run(lambda: cluster.knows_of_training())
        cluster.join(8)
    found = lambda: [node for node in cluster.nodes.values() if node.controller.phase is phase]  # noqa: E731
    assert cluster.run(lambda: bool(found()))
    cluster.feed(found()[0], io.StopRequested("operator", 143))
    return cluster


def single(controller: Controller, *inputs: io.Input) -> set[tuple[Phase, Phase]]:
    """The moves of one controller by itself."""
    phases = [controller.phase]
    for event in inputs:
        controller.step(event, 0.1)
        phases.append(controller.phase)
    return {(before, after) for before, after in pairwise(phases)}


def test_every_move_of_the_table_is_made_and_no_other():
    made = set()
    for cluster in (
        during_training(),
        before_training(),
        while_nobody_stands_by(train=True),
        while_nobody_stands_by(train=False),
        while_nobody_stands_by(train=True, stop=True),
        *(stopped_at(phase) for phase in Phase if phase not in (Phase.OUTSIDE, Phase.WAITING, Phase.ENDED)),
    ):
        made |= moves_of(cluster)
    made |= single(formed(3), io.Received(0, decided(PLAN)))
    made |= single(formed(3), io.Received(0, Status(0, 3, True)), io.Received(0, decided(PLAN)))
    made |= single(Controller(0, TIMING), io.StopRequested("operator", 143))
    made |= single(Controller(9, TIMING), io.Joining((0, 1)))
    changes = {(before, after) for before, after in made if before is not after}
    assert changes == {(before, after) for before, moves in MOVES.items() for after in moves}


def test_a_move_the_table_lacks_raises():
    assert moved(Phase.FENCED, Phase.RESTORING) is Phase.RESTORING
    assert moved(Phase.ENDED, Phase.ENDED) is Phase.ENDED
    with pytest.raises(IllegalMove, match="ENDED -> TRAINING"):
        moved(Phase.ENDED, Phase.TRAINING)


@pytest.mark.parametrize("event", [io.WorldFormed(World(0, (0, 1))), io.Joining((0, 1))])
def test_a_world_is_met_once(event):
    with pytest.raises(IllegalMove):
        formed(0).step(event, 0.1)


def test_a_start_over_that_was_decided_elsewhere_is_no_move():
    controller = formed(3)
    hear(controller, 0, decided(SwapPlan(World(1, (0, 1, 3)), NO_STEP, (2,), (), "")))
    assert controller.phase is Phase.STARTING and controller.generation == 1


def test_the_readme_shows_the_table():
    assert f"```mermaid\n{diagram()}\n```" in README.read_text()
