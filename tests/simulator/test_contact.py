"""Nodes cut off stop before they can be replaced: clocks that drift, links that fall silent, hosts that stand still.

The checkers assert with every plan that nobody who is replaced for its silence still runs anything.
"""

from __future__ import annotations

import random

import pytest

from deadpool_plugin.core import api, events, policy
from deadpool_plugin.core.voter import Voter
from simulator.violation import Violation

SHAPES = {"2+1": {"active": 2, "spares": 1}, "4+1": {"active": 4, "spares": 1}, "4+2": {"active": 4, "spares": 2}}
SLOW, FAST = 0.96, 1.04


@pytest.fixture
def trained(start):
    """Return what begins a job that is in training and then stands still, for two silences at least."""

    def begin(shape="4+1", **fields):
        job = start(**{"slots": 1, **SHAPES[shape], **fields}).train()
        job.hold()
        job.idle(2 * job.timing.silent_after_s)
        assert not job.plans, "a job whose nodes hear each other goes on"
        return job

    return begin


def runs(job, number: int) -> bool:
    node = job.nodes[number]
    return node.up and not job.context(number).paused and any(one.in_training for one in node.processes.alive)


def drawn(seed: int):
    """Who is cut off from whom for how long, and how fast the clocks run."""
    rng = random.Random(seed)
    shape = rng.choice([*SHAPES])
    nodes = sum(SHAPES[shape].values())
    rates = tuple(rng.choice((SLOW, 1.0, FAST)) for _ in range(nodes))
    inside = set(rng.sample(range(nodes), rng.randint(1, min(4, nodes))))
    return shape, rates, inside, rng.random() < 0.5, rng.choice((6.0, 9.2, 10.2, 12.0, 60.0))


CUTS = [
    ("4+1", (SLOW, FAST, FAST, FAST, FAST), {0}, True, 60.0),
    ("4+1", (FAST, FAST, SLOW, FAST, FAST), {2}, True, 60.0),
    ("4+1", (SLOW, SLOW, FAST, FAST, FAST), {0, 1}, True, 60.0),
    *map(drawn, (*range(30), 41, 66, 176)),
]


@pytest.mark.parametrize(("shape", "rates", "inside", "both_ways", "heals_after_s"), CUTS)
def test_whoever_is_cut_off_has_stopped_before_it_is_replaced(start, shape, rates, inside, both_ways, heals_after_s):
    job = start(slots=1, restarts_max=9, **SHAPES[shape])
    for node, rate in zip(job.nodes.values(), rates, strict=True):
        node.loop._rate = rate
    job.train()
    job.hold()
    job.isolate(inside, both_ways=both_ways)
    job.idle(heals_after_s)
    job.heal()
    job.idle(6 * job.timing.silent_after_s)
    codes = job.end()
    assert set(codes.values()) <= {0, 86, 87}
    ends = {codes[number] for number in job.newest_world.members}
    assert ends in ({0}, {86}, {86, 87})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lost", [0, 1])
def test_the_majority_goes_on_without_whoever_is_cut_off(trained, shape, lost):
    job = trained(shape, seed=lost)
    job.isolate([lost])
    job.until(lambda: not runs(job, lost))
    assert not job.plans
    assert job.end() == {number: 87 if number == lost else 0 for number in job.nodes}
    assert all(event.reason for event in job.told(events.ContactLost)) and job.told(events.ContactLost)


def test_a_lease_longer_than_patience_is_found_out(trained, monkeypatch):
    """The checks above can fail: with this one line changed two nodes run the same rank."""
    monkeypatch.setattr(policy.Timing, "lease_s", property(lambda self: 1.3 * self.silent_after_s))
    job = trained()
    job.isolate([2])
    with pytest.raises(Violation, match="node 2 still runs what generation 1 gives away"):
        job.until(lambda: job.plans)


