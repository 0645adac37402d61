"""Hosts that `spare_command` brings to a job that lacks some: as many, one more, or none; at once, slowly, or later."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deadpool_plugin.core import api, events
from deadpool_plugin.core.types import NodeId
from simulator.job import Job

Start = Callable[..., Job]
BRING = {"one": 1, "two": 2, "late": 1, "slow": 1}
BRING_NOBODY = ("nobody", "fails", "hangs")


def runs(job: Job) -> list[tuple[NodeId, int]]:
    """Return who has run it, for how many hosts."""
    return [(node, action.hosts) for node, action in job.all(api.RunSpareCommand)]


@pytest.mark.parametrize("command", BRING)
def test_a_lost_spare_comes_back(start: Start, command: str) -> None:
    job = start(command=command, spares=1).train()
    job.hold()
    job.strike("kill", 1)
    job.until(lambda: len(job.told(events.HostJoined)) == BRING[command])
    job.idle(4 * job.timing.slow_after_s)
    assert runs(job) == [(0, 1)] * (2 if command == "late" else 1), "a second host is one more, and is not asked for"
    assert len(job.newest_world.spares) == BRING[command]
    job.strike("kill", 2)
    job.until(lambda: 2 not in job.newest_world.members)
    codes = job.end()
    members = job.newest_world.members  # a further host may be on its way when the job ends
    assert {codes[number] for number in members} == {0} and not {1, 2} & {*members}


@pytest.mark.parametrize("command", BRING)
def test_a_job_that_waits_gets_its_host(start: Start, command: str) -> None:
    job = start(command=command, spares=0, wait_for_hosts=True).train()
    job.strike("kill", 2)
    codes = {number: code for number, code in job.end().items() if number < 2}
    assert set(codes.values()) == {0}
    assert [plan.lost_nodes for plan in job.plans.values() if plan.lost_nodes] == [(2,)]


@pytest.mark.parametrize("command", BRING_NOBODY)
def test_a_command_that_brings_nobody_is_tried_again_and_costs_nothing(start: Start, command: str) -> None:
    job = start(command=command, spares=1).train()
    job.hold()
    job.strike("kill", 1)
    job.until(lambda: len(runs(job)) == 3)
    failures = job.told(events.SpareCommandFailed)
    assert [failure.retry_s for failure in failures] == [job.timing.slow_after_s, 2 * job.timing.slow_after_s]
    assert not job.told(events.HostJoined) and len(job.plans) == 1
    new = job.join()
    job.until(lambda: job.newest_world.spares == (new,))
    assert {code for number, code in job.end().items() if number != 1} == {0}


def test_every_missing_host_is_asked_for(start: Start) -> None:
    job = start(command="one", spares=3, active=4).train()
    job.hold()
    job.strike("kill", 6)
    job.strike("kill", 5)
    job.until(lambda: len(job.told(events.HostJoined)) == 1)
    asked = sum(hosts for _, hosts in runs(job))
    assert asked == 2


def test_the_next_coordinator_runs_it_after_a_pause(start: Start) -> None:
    job = start(command="slow", spares=3, steps=400).train()
    job.hold()
    job.strike("kill", 5)
    job.until(lambda: runs(job) == [(0, 1)])
    job.strike("kill", 0)
    lost_at = job.timeline.now
    job.until(lambda: len(runs(job)) == 2)
    assert runs(job)[1] == (1, 2) and job.timeline.now - lost_at > 0.9 * job.timing.slow_after_s
    job.until(lambda: job.told(events.HostJoined))
    assert {code for number, code in job.end().items() if number not in (0, 5)} == {0}


def test_a_job_without_a_loss_never_runs_it(start: Start) -> None:
    job = start(command="one", spares=1, steps=40)
    assert set(job.end().values()) == {0} and not runs(job)
