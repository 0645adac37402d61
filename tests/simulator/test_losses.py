"""Hosts lost one by one, together and one after the other: what the job does, says, and ends with."""

from __future__ import annotations

from itertools import combinations

import pytest

from deadpool_plugin.core import api, events
from deadpool_plugin.core.types import NO_STEP


def well(job, *lost):
    """The exit codes when everybody but `lost` ends well."""
    return {number: 0 for number in job.nodes if number not in lost} | {number: job.exits[number] for number in lost}


def test_a_job_without_losses(start):
    job = start(steps=60)
    assert set(job.end().values()) == {0} and not job.plans
    assert sorted(node for node, _ in job.all(api.StartWorkers)) == [*range(5)]
    assert len(job.told(events.TrainingStarted)) == len(job.told(events.Mirrored)) == 1
    steps = [event.step for event in job.told(events.StepCommitted)]
    assert steps == sorted(steps)
    ready = job.told(events.SpareReady)
    assert {event.spare: event.ranks for event in reversed(ready)} == {3: (0, 1), 4: (2, 3)}, "first"
    assert not job.told(events.NodeLost)


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("lost", range(5))
@pytest.mark.parametrize("kind", ["kill", "crash"])
def test_one_loss_of_any_node_is_one_swap(start, kind, lost, at):
    job = start(seed=lost).train(at)
    if kind == "crash" or lost > 2:  # the job could end before anybody has noticed
        job.hold()
    job.strike(kind, lost)
    job.until(lambda: job.plans)
    job.end()
    assert job.exits == well(job, lost) and job.exits[lost] is None
    assert list(job.plans) == [1] and job.plans[1].lost_nodes == (lost,)
    assert {node.controller.generation for node in job.nodes.values() if node.number != lost} == {1}
    assert len(job.told(events.SwapPlanned)) == len(job.told(events.Unprotected)) == 1
    if lost < 3:
        assert len(job.told(events.SwapDone)) == 1 and job.told(events.NodeLost)[0].lost == (lost,)


@pytest.mark.parametrize("lost", range(3))
def test_a_node_lost_when_a_script_has_ended(start, lost):
    job = start(seed=lost)
    job.until(lambda: any(process.finished for node in job.nodes.values() for process in node.processes.alive))
    job.strike("kill", lost)
    job.end()
    assert job.exits == well(job, lost) and list(job.plans) == [1]


def test_the_last_host_says_that_nobody_is_left_to_hold_its_snapshots(start):
    job = start(active=1, spares=1).train()  # node 0 decides a tie
    job.strike("kill", 1)
    job.until(lambda: job.told(events.Unprotected))
    assert [fields.reason for fields in job.told(events.Unprotected)] == [
        "no other host is left to hold snapshots; to do: deadpool join"
    ]


@pytest.mark.parametrize("lost", range(5))
def test_a_stopped_node_that_wakes_up_leaves(start, lost):
    job = start(seed=lost).train(3)
    job.hold()
    job.freeze(lost)
    job.until(lambda: job.plans)
    job.thaw(lost)
    job.end()
    assert job.exits == well(job, lost) and job.exits[lost] == 87


@pytest.mark.parametrize("pair", [*combinations(range(5), 2)])
def test_a_connection_that_is_reset_is_made_again(start, pair):
    job = start(seed=pair[1], steps=40).train()
    job.strike("break", pair[0], pick=pair[1] - 1)
    assert set(job.end().values()) == {0} and not job.plans


@pytest.mark.parametrize("pair", [*combinations(range(5), 2)])
def test_a_connection_that_is_lost_for_good_costs_one_of_its_two_nodes(start, pair):
    """Each takes its end for that of the other."""
    job = start(seed=pair[1], steps=40).train()
    job.strike("rift", pair[0], pick=pair[1] - 1)
    for node, other in (pair, pair[::-1]):
        job.feed(node, api.LinkLost(other, "cut"))
    codes = job.end()
    assert {codes.pop(pair[0]), codes.pop(pair[1])} == {0, 87}
    assert set(codes.values()) == {0}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("newcomer_has_it", [False, True])
