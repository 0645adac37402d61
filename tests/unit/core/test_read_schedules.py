"""Schedules that were found by reading, each too rare for the simulation to come by."""

from __future__ import annotations

import pytest

from deadpool_plugin.core import api
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.messages import NodeFailed, Prepare, Promise, Propose, Report, Status, Verdict
from deadpool_plugin.core.types import Ballot, SwapPlan, World

from .test_controller import TIMING, decided, formed, hear, said


def leaves(actions: list[api.Action]) -> list[int]:
    return [action.exit_code for action in actions if isinstance(action, api.Leave)]


def kinds(actions: list[api.Action]) -> list[type]:
    return [type(message) for _, message in said(actions)]


def later(controller: Controller, begin: float, end: float, hears: tuple[int, ...] = ()) -> list[api.Action]:
    """Return what it does while a second after the other goes by, in which it hears of those."""
    actions, now = [], begin
    while now < end:
        now += 1.0
        for node in hears:
            actions += hear(controller, node, Report(0), now)
        actions += controller.step(api.Ticked(), now)
    return actions


def test_a_scripts_error_within_a_swap_is_part_of_the_promise_and_no_verdict():
    """The others may be in the next generation by now: they would end with the loss, and these with the error."""
    controller = formed(1)
    hear(controller, 0, Prepare(Ballot(1, 1, 0), (2,)))
    actions = controller.step(api.WorkerFailed(1, 3, "an error"), 0.2)
    assert [m.failed[0].exit_code for _, m in said(actions) if isinstance(m, Promise)] == [3]
    again = controller.step(api.WorkerFailed(1, 3, "the same"), 0.3)
    assert leaves(actions + again) == []


def test_an_error_that_comes_back_within_a_swap_is_no_verdict_either():
    controller = formed(1)
    hear(controller, 0, Status(0, 4, True))
    controller.step(api.WorkerFailed(1, 3, "an error"), 0.1)
    hear(controller, 0, Prepare(Ballot(1, 1, 0), (2,)))
    assert leaves(controller.step(api.WorkerFailed(1, 3, "the same"), 0.3)) == []


def test_the_same_error_without_a_swap_is_a_verdict():
    assert leaves(formed(1).step(api.WorkerFailed(1, 3, "an error"), 0.2)) == [3]


def test_a_good_end_is_believed_also_from_who_is_counted_as_lost():
    """The coordinator that saw all ranks finish may have been counted as lost in the same moment."""
    controller = formed(1)
    controller.step(api.LinkLost(0, "reset"), 0.2)
    assert leaves(hear(controller, 0, Verdict(0, 0, "finished"), 0.3)) == [0]


def test_a_good_end_is_not_believed_once_a_plan_has_been_accepted_or_decided():
    plan, ballot = SwapPlan(World(1, (3, 1, 2)), 4, (0,), (), "store"), Ballot(1, 1, 1)
    controller = formed(2)
    hear(controller, 1, Prepare(ballot, (0,)))
    hear(controller, 1, Propose(ballot, plan))
    assert leaves(hear(controller, 0, Verdict(0, 0, "finished"), 0.3)) == []
    hear(controller, 1, decided(plan, ballot))
    assert leaves(hear(controller, 0, Verdict(0, 0, "finished"), 0.3)) == []


def test_a_newcomer_that_slept_does_not_take_its_own_request_for_contact():
    """It would accuse who rightly counts it as lost, and the others would believe it."""
    controller = Controller(7, TIMING)
    controller.step(api.Joining((0, 1)), 0.0)
    controller.step(api.Ticked(), 14.0)  # it wakes, and asks again
    plan = SwapPlan(World(4, (0, 1), (7,)), 9, (), (), "store", joined=(7,))
    controller.step(api.Received(0, decided(plan)), 14.1)
    actions = controller.step(api.Received(0, Prepare(Ballot(5, 1, 0), (7,), (7,))), 14.2)
    assert leaves(actions) == [87]


