"""spares.py: a host that asks to become a member, and who is asked. Whole jobs: simulator/test_hosts_join.py."""

from __future__ import annotations

import pytest
from support import expect

from deadpool_plugin.core import api
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.messages import Goodbye, JoinRequest, Prepare, Refused, Report, Status, Verdict
from deadpool_plugin.core.types import Ballot, SwapPlan, World

from .test_controller import TIMING, decided


def joining(members=(0, 1)) -> tuple[Controller, list[api.Action]]:
    controller = Controller(7, TIMING)
    return controller, controller.step(api.Joining(members), 0.0)


def test_it_asks_every_member_each_heartbeat():
    controller, actions = joining()
    assert actions == [api.Send(0, JoinRequest()), api.Send(1, JoinRequest())]
    assert controller.step(api.Ticked(), 0.2) == []
    controller.step(api.LinkLost(0, "reset"), 0.3)
    assert controller.step(api.Ticked(), 1.1) == [api.Send(1, JoinRequest())]


def test_it_becomes_a_member_by_the_plan_that_has_it():
    plan = SwapPlan(World(4, (0, 1), (7,)), 9, (), (), "store", joined=(7,))
    controller, _ = joining()
    ballot = Ballot(5, 1, 0)
    assert controller.step(api.Received(0, Prepare(ballot, (1,))), 0.2) == [], "not a voter yet"
    actions = controller.step(api.Received(1, decided(plan)), 0.3)
    assert actions[:2] == [api.AbortWorkers(4), api.Reconfigure(plan)]
    assert controller.world == plan.world
    assert api.AbortWorkers(5) in actions, "what was said early is heard now"


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (api.Received(0, Verdict(3, 86, "over")), 86),
        (api.Received(0, Verdict(3, 0, "finished")), 0),
        (api.Received(0, decided(SwapPlan(World(4, (0, 1)), 9, (7,), (), "store"))), 87),
        (api.LinkLost(0, "reset"), 87),
        (api.Received(0, Goodbye(3)), 87),
        (api.Received(0, Goodbye(3, Verdict(3, 0, "finished"))), 0),
        (api.StopRequested("operator", 143), 143),
    ],
)
def test_what_ends_the_attempt(event, code):
    controller, _ = joining((0,))
    assert expect(api.Leave, controller.step(event, 0.2)[-1]).exit_code == code
    assert controller._ctx.ended


def test_its_patience_ends_but_not_while_the_job_waits():
    controller, _ = joining((0,))
    for now in range(0, 200, 10):
        controller.step(api.Received(0, Status(3, 1, False, waiting=True)), float(now))
        controller.step(api.Ticked(), float(now))
    assert not controller._ctx.ended
    end = 190.0 + TIMING.decision_timeout_s
    controller.step(api.Ticked(), end)
    assert not controller._ctx.ended, "it slept, and an answer may be queued"
    while not controller._ctx.ended:
        end += TIMING.heartbeat_interval_s
        actions = controller.step(api.Ticked(), end)
    assert end == 190.0 + 2 * TIMING.decision_timeout_s
    assert actions[-1].exit_code == 87 and "taken this host in" in actions[-1].reason


def test_a_member_is_told_the_plan_again_and_a_former_one_too():
    controller = Controller(0, TIMING)
    controller.step(api.WorldFormed(World(0, (0, 1), (2, 3))), 0.0)
    plan = SwapPlan(World(1, (0, 1), (2, 7)), 4, (3,), (), "store", joined=(7,))
    controller.step(api.Received(2, decided(plan)), 0.1)
    for node in (7, 3):
        assert controller.step(api.Received(node, JoinRequest()), 0.2) == [api.Send(node, decided(plan))]


def test_who_has_fenced_the_generation_ends_it_though_the_reason_is_gone():
    controller = Controller(0, TIMING)
    controller.step(api.WorldFormed(World(0, (0, 1, 2))), 0.0)
    controller.step(api.WorkerReady(0), 0.1)
    for node in (1, 2):
        controller.step(api.Received(node, Report(0, ready=(node,))), 0.1)
    controller._ctx.learn_committed(0)
    first = controller.step(api.Received(7, JoinRequest()), 0.2)
    assert api.Send(1, Prepare(Ballot(1, 1, 0), ())) in first and api.AbortWorkers(1) in first
    controller.step(api.LinkLost(7, "reset"), 0.3)
    second = controller.step(api.Received(1, Refused(Ballot(1, 1, 0), Ballot(1, 4, 2))), 0.4)
    assert api.Send(1, Prepare(Ballot(1, 5, 0), ())) in second
