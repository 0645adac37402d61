"""Hosts that join a running job: as spares, in the place of a loss, while everybody waits; and those that fail to."""

from __future__ import annotations

import pytest
from support import expect

from deadpool_plugin.core import io
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.messages import Goodbye, JoinRequest, Prepare, Refused, Report, Status, Verdict
from deadpool_plugin.core.policy import Policy
from deadpool_plugin.core.types import Ballot, SwapPlan, World

from .cluster import TIMING, Cluster
from .test_cluster import finished
from .test_controller import decided
from .test_failures import SEEDS, WORLD, started

WAIT = Policy(wait_for_hosts=True)
FULL = World(0, (0, 0, 1, 1, 2, 2))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_host_joins_as_the_last_spare(seed):
    cluster = started(seed, last_step=9)
    cluster.join(7)
    assert cluster.run()
    finished(cluster)
    assert set(cluster.plans) == {1}, "a join costs one regroup"
    assert cluster.plans[1].joined == (7,) and cluster.plans[1].world.spares == (3, 7)
    assert cluster.said("HostJoined") == [{"joined": 7}]
    assert [action.rank for action in cluster.nodes[7].rehearsals] == [2, 3]


@pytest.mark.parametrize("seed", SEEDS)
def test_two_hosts_join_and_take_over(seed):
    cluster = started(seed, last_step=16)
    cluster.join(7)
    cluster.join(8)
    assert cluster.run(lambda: len(cluster.said("HostJoined")) == 2 and cluster.generation_protected())
    for lost in (0, 1, 2):
        cluster.kill(lost)
        assert cluster.run(lambda lost=lost: lost not in cluster.newest().world.members)
        assert cluster.run(cluster.generation_protected)
    assert cluster.run()
    finished(cluster)
    assert set(cluster.newest().world.node_of) == {3, 7, 8}


@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize("seed", range(4))
def test_a_member_is_lost_while_a_host_joins(seed, lost):
    cluster = started(seed, last_step=9)
    cluster.join(7)
    assert cluster.run(lambda: any(node.fence for node in cluster.nodes.values()))
    cluster.kill(lost)
    assert cluster.run()
    finished(cluster)
    assert 7 in cluster.newest().world.members


@pytest.mark.parametrize("phase", ["asked", "fenced", "proposed", "decided"])
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_host_is_lost_while_it_joins(seed, silent, phase):
    cluster = started(seed, last_step=9)
    cluster.join(7)
    until = {
        "asked": lambda: any(7 in node.controller._ctx.candidates for node in cluster.nodes.values()),
        "fenced": lambda: any(node.fence for node in cluster.nodes.values()),
        "proposed": lambda: cluster.has_proposed(1),
        "decided": lambda: 1 in cluster.plans,
    }[phase]
    assert cluster.run(until)
    if silent:
        cluster.nodes[7].frozen = cluster.hold = True
        cluster.idle(4 * TIMING.silent_after_s)
        cluster.hold = False
    else:
        cluster.kill(7)
    assert cluster.run(lambda: all(node.exit for n, node in cluster.nodes.items() if n != 7))
    finished(cluster, {7})


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("lost", range(3))
def test_everybody_waits_for_a_host(seed, lost):
    cluster = started(seed, world=FULL, policy=WAIT, last_step=9)
    cluster.kill(lost)
    assert cluster.run(lambda: bool(cluster.said("WaitingForHost")))
    cluster.idle(1.2 * TIMING.decision_timeout_s)
    assert all(node.up for n, node in cluster.nodes.items() if n != lost) and not cluster.plans
    cluster.join(7)
    assert cluster.run()
    finished(cluster)
    assert cluster.plans[1].world.node_of == tuple(7 if node == lost else node for node in FULL.node_of)
    assert len(cluster.said("WaitingForHost")) == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_waiting_coordinator_is_lost(seed):
    world = World(0, (0, 1, 2, 3, 4))
    cluster = started(seed, world=world, policy=Policy(copies=2, wait_for_hosts=True), last_step=9)
    cluster.kill(4)
    assert cluster.run(lambda: bool(cluster.said("WaitingForHost")))
    cluster.kill(0)
    cluster.idle(20.0)
    cluster.join(7)
    cluster.idle(1.2 * TIMING.decision_timeout_s)
    assert cluster.nodes[7].up and not cluster.plans, "one host is not enough for two, but may stay"
    cluster.join(8)
    assert cluster.run()
    finished(cluster)
    assert set(cluster.plans[1].joined) == {7, 8}


def test_waiting_for_a_host_before_training():
    cluster = Cluster(FULL, policy=WAIT)
    cluster.form()
    cluster.kill(1)
    assert cluster.run(lambda: bool(cluster.said("WaitingForHost")))
    cluster.idle(20.0)
    cluster.join(9)
    assert cluster.run()
    finished(cluster)
    assert cluster.plans[1].restore_step == -1


