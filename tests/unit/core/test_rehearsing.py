"""core/spares.py, `Rehearsing`: which hosts a spare rehearses, in which order, and what it tells of them."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from support import expect, present

from deadpool_plugin.core import api, events
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.messages import Decided, Prepare, Promise, Rehearse, Report, Status
from deadpool_plugin.core.placement import rehearsal_order, takers_of
from deadpool_plugin.core.policy import Policy, Timing
from deadpool_plugin.core.spares import WAYS
from deadpool_plugin.core.types import Ballot, SwapPlan, World

WORLD = World(0, (0, 0, 1, 1, 2, 2), (3,))
TIMING = Timing(
    heartbeat_interval_s=1.0, silent_after_s=10.0, phase_timeout_s=20.0, decision_timeout_s=100.0, start_timeout_s=100.0
)


@given(st.integers(1, 9), st.integers(1, 9), st.dictionaries(st.integers(0, 8), st.integers(1, 5)))
def test_spares_divide_the_hosts_and_each_rehearses_all_of_them_in_the_end(hosts, spares, faults):
    world = World(0, tuple(range(hosts)), tuple(range(hosts, hosts + spares)))
    orders = [rehearsal_order(world, spare, faults) for spare in world.spares]
    assert all(sorted(order) == list(range(hosts)) for order in orders)
    share = -(-hosts // spares)
    assert {node for order in orders for node in order[:share]} == {*range(hosts)}
    if hosts >= spares:
        assert len({order[0] for order in orders}) == spares
    worst = max(faults.get(node, 0) for node in range(hosts))
    assert faults.get(orders[0][0], 0) == worst, "hosts with faults come first"


class Spare:
    """The controller of a node that stands by in a job that trains. `actions`: of the newest input."""

    def __init__(self, world: World = WORLD, node: int = 3, policy: Policy = Policy()) -> None:
        self.now = 0.0
        self.controller = Controller(node, TIMING, policy)
        self.feed(api.WorldFormed(world))
        self.hear(Status(0, 0, True))
        for slot in (0, 1):
            self.hear(Rehearse(0, slot, slot))

    def feed(self, event: api.Input) -> Spare:
        self.now += 0.01
        self.actions = list(self.controller.step(event, self.now))
        return self

    def hear(self, message, sender: int = 0) -> Spare:
        return self.feed(api.Received(sender, message))

    def rehearsed(self, *ranks: int) -> Spare:
        for rank in ranks:
            self.feed(api.SpareRehearsed(rank % 2, rank))
        return self

    @property
    def started(self) -> list[int]:
        return [action.rank for action in self.actions if isinstance(action, api.StartRehearsal)]

    @property
    def ended(self) -> list[int]:
        return [action.rank for action in self.actions if isinstance(action, api.EndRehearsal)]

    @property
    def said(self) -> list[events.Event]:
        return [action.event for action in self.actions if isinstance(action, api.Emit)]

    @property
    def report(self) -> Report:
        reports = [action.message for action in self.actions if isinstance(action, api.Send)]
        return expect(Report, reports[-1])


def test_a_spare_rehearses_its_first_host_alone_and_then_the_others():
    spare = Spare().rehearsed(0)
    assert spare.started == []
    spare.rehearsed(1)
    assert events.SpareReady(3, (0, 1), 1, 3) in spare.said and spare.started == [2, 3, 4, 5]
    assert spare.report.able and spare.report.rehearsed == ((0, 0), (1, 1))
    spare.rehearsed(3, 4, 5)
    assert events.SpareReady(3, (4, 5), 2, 3) in spare.said and spare.started == []
    spare.rehearsed(2)
    assert events.SpareReady(3, (2, 3), 3, 3) in spare.said
    assert spare.controller._processes.rehearsing.rehearsed == {(0, 0), (0, 2), (0, 4), (1, 1), (1, 3), (1, 5)}
    assert spare.feed(api.Ticked()).started == []


def test_of_many_hosts_a_spare_rehearses_a_few_at_once():
    spare = Spare(world=World(0, tuple(rank // 2 for rank in range(20)), (99,)), node=99).rehearsed(0, 1)
    assert spare.started == [*range(2, 2 + 2 * WAYS)]
    spare.rehearsed(4)
    assert spare.started == []
    spare.rehearsed(5)
    assert spare.started == [2 + 2 * WAYS, 3 + 2 * WAYS]


def test_a_host_that_has_lost_processes_comes_first():
    spare = Spare()
    plan = SwapPlan(World(1, WORLD.node_of, WORLD.spares), 4, (), (), "store", lost_ranks=(4,))
    spare.hear(Decided(plan, Ballot(1, 1, 0)))
    spare.hear(Status(1, 0, True))
    spare.rehearsed(0, 1)
    assert spare.started == [4, 5, 2, 3]


def test_a_spare_without_room_stops_at_what_it_has():
    spare = Spare().rehearsed(0, 1)
    spare.feed(api.SpareFull(0, 2))
    assert spare.ended == [4, 5] and spare.started == [2], "one that is under way, and less likely lost, makes room"
    spare.feed(api.SpareFull(0, 2))
    assert spare.ended == [2, 3] and events.SpareFull(3, 1, 3) in spare.said
    assert spare.feed(api.Ticked()).started == []
    assert spare.feed(api.SpareFull(1, 3)).said == [], "said once"
    spare.feed(api.SpareFailed(0, 2, "it was ended"))
    assert not spare.controller._ctx.ended and spare.started == []


def test_a_spare_without_room_gives_up_the_host_that_is_least_likely_lost():
    spare = Spare().rehearsed(0, 1, 2, 3)
    plan = SwapPlan(World(1, WORLD.node_of, WORLD.spares), 4, (), (), "store", lost_ranks=(5,))
    spare.hear(Decided(plan, Ballot(1, 1, 0)))
    spare.hear(Status(1, 0, True))
    assert spare.feed(api.Ticked()).started == [], "it is under way already"
    spare.feed(api.SpareFull(0, 4))
    assert spare.ended == [2, 3] and spare.started == [4]
    assert events.CoverLost(3, (2, 3)) in spare.said
    assert spare.report.rehearsed == ((0, 0), (1, 1))


def test_a_spare_whose_memory_runs_short_gives_up_all_hosts_but_one():
    spare = Spare().rehearsed(0, 1, 2, 3, 4, 5)
    assert spare.feed(api.SpareShort()).ended == [4, 5] and spare.report.rehearsed == ((0, 0), (0, 2), (1, 1), (1, 3))
    assert spare.feed(api.SpareShort()).ended == [2, 3]
    assert spare.feed(api.SpareShort()).ended == [] and spare.feed(api.Ticked()).started == []


def test_the_loss_of_a_process_that_waits_does_not_make_a_spare_unable():
    spare = Spare(policy=Policy(restarts_max=1)).rehearsed(0, 1, 2, 3, 4, 5)
    spare.feed(api.SpareFailed(0, 2, "signal 9"))
    assert events.CoverLost(3, (2,)) in spare.said and spare.report.able and spare.started == [2]
    spare.rehearsed(2).feed(api.SpareFailed(0, 2, "signal 9"))
    assert spare.started == [] and spare.ended == [2, 3], "it has died as often as is allowed"
    assert events.SpareFull(3, 2, 3) in spare.said and not spare.controller._ctx.ended
    assert spare.feed(api.Ticked()).started == []


def test_a_host_that_cannot_be_rehearsed_costs_neither_the_spare_nor_the_others():
    spare = Spare(policy=Policy(restarts_max=1)).rehearsed(0, 1)
    assert spare.feed(api.SpareFailed(0, 2, "no such file")).started == [2]
    assert spare.report.able and spare.report.unable == ""
    spare.feed(api.SpareFailed(0, 2, "no such file"))
    assert not spare.controller._ctx.ended and events.SpareFull(3, 1, 3) in spare.said
    rehearsing = spare.controller._processes.rehearsing
    assert rehearsing.able and rehearsing.rehearsed == {(0, 0), (1, 1)}


def test_what_has_followed_too_far_is_rehearsed_again():
    spare = Spare().rehearsed(0, 1, 2, 3)
    spare.feed(api.SpareDropped(0, 0))
    assert spare.report.rehearsed == ((0, 2), (1, 1), (1, 3)) and spare.started == [0]


def test_a_promise_says_what_is_rehearsed_and_what_is_under_way():
    spare = Spare().rehearsed(0, 1, 2)
    spare.hear(Prepare(Ballot(1, 1, 0), ()))
    told = [action.message for action in spare.actions if isinstance(action, api.Send)]
    (promise,) = [message for message in told if isinstance(message, Promise)]
    assert promise.covers == ((0, True), (1, True), (2, True), (3, False), (4, False), (5, False))


def test_nothing_is_rehearsed_any_more_where_ranks_run():
    spare = Spare().rehearsed(0, 1, 2, 3)
    plan = SwapPlan(World(1, (0, 0, 3, 3, 2, 2)), 4, (1,), (), "store")
    spare.hear(Decided(plan, Ballot(1, 1, 0)))
    assert spare.controller._processes.rehearsing.covers == ()
    assert present(spare.controller.world).spares == ()


@pytest.mark.parametrize(
    ("covers", "taker"),
    [
        ({3: {0: True, 1: True}, 4: {2: True, 3: True}}, 4),
        ({3: {0: True, 1: True, 2: True}, 4: {2: True, 3: True}}, 4),  # all of it
        ({3: {0: True, 1: True, 2: False, 3: False}, 4: {4: True, 5: True}}, 3),  # that is under way
        ({3: {0: True, 1: True}, 4: {2: False, 3: False}}, 3),  # who has rehearsed nothing may compile for minutes
        ({}, 4),  # which is to rehearse it first
    ],
)
def test_a_lost_host_goes_to_the_spare_that_has_rehearsed_it(covers, taker):
    assert takers_of(World(0, WORLD.node_of, (3, 4)), {1}, covers=covers) == {1: taker}