def test_a_second_coordinator_is_lost_during_the_swap(start, newcomer_has_it, seed):
    """Rank 0 is mirrored by node 1: without both it is lost, unless node 3 has it by then."""
    job = start(seed=seed, slots=1).train(3)
    newcomer = job.nodes[3].processes
    job.strike("kill", 0)
    job.until(lambda: newcomer.of(0) and newcomer.of(0).in_training if newcomer_has_it else job.fenced)
    job.strike("kill", 1)
    job.end()
    if newcomer_has_it:
        assert job.exits == well(job, 0, 1) and list(job.plans) == [1, 2]
    else:
        assert set(job.reasons) == {2, 3, 4} and not job.plans
        assert all(job.exits[number] == 86 and "rank(s) 0" in job.reasons[number] for number in (2, 3, 4))


@pytest.mark.parametrize("seed", [1, 2])
def test_losses_one_after_another_while_spares_last(start, seed):
    job = start(seed=seed, steps=40).train()
    for generation, lost in enumerate((0, 2), start=1):
        job.strike("kill", lost)
        job.until(lambda n=generation: len(job.told(events.Mirrored)) > n and len(job.told(events.SwapDone)) == n)
    job.end()
    assert job.exits == well(job, 0, 2)
    assert job.plans[2].world.spares == ()


@pytest.mark.parametrize("copies", [1, 2])
def test_a_whole_rack_is_lost_and_the_job_goes_on(start, copies):
    """Two active nodes at once, with one copy each: they stand together, so their mirrors do not."""
    job = start(active=4, slots=1, racks=3, copies=copies).train()
    job.strike("kill", 0)
    job.strike("kill", 3)
    job.end()
    assert job.exits == well(job, 0, 3) and set(job.newest_world.active) == {1, 2, 4, 5}


@pytest.mark.parametrize("lost", range(3))
def test_no_spare_is_a_verdict_known_to_all(start, lost):
    job = start(seed=lost, spares=0).train(3)
    job.strike("kill", lost)
    job.end()
    others = {*range(3)} - {lost}
    assert {job.exits[number] for number in others} == {86}
    assert all("no spare" in job.reasons[number] and f"node {lost}" in job.reasons[number] for number in others)
    stopped = job.told(events.JobStopped)
    assert len(stopped) == len(others)
    assert all(one.lost_ranks == job.world.ranks_of(lost) and one.newest_committed >= 1 for one in stopped)


@pytest.mark.parametrize(("active", "lost", "code"), [(2, 0, 86), (2, 1, 86), (1, 0, 86), (1, 1, 0)])
def test_of_two_nodes_one_is_lost(start, active, lost, code):
    """The half with the active node decides; the spare alone cannot know that it is not the one cut off."""
    job = start(active=active, spares=2 - active, steps=40).train(3)
    job.strike("kill", lost)
    assert job.end()[1 - lost] == code


@pytest.mark.parametrize("lost", range(5))
def test_a_loss_before_training_begins_the_script_again(start, lost):
    job = start(seed=lost)
    job.until(lambda: job.all(api.StartWorkers))
    assert not job.told(events.TrainingStarted)
    job.strike("kill", lost)
    job.end()
    assert job.exits == well(job, lost)
    assert job.plans[1].restore_step == NO_STEP
    assert {node for node, _ in job.all(api.StartWorkers)} >= {*range(5)} - {lost}
    assert len(job.told(events.TrainingStarted)) == len(job.told(events.Mirrored)) == 1


def test_a_loss_before_training_without_a_spare_is_a_verdict(start):
    job = start(spares=0, slots=1)
    job.until(lambda: job.told(events.WorldFormed))
    job.strike("kill", 1)
    job.end()
    assert [job.exits[number] for number in (0, 2)] == [86, 86]
    assert "no spare is left" in job.reasons[2] and "no checkpoint was saved" in job.reasons[2]


@pytest.mark.parametrize("lost", range(3))
def test_replicas_need_no_payload_mirrors(start, lost):
    """Ranks 0 and 2 keep the same payload, on different nodes, and so do 1 and 3."""
    job = start(seed=lost, active=2, spares=1, shards=2, steps=40).train(3)
    job.strike("kill", lost)
    job.end()
    assert job.exits == well(job, lost) and list(job.plans) == [1]


@pytest.mark.parametrize("number", range(5))
def test_a_node_that_gives_up_costs_nobody_else(start, number):
    job = start(seed=number).train()
    job.strike("give_up", number)
    job.end()
    assert job.exits == well(job, number) and job.exits[number] == 87
    assert any("its launcher ended it" in event.evidence for event in job.told(events.NodeLost))


def test_stop_requested_reaches_all(start):
    job = start().train()
    job.strike("stop", 4)
    assert set(job.end().values()) == {130}
