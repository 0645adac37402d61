"""Hosts that join a running job: as spares, in the place of a loss, while everybody waits; and those that fail to."""

from __future__ import annotations

import random

import pytest

from deadpool_plugin.core import api, events
from deadpool_plugin.core.swaps import CALMS
from deadpool_plugin.core.types import NO_STEP

FULL = {"spares": 0, "wait_for_hosts": True}


def all_protected(job) -> bool:
    """Everybody who lives is in the newest generation, all of whose snapshots are mirrored."""
    newest = max(job.plans, default=0)
    members = [job.nodes[number] for number in job.newest_world.members if job.nodes[number].up]
    floor = job.plans[newest].restore_step if newest else 0
    here = all(node.controller.generation == newest and not node.controller._ctx.swapping for node in members)
    return here and job.checkers.committed.get(newest, NO_STEP) >= floor


def codes_of(job, *lost):
    """The exit codes, which are to be 0 but for hosts that were killed."""
    return {number: code for number, code in job.end().items() if number not in lost}


@pytest.mark.parametrize("seed", range(3))
def test_a_host_joins_as_the_last_spare(start, seed):
    job = start(seed=seed, spares=1, steps=40).train()
    new = job.join()
    assert set(job.end().values()) == {0}
    assert list(job.plans) == [1], "a join costs one regroup"
    assert job.plans[1].joined == (new,) and job.plans[1].world.spares == (3, new)
    assert job.told(events.HostJoined) == [events.HostJoined(new)]
    assert [action.rank for node, action in job.all(api.StartRehearsal) if node == new][:2] == [2, 3]


@pytest.mark.parametrize("seed", range(2))
def test_two_hosts_join_and_take_over(start, seed):
    job = start(seed=seed, spares=1, steps=80).train()
    new = (job.join(), job.join())
    job.until(lambda: len(job.told(events.HostJoined)) == 2 and all_protected(job))
    for lost in (0, 1, 2):
        job.strike("kill", lost)
        job.until(lambda lost=lost: lost not in job.newest_world.members and all_protected(job))
    assert set(codes_of(job, 0, 1, 2).values()) == {0}
    assert set(job.newest_world.node_of) == {3, *new}


@pytest.mark.parametrize("seed", range(3))
def test_a_host_that_joins_soon_after_a_loss_holds_nobody_up(start, seed):
    """For a further loss a plan would wait, as more may follow."""
    job = start(seed=seed, spares=2, steps=60).train()
    job.strike("kill", 1)
    job.until(lambda: job.plans)
    lost_at, new = job.timeline.now, job.join()
    job.until(lambda: job.told(events.HostJoined))
    storm_s = job.timing.slow_after_s
    assert job.timeline.now - lost_at < storm_s, "else this test shows nothing"
    (planned,) = [event for event in job.told(events.SwapPlanned) if event.joined == (new,)]
    assert planned.duration_s < storm_s / CALMS
    assert set(codes_of(job, 1).values()) == {0}


@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize("seed", range(2))
def test_a_member_is_lost_while_a_host_joins(start, seed, lost):
    job = start(seed=seed, spares=1, steps=40).train()
    new = job.join()
    job.until(lambda: job.fenced)
    job.strike("kill", lost)
    assert set(codes_of(job, lost).values()) == {0}
    assert new in job.newest_world.members


@pytest.mark.parametrize("phase", ["asked", "fenced", "proposed", "decided"])
@pytest.mark.parametrize("kind", ["kill", "crash"])
def test_a_host_is_lost_while_it_joins(start, kind, phase):
    job = start(spares=1, steps=40).train()
    new = job.join()
    job.until(
        {
            "asked": lambda: any(new in job.context(number).candidates for number in job.nodes),
            "fenced": lambda: job.fenced,
            "proposed": lambda: any(node.controller._swaps.voter.acceptor.accepted for node in job.nodes.values()),
            "decided": lambda: job.plans,
        }[phase]
    )
    job.hold()
    job.strike(kind, new)
    job.idle(4 * job.timing.slow_after_s)
    assert set(codes_of(job, new).values()) == {0} and new not in job.newest_world.members


@pytest.mark.parametrize("lost", range(3))
def test_everybody_waits_for_a_host(start, lost):
    job = start(seed=lost, **FULL, steps=40).train()
    job.strike("kill", lost)
    job.until(lambda: job.told(events.WaitingForHost))
    job.idle(1.2 * job.timing.decision_timeout_s)
    assert all(node.up for node in job.nodes.values() if node.number != lost) and not job.plans
    new = job.join()
    job.until(lambda: job.plans)
    assert set(codes_of(job, lost).values()) == {0}
    assert job.plans[1].world.node_of == tuple(new if node == lost else node for node in job.world.node_of)
    assert len(job.told(events.WaitingForHost)) == 1


@pytest.mark.parametrize("seed", range(2))
def test_the_waiting_coordinator_is_lost(start, seed):
    job = start(seed=seed, **FULL, active=5, slots=1, copies=2, steps=40).train()
    job.strike("kill", 4)
    job.until(lambda: job.told(events.WaitingForHost))
    job.strike("kill", 0)
    job.idle(2 * job.timing.slow_after_s)
    new = job.join()
    job.idle(1.2 * job.timing.decision_timeout_s)
    assert job.nodes[new].up and not job.plans, "one host is not enough for two, but may stay"
    second = job.join()
    job.until(lambda: job.plans)
    assert set(codes_of(job, 0, 4).values()) == {0}
    assert set(job.plans[1].joined) == {new, second}


def test_waiting_for_a_host_before_training(start):
    job = start(**FULL)
    job.until(lambda: job.told(events.WorldFormed))
    job.strike("kill", 1)
    job.until(lambda: job.told(events.WaitingForHost))
    job.idle(2 * job.timing.slow_after_s)
    job.join()
    assert set(codes_of(job, 1).values()) == {0} and job.plans[1].restore_step == NO_STEP


def test_nobody_waits_for_what_cannot_be_had_back(start):
    job = start(**FULL, active=5, slots=1).train()
    job.strike("kill", 3)
    job.strike("kill", 4)  # the buddy
    assert set(codes_of(job, 3, 4).values()) == {86}
    assert "rank(s) 3" in job.reasons[0]


def test_a_host_that_asks_anew_is_judged_anew(start):
    job = start(spares=1, steps=40).train()
    for number in job.nodes:
        job.feed(number, api.LinkLost(4, "an earlier attempt"))
    new = job.join()
    assert set(job.end().values()) == {0} and job.plans[1].world.spares == (3, new) == (3, 4)


@pytest.mark.parametrize("seed", range(6))
def test_whoever_waits_goes_on_once_enough_hosts_have_joined(start, seed):
    """Losses that `copies` cover, no spare, hosts that come late, in any order: the job ends well."""
    rng = random.Random(seed)
    job = start(seed=seed, **FULL, active=5, slots=1, copies=2, restarts_max=9, steps=60).train()
    victims = rng.sample(range(5), 2)
    for what in rng.sample(["lose", "lose", "join", "join", "process"], 5):
        job.idle(3.0 * rng.random())
        if what == "join":
            job.join()
        elif what == "lose":
            job.until(lambda: all_protected(job) or any(job.context(number).waiting for number in job.nodes))
            job.strike("kill", victims.pop())
            job.idle(0.2)
        elif ranks := [rank for rank in range(5) if job.nodes[job.newest_world.node_of[rank]].processes.of(rank)]:
            job.lose(rng.choice(ranks))
    assert {code for number, code in job.end().items() if number < 5} == {0, None}