def replaced_by_who_had_lost_it_first(job) -> None:
    """Node 1 does not hear node 0, whom the others hear for some time more."""
    job.isolate([0], [1], both_ways=False)
    job.idle(job.timing.silent_after_s / 2)
    job.isolate([0])
    job.until(lambda: job.plans)


def test_voters_do_not_replace_a_coordinator_that_counts_on_them(trained):
    job = trained()
    replaced_by_who_had_lost_it_first(job)
    assert 0 in job.plans[1].lost_nodes


def test_voters_that_are_not_patient_are_found_out(trained, monkeypatch):
    monkeypatch.setattr(Voter, "_hears_who_is_silent", lambda self, message: False)
    job = trained()
    with pytest.raises(Violation, match="node 0 still runs what generation 1 gives away"):
        replaced_by_who_had_lost_it_first(job)


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_short_silence_costs_nothing_but_its_time(trained, shape, alone):
    """Node 1 is cut off for a while, or node 0 is, the coordinator: then everybody waits."""
    job = trained(shape, seed=3)
    job.isolate([alone])
    job.until(lambda: not runs(job, alone))
    job.heal()
    assert set(job.end().values()) == {0} and not job.plans
    assert len(job.told(events.ContactLost)) == len(job.told(events.ContactRegained)) >= 1


@pytest.mark.parametrize("late", [0, 2])
def test_one_late_agent_costs_no_swap(trained, late):
    """It stands still for most of the patience (swap disk, a throttled group), time and again; all else is well."""
    job = trained(seed=4)
    for _ in range(4):
        job.freeze(late)
        job.idle(0.85 * job.timing.silent_after_s)
        job.thaw(late)
        job.idle(job.timing.silent_after_s)
    assert set(job.end().values()) == {0} and not job.plans


@pytest.mark.parametrize("slow", [0, 2])
def test_a_host_whose_kernel_answers_is_not_lost_for_a_late_agent(trained, slow):
    """It stands still for three patiences: the coordinator, whom all wait for, or another host."""
    job = trained(seed=4)
    job.freeze(slow)
    job.idle(min(3 * job.timing.silent_after_s, 0.8 * job.timing.slow_after_s))
    job.thaw(slow)
    job.idle(2 * job.timing.silent_after_s)
    assert set(job.end().values()) == {0} and not job.plans


@pytest.mark.parametrize("still", [0, 2])
def test_an_agent_that_stands_still_for_good_is_lost_in_the_end(trained, still):
    job = trained(seed=4)
    began = job.timeline.now
    job.freeze(still)
    job.until(lambda: job.plans)
    assert job.plans[1].lost_nodes == (still,) and job.timeline.now - began >= 0.9 * job.timing.slow_after_s
    job.thaw(still)
    assert job.end()[still] == 87


@pytest.mark.parametrize("dark", [0, 2])
def test_a_host_that_lost_its_power_is_replaced_after_one_patience(trained, dark):
    """No sign of life makes up for it, not even that another agent stands still."""
    job = trained(seed=4, active=4, spares=2)
    job.freeze(3)
    job.idle(0.5 * job.timing.slow_after_s)
    job.strike("crash", dark)
    job.until(lambda: dark in job.context(1).suspects)
    assert job.context(1).suspects.keys() == {dark}
    job.thaw(3)
    job.idle(job.timing.silent_after_s)
    assert {code for number, code in job.end().items() if number != dark} == {0}
    assert job.plans[1].lost_nodes == (dark,)


def test_a_host_that_only_its_witnesses_reach_is_not_lost_at_once(trained):
    """Nothing passes between the coordinator and node 2 for longer than the patience."""
    job = trained(seed=4)
    job.isolate([0], [2])
    job.idle(2 * job.timing.silent_after_s)
    assert not job.plans and {node for node, asked in job.all(api.AskHost) if asked.node == 2} == {0, 3, 4}
    job.heal()
    job.idle(2 * job.timing.silent_after_s)
    assert set(job.end().values()) == {0} and not job.plans