def test_a_newcomer_that_asked_long_ago_stands_still_without_an_alarm():
    """Nobody is cut off; its processes wait until a majority is certain to have heard of it."""
    controller = Controller(7, TIMING)
    controller.step(api.Joining((0, 1)), 0.0)
    for now in range(1, 31):
        controller.step(api.Received(0, Status(3, 4, True)), float(now))
        controller.step(api.Ticked(), float(now))
    plan = SwapPlan(World(4, (0, 7, 1)), 9, (), (), "store", joined=(7,))
    actions = controller.step(api.Received(0, decided(plan)), 30.5)
    assert api.PauseWorkers() in actions and "ContactLost" not in emitted(actions)
    actions = hear(controller, 0, Status(4, 9, True, certain=30.6), 31.0)
    assert api.ResumeWorkers() in actions and "ContactRegained" not in emitted(actions)


def emitted(actions: list[api.Action]) -> list[str]:
    return [type(action.event).__name__ for action in actions if isinstance(action, api.Emit)]


def test_a_coordinator_that_hears_a_member_takes_the_end_of_their_link_for_a_rift():
    """The member reported to another coordinator until now, and runs until it has been silent, too."""
    controller = formed(0)
    later(controller, 0.0, 5.0, (1, 2, 3))
    assert Prepare not in kinds(controller.step(api.LinkLost(1, "timed out", silent=True), 5.1))
    assert Prepare not in kinds(later(controller, 5.0, 14.0, (2, 3)))
    assert Prepare in kinds(later(controller, 14.0, 16.0, (2, 3))), "it is silent now"


def test_a_coordinator_that_cannot_mirror_to_whom_it_hears_asks_it_to_leave_in_the_end():
    controller, asked = formed(0), []
    for before, now in ((0.0, 5.0), (5.0, 12.0), (12.0, 16.0)):
        later(controller, before, now, (1, 2, 3))
        actions = controller.step(api.LinkLost(1, "cannot mirror to it", silent=True), now)
        asked.append([(to, message.node) for to, message in said(actions) if isinstance(message, NodeFailed)])
    assert asked == [[], [], [(1, 1)]]


@pytest.mark.parametrize(("silent", "interrupted"), [(False, True), (True, False)])
def test_who_sees_no_majority_by_more_than_silence_interrupts_its_processes_while_it_asks(silent, interrupted):
    """A silent node may still count on a lease, and so do its processes; a link that was reset gives none."""
    controller = Controller(2, TIMING)
    controller.step(api.WorldFormed(World(0, (0, 1, 2, 3), (4,))), 0.0)
    for node in (1, 3):
        controller.step(api.LinkLost(node, "gone", silent), 0.1)
    actions = controller.step(api.LinkLost(4, "gone", silent), 0.2)
    assert leaves(actions) == [] and (0, Report(0)) in said(actions)
    assert any(isinstance(action, api.AbortWorkers) for action in actions) is interrupted
    assert 87 in leaves(later(controller, 0.2, 22.0 if silent else 12.0, (0,)))


def test_a_voter_protects_who_would_coordinate_after_those_that_the_proposer_knows_to_be_gone():
    """It hears node 1, which runs its processes as long as it does; that node 0 has ended has not reached it yet."""
    controller = formed(2)
    later(controller, 0.0, 4.0, (0, 1, 3))
    asked = Prepare(Ballot(1, 1, 3), (0, 1), (1,))
    assert Promise not in kinds(hear(controller, 3, asked, 4.1))
    assert Promise not in kinds(later(controller, 4.0, 13.0, (0, 3)))
    assert Promise in kinds(later(controller, 13.0, 15.0, (0, 3))), "now it is silent here, too"


def test_nobody_is_protected_who_is_not_to_coordinate():
    controller = formed(2)
    hear(controller, 1, Report(0), 4.0)
    assert Promise in kinds(hear(controller, 0, Prepare(Ballot(1, 1, 0), (1,), (1,)), 4.1))