def test_nobody_waits_for_what_cannot_be_had_back():
    cluster = started(1, world=World(0, (0, 1, 2, 3, 4)), policy=WAIT)
    cluster.hold = True
    cluster.kill(3)
    cluster.kill(4)  # the buddy
    assert cluster.run()
    assert {cluster.exits()[n] for n in (0, 1, 2)} == {86}
    assert "rank(s) 3" in cluster.nodes[0].left[1]


# -- the host's own controller ---------------------------------------------------------------------------------


def joining(members=(0, 1)) -> tuple[Controller, list[io.Action]]:
    controller = Controller(7, TIMING)
    return controller, controller.step(io.Joining(members), 0.0)


def test_it_asks_every_member_each_heartbeat():
    controller, actions = joining()
    assert actions == [io.Send(0, JoinRequest()), io.Send(1, JoinRequest())]
    assert controller.step(io.Ticked(), 0.2) == []
    controller.step(io.LinkLost(0, "reset"), 0.3)
    assert controller.step(io.Ticked(), 0.6) == [io.Send(1, JoinRequest())]


def test_it_becomes_a_member_by_the_plan_that_has_it():
    plan = SwapPlan(World(4, (0, 1), (7,)), 9, (), (), "store", joined=(7,))
    controller, _ = joining()
    ballot = Ballot(5, 1, 0)
    assert controller.step(io.Received(0, Prepare(ballot, (1,))), 0.2) == [], "not a voter yet"
    actions = controller.step(io.Received(1, decided(plan)), 0.3)
    assert actions[:2] == [io.AbortWorkers(4), io.Reconfigure(plan)]
    assert controller.world == plan.world
    assert io.AbortWorkers(5) in actions, "what was said early is heard now"


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (io.Received(0, Verdict(3, 86, "over")), 86),
        (io.Received(0, Verdict(3, 0, "finished")), 0),
        (io.Received(0, decided(SwapPlan(World(4, (0, 1)), 9, (7,), (), "store"))), 87),
        (io.LinkLost(0, "reset"), 87),
        (io.Received(0, Goodbye(3)), 87),
        (io.Received(0, Goodbye(3, Verdict(3, 0, "finished"))), 0),
        (io.StopRequested("operator", 143), 143),
    ],
)
def test_what_ends_the_attempt(event, code):
    controller, _ = joining((0,))
    assert expect(io.Leave, controller.step(event, 0.2)[-1]).exit_code == code
    assert controller.ended


def test_its_patience_ends_but_not_while_the_job_waits():
    controller, _ = joining((0,))
    for now in range(0, 200, 10):
        controller.step(io.Received(0, Status(3, 1, False, waiting=True)), float(now))
        controller.step(io.Ticked(), float(now))
    assert not controller.ended
    end = 190.0 + TIMING.decision_timeout_s
    controller.step(io.Ticked(), end)
    assert not controller.ended, "it slept, and an answer may be queued"
    while not controller.ended:
        end += TIMING.heartbeat_interval_s
        actions = controller.step(io.Ticked(), end)
    assert end == 190.0 + 2 * TIMING.decision_timeout_s
    assert actions[-1].exit_code == 87 and "taken this host in" in actions[-1].reason


def test_a_member_is_told_the_plan_again_and_a_former_one_too():
    controller = Controller(0, TIMING)
    controller.step(io.WorldFormed(World(0, (0, 1), (2, 3))), 0.0)
    plan = SwapPlan(World(1, (0, 1), (2, 7)), 4, (3,), (), "store", joined=(7,))
    controller.step(io.Received(2, decided(plan)), 0.1)
    for node in (7, 3):
        assert controller.step(io.Received(node, JoinRequest()), 0.2) == [io.Send(node, decided(plan))]


def test_a_host_that_asks_anew_is_judged_anew():
    cluster = started(2, world=WORLD)
    for node in cluster.nodes.values():
        cluster.feed(node, io.LinkLost(7, "an earlier attempt"))
    cluster.join(7)
    assert cluster.run()
    finished(cluster)
    assert cluster.plans[1].world.spares == (3, 7)


def test_who_has_fenced_the_generation_ends_it_though_the_reason_is_gone():
    controller = Controller(0, TIMING)
    controller.step(io.WorldFormed(World(0, (0, 1, 2))), 0.0)
    controller.step(io.WorkerReady(0), 0.1)
    for node in (1, 2):
        controller.step(io.Received(node, Report(0, ready=(node,))), 0.1)
    first = controller.step(io.Received(7, JoinRequest()), 0.2)
    assert io.Send(1, Prepare(Ballot(1, 1, 0), ())) in first and io.AbortWorkers(1) in first
    controller.step(io.LinkLost(7, "reset"), 0.3)
    second = controller.step(io.Received(1, Refused(Ballot(1, 1, 0), Ballot(1, 4, 2))), 0.4)
    assert io.Send(1, Prepare(Ballot(1, 5, 0), ())) in second
