"""core/contact.py: two members that do not hear each other, while the coordinator hears both."""

from __future__ import annotations

import msgspec
import pytest
from support import expect

from deadpool_plugin.core import api, local
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.events import Note
from deadpool_plugin.core.messages import Decided, NodeFailed, Report, Status
from deadpool_plugin.core.types import Ballot, Holding, SwapPlan, World

from .test_controller import TIMING, hear, said

WORLD = World(0, (0, 1, 2, 3), (4,))


def formed(node: int) -> Controller:
    controller = Controller(node, TIMING)
    controller.step(api.WorldFormed(WORLD), 0.0)
    return controller


def asked_to_leave(
    coordinator: Controller, *complaints: tuple[int, int], now: float = 0.1, every_s: float = 10.0
) -> list[int]:
    """Return who is asked to leave once a coordinator that hears all has every (sender, node) of `complaints`."""
    asked = []
    for sender, node in complaints:
        for heard in (1, 2, 3, 4):
            hear(coordinator, heard, Report(0), now)
        actions = hear(coordinator, sender, NodeFailed(0, node, "cannot mirror to it", silent=True), now)
        asked += [to for to, message in said(actions) if isinstance(message, NodeFailed) and message.node == to]
        assert not any(isinstance(action, api.AbortWorkers) for action in actions)
        now += every_s
    return asked


def commit(coordinator: Controller, step: int, now: float) -> None:
    for rank, node in enumerate(WORLD.node_of):
        held = (Holding(rank, step, True, (rank,)), Holding((rank - 1) % 4, step, True, ((rank - 1) % 4,)))
        if node == 0:
            for holding in held:
                coordinator.step(api.SnapshotHeld(holding, 0), now)
        else:
            hear(coordinator, node, Report(0, holdings=held), now)
    assert coordinator._ctx.committed == step


def test_said_twice_it_is_the_one_complained_of_that_goes():
    assert asked_to_leave(formed(0), (1, 2)) == []
    assert asked_to_leave(formed(0), (1, 2), (1, 2)) == [2]
    assert asked_to_leave(formed(0), (1, 2), (1, 2), (1, 2), every_s=4.0) == []
    assert asked_to_leave(formed(0), (1, 2), (1, 2), (1, 2), (1, 2), every_s=4.0) == [2]


def test_said_of_different_nodes_it_waits():
    assert asked_to_leave(formed(0), (1, 2), (3, 4), (2, 1)) == []


def test_who_does_not_hear_the_most_others_goes():
    assert asked_to_leave(formed(0), (3, 1), (1, 2), (1, 2)) == [1]
    assert asked_to_leave(formed(0), (1, 2), (2, 1), (1, 2)) == [2]


def test_a_spare_goes_before_who_runs_ranks():
    assert asked_to_leave(formed(0), (4, 1), (2, 1), (4, 1)) == [4]


def test_people_are_told_of_a_broken_pair_once():
    coordinator, notes = formed(0), []
    for sender, node in [(1, 2), (2, 1), (1, 2)]:
        for heard in (1, 2):
            hear(coordinator, heard, Report(0), 1.0)
        actions = hear(coordinator, sender, NodeFailed(0, node, "cannot mirror to it", silent=True), 1.0)
        notes += [action.event for action in actions if isinstance(action, api.Emit)]
    assert len(notes) == 1 and expect(Note, notes[0]).text.startswith("nodes 1 and 2 cannot reach each other")


def test_both_ends_complain_and_one_of_them_goes():
    """They are each other's buddies: without both of them nothing is left to go back to."""
    assert asked_to_leave(formed(0), (1, 2), (2, 1), (1, 2), (2, 1), (1, 2), every_s=10.0) == [2]