@pytest.mark.parametrize("seed", range(4))
def test_loss_and_delay_on_all_links_cost_nobody_its_place(trained, seed):
    job = trained(seed=seed)
    for number in job.nodes:
        job.strike("loss", number, seconds=10.0, strength=1 - 0.7**0.5)
        job.strike("delay", number, seconds=20.0, strength=0.3)
    job.idle(25.0)
    assert set(job.end().values()) == {0} and not job.plans


def test_everybody_stopped_together_goes_on(trained):
    job = trained(seed=5)
    job.freeze(*job.nodes)
    job.idle(3 * job.timing.silent_after_s)
    job.thaw(*job.nodes)
    job.idle(job.timing.silent_after_s)
    assert set(job.end().values()) == {0} and not job.plans


def test_a_silence_of_the_coordinator_that_only_one_has_noticed_costs_nobody(trained):
    job = trained()
    job.isolate([0], [2], both_ways=False)
    job.until(lambda: 0 in job.context(2).suspects)
    job.heal()
    job.idle(4 * job.timing.silent_after_s)
    assert not job.plans and 0 not in job.context(2).suspects
    assert set(job.end().values()) == {0}


@pytest.mark.parametrize("seed", range(6))
def test_who_is_to_lead_is_not_replaced_for_a_silence_from_before(trained, seed):
    """Two members do not hear each other when the coordinator dies. The lower one still runs, and others hear it."""
    job = trained(seed=seed, active=3, spares=3, copies=2)
    job.isolate([1], [2])
    job.until(lambda: 1 in job.context(2).suspects and 2 in job.context(1).suspects)
    job.strike("kill", 0)
    job.until(lambda: job.plans)
    assert job.nodes[1].up and 1 in job.plans[1].world.members
    assert {code for number, code in job.end().items() if number not in (0, 2)} == {0}


def test_a_node_that_is_a_quorum_alone_needs_nobody(trained):
    job = trained(active=1, slots=2)
    job.isolate([0])
    assert job.end() == {0: 0, 1: 86} and not job.told(events.ContactLost)


def test_a_link_that_timed_out_is_no_more_than_silence(trained):
    """Node 4 hears nothing of node 0, and its kernel says so; all others hear it, so node 4 goes."""
    job = trained(seed=6)
    job.isolate([0], [4])
    job.until(lambda: not job.nodes[4].up)
    assert job.nodes[0].up and job.plans[1].lost_nodes == (4,)


def test_one_node_that_does_not_hear_a_healthy_coordinator_goes_itself(trained):
    """Nobody helps it to replace the coordinator, whom everybody else hears."""
    job = trained(seed=2)
    job.isolate([0], [1], both_ways=False)
    job.until(lambda: job.plans and not job.nodes[1].up)
    assert job.plans[1].lost_nodes == (1,) and job.exits[1] == 87


@pytest.mark.parametrize("lost", [0, 1])
def test_of_a_tie_the_half_with_the_first_active_node_goes_on(trained, lost):
    job = trained(active=3, copies=2, seed=5)
    half = {lost, 3}
    job.isolate(half)
    codes = job.end()
    if lost == 0:  # they decide, and have only one spare for two
        assert codes[0] == codes[3] == 86
    assert all(code in (86, 87) for number, code in codes.items() if (number in half) != (0 in half))


def test_processes_of_a_script_that_has_begun_again_are_not_ended_after_a_pause(start):
    job = start()
    job.until(lambda: job.all(api.StartWorkers))
    job.lose(2)
    job.train()
    job.hold()
    job.isolate([0], both_ways=False)
    job.until(lambda: not runs(job, 1))
    job.heal()
    job.until(lambda: runs(job, 1))
    job.idle(6 * job.timing.silent_after_s)
    assert set(job.end().values()) == {0} and len(job.told(events.RankLost)) == 1
