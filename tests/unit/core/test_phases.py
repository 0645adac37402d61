"""controller.py: every move of the table is made by some inputs, none besides, and the README shows the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadpool_plugin.core import api
from deadpool_plugin.core.controller import MOVES, Controller, IllegalMove, Phase
from deadpool_plugin.core.messages import Prepare, Status
from deadpool_plugin.core.types import NO_STEP, Ballot, SwapPlan, World

from .test_controller import PLAN, TIMING, WORLD, decided, formed, hear

README = Path(__file__).resolve().parents[3] / "deadpool_plugin" / "core" / "README.md"
MEET, JOIN, STOP = api.WorldFormed(WORLD), api.Joining((0, 1)), api.StopRequested("operator", 143)
RESUME = api.WorldFormed(WORLD, 7)
TRAINS, TRAINS_AGAIN = (api.Received(0, Status(generation, 3, True)) for generation in (0, 1))
ASK, ASK_AGAIN = (api.Received(0, Prepare(Ballot(generation, 1, 0), ())) for generation in (1, 2))
WAIT = api.Received(0, Status(0, 3, True, waiting=True))
DECIDE = api.Received(0, decided(PLAN))
BEGIN_AGAIN = api.Received(0, decided(SwapPlan(World(1, (0, 1, 3)), NO_STEP, (2,), (), "")))
LIVES = (
    (MEET, TRAINS, ASK, DECIDE, TRAINS_AGAIN, STOP),
    (MEET, DECIDE, ASK_AGAIN, STOP),
    (MEET, TRAINS, DECIDE, STOP),
    (MEET, ASK, BEGIN_AGAIN, STOP),
    *((MEET, ASK, WAIT, end) for end in (DECIDE, BEGIN_AGAIN, STOP)),
    *((JOIN, end) for end in (DECIDE, BEGIN_AGAIN, STOP)),
    (RESUME, ASK, STOP),
    (STOP,),
)
"""Inputs of node 3, one after the other."""


def moves_of(controller: Controller, *inputs: api.Input) -> set[tuple[Phase, Phase]]:
    """Every move, also those within one step."""
    made, mark = set(), controller._mark

    def noted() -> None:
        before = controller.phase
        mark()
        made.add((before, controller.phase))

    controller._mark = noted
    for event in inputs:
        controller.step(event, 0.1)
    return made


def test_every_move_of_the_table_is_made_and_no_other():
    made = set().union(*(moves_of(Controller(3, TIMING), *life) for life in LIVES))
    changes = {(before, after) for before, after in made if before is not after}
    assert changes == {(before, after) for before, moves in MOVES.items() for after in moves}


def test_a_move_the_table_lacks_raises():
    controller = formed(3)
    controller.step(TRAINS, 0.1)
    controller.phase = Phase.ENDED
    with pytest.raises(IllegalMove, match="ENDED -> TRAINING"):
        controller.step(api.Ticked(), 0.2)
    assert controller.phase is Phase.ENDED


@pytest.mark.parametrize("event", [api.WorldFormed(World(0, (0, 1))), api.Joining((0, 1))])
def test_a_world_is_met_once(event):
    with pytest.raises(IllegalMove):
        formed(0).step(event, 0.1)


def test_a_start_over_that_was_decided_elsewhere_is_no_move():
    controller = formed(3)
    hear(controller, 0, decided(SwapPlan(World(1, (0, 1, 3)), NO_STEP, (2,), (), "")))
    assert controller.phase is Phase.STARTING and controller.generation == 1


def test_the_readme_shows_the_table():
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.OUTSIDE.name}"]
    lines += [f"    {phase.name}: {phase.name} ({phase.value})" for phase in Phase]
    lines += [f"    {old.name} --> {new.name}: {why}" for old, moves in MOVES.items() for new, why in moves.items()]
    diagram = "\n".join([*lines, f"    {Phase.ENDED.name} --> [*]"])
    assert f"```mermaid\n{diagram}\n```" in README.read_text()