def test_when_two_racks_lose_each_other_one_node_goes_at_a_time():
    """Their nodes may hold each other's snapshots, and a newcomer needs its time."""
    pairs = [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert asked_to_leave(formed(0), *pairs, *pairs, *pairs, every_s=4.0) == [3]


def test_as_long_as_steps_are_committed_both_stay():
    coordinator = formed(0)
    for step in range(4):
        assert asked_to_leave(coordinator, (1, 2), now=step * 10.0) == []
        commit(coordinator, step, step * 10.0 + 1.0)
    complaints = [(1, 2)] * 4
    assert asked_to_leave(coordinator, *complaints[:2], now=40.0) == [], "a step takes as long"
    assert asked_to_leave(coordinator, *complaints[:1], now=60.0) == [2]


def test_a_member_that_does_not_lead_asks_nobody():
    assert asked_to_leave(formed(1), (3, 2), (3, 2)) == []


def test_who_is_asked_leaves_with_the_reason():
    actions = hear(formed(2), 0, NodeFailed(0, 2, "nodes 1 and 2 cannot reach each other"))
    left = [action for action in actions if isinstance(action, api.Leave)]
    assert len(left) == 1 and "cannot reach each other" in left[0].reason


def test_a_member_says_it_again_whenever_it_has_tried_in_vain_again():
    member = formed(1)
    lost = api.LinkLost(2, "cannot mirror to it", silent=True)

    def complaints(event: api.Input, now: float) -> int:
        return sum(isinstance(message, NodeFailed) for _, message in said(member.step(event, now)))

    assert complaints(lost, 1.0) == 1
    hear(member, 0, Status(0, -1, True), 1.1)
    assert complaints(api.Ticked(), 1.2) == 0
    assert complaints(lost, 1.3) == 1
    assert complaints(api.LinkLost(2, "reset"), 1.4) == 0


@pytest.mark.parametrize(("node", "other", "says"), [(1, 2, True), (2, 1, True), (1, 4, False), (4, 1, False)])
def test_two_that_run_ranks_say_it_for_as_long_as_their_link_is_broken(node: int, other: int, says: bool):
    """A job that stands still mirrors nothing that could fail; a spare stands in nobody's way."""
    member = formed(node)
    member.step(api.LinkLost(other, "timed out", silent=True), 1.0)
    for now in (1.2, 1.4, 1.6):
        hear(member, 0, Status(0, -1, True), now)
        actions = member.step(api.LinkLost(other, "timed out", silent=True, still=True), now)
        assert any(isinstance(message, NodeFailed) for _, message in said(actions)) == says


def test_the_coordinator_counts_its_own_broken_links_alike():
    coordinator = formed(0)
    for now in (1.0, 6.0, 11.5):
        for heard in (1, 2, 3, 4):
            hear(coordinator, heard, Report(0), now)
        actions = coordinator.step(api.LinkLost(2, "timed out", silent=True, still=now > 1.0), now)
        asked = [message.node for to, message in said(actions) if isinstance(message, NodeFailed)]
    assert asked == [2]


def broke(coordinator: Controller, sender: int, node: int, now: float) -> str:
    """Return what becomes of a broken connection that `sender` tells of: "in place", who is asked to leave, or ""."""
    for heard in (1, 2, 3, 4):
        hear(coordinator, heard, Report(coordinator.generation), now)
    actions = hear(coordinator, sender, Report(coordinator.generation, stuck="it broke", broken=(node,)), now)
    asked = [message.node for to, message in said(actions) if isinstance(message, NodeFailed) and message.node == to]
    begun = any(isinstance(action, api.AbortWorkers) for action in actions)
    assert len(asked) + begun <= 1
    return "in place" if begun else str(asked[0]) if asked else ""


def rejoined(coordinator: Controller, now: float, world: World = WORLD) -> None:
    """The next generation, everybody as before, gone on from what was committed."""
    generation = coordinator.generation + 1
    plan = SwapPlan(
        msgspec.structs.replace(world, generation=generation), max(coordinator._ctx.newest_committed, 0), (), (), "s"
    )
    hear(coordinator, 1, Decided(plan, Ballot(generation, 1, 1)), now)
    assert coordinator.generation == generation


def test_a_training_connection_that_breaks_is_seen_to_in_place_then_one_side_goes():
    coordinator = formed(0)
    assert broke(coordinator, 1, 2, 1.0) == "in place"
    rejoined(coordinator, 2.0)
    assert broke(coordinator, 3, 1, 3.0) == "1", "what both have in common"
    assert broke(coordinator, 2, 3, 3.1) == "", "one at a time"


def test_long_after_the_last_one_it_is_seen_to_in_place_again():
    coordinator = formed(0)
    assert broke(coordinator, 1, 2, 1.0) == "in place"
    rejoined(coordinator, 2.0)
    coordinator._ctx.learn_committed(2)
    assert broke(coordinator, 1, 2, 3.0) == "in place"


def test_without_a_spare_it_is_seen_to_in_place_for_as_long_as_steps_are_committed():
    coordinator, alone = formed(0), World(0, (0, 1, 2, 3, 4))
    coordinator._ctx.form(alone)
    assert broke(coordinator, 1, 2, 1.0) == "in place"
    rejoined(coordinator, 2.0, alone)
    coordinator._ctx.learn_committed(1)
    assert broke(coordinator, 2, 1, 3.0) == "in place"
    rejoined(coordinator, 4.0, alone)
    assert broke(coordinator, 2, 1, 5.0) == "1", "nothing comes of it"


def test_a_member_says_that_its_connection_broke_for_as_long_as_the_generation_lasts():
    member = formed(1)
    lost = local.ConnectionBroke(1, 0, (2,), "Connection reset by peer")

    def reports(event: api.Input, now: float) -> list[Report]:
        return [message for _, message in said(member.step(event, now)) if isinstance(message, Report)]

    assert [one.broken for one in reports(lost, 1.0)] == [(2,)]
    assert "Connection reset" in member._ctx.stuck
    assert reports(local.ConnectionBroke(1, 0, (3,), "again"), 1.1) == [], "what follows from the first"
    assert not any(isinstance(action, api.Leave) for action in member.step(api.Ticked(), 1.2))
    other = formed(1)
    (report,) = [
        m for _, m in said(other.step(local.ConnectionBroke(1, 0, (2, 3), "reset"), 1.0)) if isinstance(m, Report)
    ]
    assert report.broken == (1,), "its other end is not known"
    assert not other.step(local.ConnectionBroke(1, 7, (2,), "of another generation"), 1.1)
