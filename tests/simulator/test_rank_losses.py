"""Processes lost on living nodes: replaced in place, within their budget, or elsewhere; a script's own errors end the
job."""

from __future__ import annotations

import pytest

from deadpool_plugin.core import api, events
from deadpool_plugin.core.swaps import CALMS
from deadpool_plugin.core.types import NO_STEP

HOMES = (0, 0, 1, 1, 2, 2)
KILLED, RAISED = -9, 3


def heal(job, rank: int, exit_code: int = KILLED) -> None:
    """Lose a process, until its replacement trains."""
    done = len(job.told(events.SwapDone))
    job.lose(rank, exit_code)
    job.until(lambda: len(job.told(events.SwapDone)) > done)


@pytest.mark.parametrize("rank", range(6))
@pytest.mark.parametrize("exit_code", [KILLED, RAISED])
def test_a_lost_process_is_replaced_on_its_node(start, exit_code, rank):
    job = start(seed=rank).train()
    job.lose(rank, exit_code)
    assert set(job.end().values()) == {0} and list(job.plans) == [1]
    assert job.plans[1].lost_ranks == (rank,) and job.plans[1].lost_nodes == ()
    assert (job.plans[1].world.node_of, job.plans[1].world.spares) == (HOMES, (3, 4))
    assert [event.rank for event in job.told(events.RankLost)] == [rank]
    assert not job.told(events.NodeLost)


@pytest.mark.parametrize("seed", range(3))
def test_processes_and_a_node_lost_at_once(start, seed):
    job = start(seed=seed).train()
    job.lose(2)
    job.lose(5)
    job.strike("kill", 0)
    codes = job.end()
    assert codes == {0: None, 1: 0, 2: 0, 3: 0, 4: 0} and len(job.told(events.RankLost)) == 2


@pytest.mark.parametrize("seed", range(4))
def test_a_failure_told_to_a_coordinator_that_dies_is_told_again(start, seed):
    job = start(seed=seed).train()
    job.lose(4)
    job.until(lambda: job.told(events.RankLost))
    job.strike("kill", 0)
    codes = job.end()
    assert codes == {0: None, 1: 0, 2: 0, 3: 0, 4: 0}
    assert [plan.lost_ranks for plan in job.plans.values() if plan.lost_ranks] == [(4,)]


@pytest.mark.parametrize("rank", range(6))
@pytest.mark.parametrize("when", ["Prepare", "Propose", "Reconfigure"])
def test_a_process_lost_during_the_swap(start, when, rank):
    """After the promise, before the plan, and after Reconfigure, also the one that hosts the chosen store."""
    job = start(seed=rank).train()
    job.lose(2 if rank != 2 else 3)
    home = job.nodes[HOMES[rank]]
    job.until(
        {
            "Prepare": lambda: job.context(home.number).swapping,
            "Propose": lambda: job.told(events.SwapPlanned),
            "Reconfigure": lambda: home.controller.generation == 1,
        }[when]
    )
    job.lose(rank)
    assert set(job.end().values()) == {0}
    assert len(job.told(events.RankLost)) == 2 and max(job.plans) <= 2


def test_the_budget_is_the_ranks_and_a_spare_takes_over_then(start):
    job = start(seed=7, spares=1, steps=60, restarts_max=2).train()
    for rank in (2, 2, 3):  # another rank's budget is its own
        heal(job, rank)
        job.hold()
        job.idle(job.timing.slow_after_s + 1.0)
        job.release()
    job.lose(2)
    assert job.end() == {0: 0, 1: 87, 2: 0, 3: 0} and "restarts_max" in job.reasons[1]
    assert job.plans[4].lost_nodes == (1,) and job.plans[4].world.node_of == (0, 0, 3, 3, 2, 2)


@pytest.mark.parametrize(("window_s", "lost"), [(40.0, ()), (1000.0, (1,))])
def test_losses_long_ago_do_not_count(start, window_s, lost):
    """Each loss of the rank is some 60 s after the one before."""
    job = start(seed=7, steps=60, restarts_max=2, restarts_window_s=window_s).train()
    for _ in range(3):
        heal(job, 2)
        job.hold()
        job.idle(60.0)
        job.release()
    assert job.end() == {number: 87 if number in lost else 0 for number in range(5)}
    assert [plan.lost_nodes for plan in job.plans.values()] == [(), (), lost]


def test_losses_within_one_storm_count_once(start):
    job = start(seed=7, steps=60, restarts_max=1).train()
    began = job.timeline.now
    while job.timeline.now - began < job.timing.slow_after_s / 2:
        heal(job, 2)
    assert set(job.end().values()) == {0} and len(job.told(events.RankLost)) > 1
    assert not job.told(events.NodeLost)


def test_no_restarts_means_a_crash_costs_the_host(start):
    job = start(restarts_max=0).train()
    job.lose(5)
    assert job.end() == {0: 0, 1: 0, 2: 87, 3: 0, 4: 0} and job.plans[1].lost_nodes == (2,)


def test_no_restarts_means_an_error_that_follows_the_rank_over_three_hosts_is_the_scripts(start):
    job = start(steps=60, restarts_max=0, spares=4).train()
    for _ in range(2):
        heal(job, 5, RAISED)
    assert job.plans[2].suspicions[0].raises == 2
    job.lose(5, RAISED)
    lost = {node for plan in job.plans.values() for node in plan.lost_nodes}
    assert len(lost) == 2 and job.end() == {node: 87 if node in lost else RAISED for node in range(7)}


@pytest.mark.parametrize("seed", range(8))
def test_what_is_lost_one_after_another_within_a_storm_is_planned_together(start, monkeypatch, seed):
    job = start(seed=seed, steps=60).train()
    monkeypatch.setattr(job, "start_s", lambda: job.timing.slow_after_s / CALMS)  # so long a swap takes at least
    heal(job, 2)
    for rank in (0, 1, 3, 4, 5):
        job.lose(rank)
        job.idle(job.timing.slow_after_s / 10)
    assert set(job.end().values()) == {0} and not job.told(events.NodeLost)
    assert [plan.lost_ranks for plan in job.plans.values()] == [(2,), (0, 1, 3, 4, 5)]


def test_a_storm_that_does_not_end_is_planned_within_one_patience(start, monkeypatch):
    job = start(seed=3, active=12).train()
    monkeypatch.setattr(job, "start_s", lambda: job.timing.slow_after_s / CALMS)
    heal(job, 0)
    for rank in range(1, 24):
        job.lose(rank)
        job.idle(job.timing.slow_after_s / 12)
    assert set(job.end().values()) == {0} and not job.told(events.NodeLost)
    planned = [len(plan.lost_ranks) for plan in job.plans.values()]
    assert planned[0] == 1 and 8 <= planned[1] <= 12 and sum(planned) == 24


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_waits_for_more_no_longer_than_the_last_swap_took(start, monkeypatch, seed):
    job = start(seed=seed, steps=60).train()
    for how_long in ("start_s", "rehearse_s", "end_s", "unwind_s"):
        monkeypatch.setattr(job, how_long, lambda *_: 0.0)
    heal(job, 2)
    began, storm_s = job.timeline.now, job.timing.slow_after_s
    heal(job, 4)
    assert job.timeline.now - began < storm_s, "else this test shows nothing"
    first, second = job.told(events.SwapPlanned)
    carried_out_s = job.told(events.SwapDone)[0].duration_s - first.duration_s
    assert carried_out_s <= second.duration_s < storm_s / CALMS
    assert set(job.end().values()) == {0}


def test_an_error_that_comes_back_is_tried_on_another_host_and_then_ends_the_job(start):
    job = start(steps=60).train()
    heal(job, 2, RAISED)
    heal(job, 2, RAISED)
    assert job.plans[1].lost_ranks == (2,) and not job.plans[1].vacated
    moved = job.plans[2]
    assert (moved.vacated, moved.lost_nodes, moved.lost_ranks) == ((1,), (), ())
    taker = moved.world.node_of[2]
    assert moved.world.node_of == (0, 0, taker, taker, 2, 2)
    assert {taker, moved.world.spares[0]} == {3, 4} and moved.world.spares[1:] == (1,), "the first host stands by"
    job.lose(2, RAISED)
    assert set(job.end().values()) == {RAISED} and not job.told(events.NodeLost)
    assert all(f"script of rank 2 on node {taker} ended with {RAISED}" in reason for reason in job.reasons.values())


def test_an_error_that_does_not_follow_to_another_host_is_survived_and_its_host_takes_over_again(start):
    job = start(steps=200, spares=1).train()
    heal(job, 2, RAISED)
    heal(job, 2, RAISED)
    job.until(lambda: 1 in [told.spare for told in job.told(events.SpareReady)])
    job.strike("kill", 3)
    assert job.end() == {0: 0, 1: 0, 2: 0, 3: None}
    assert job.plans[3].world.node_of == HOMES


def test_without_a_spare_an_error_is_tried_in_place_once_more(start):
    job = start(steps=60, spares=0).train()
    heal(job, 2, RAISED)
    heal(job, 2, RAISED)
    assert job.plans[2].lost_ranks == (2,) and job.plans[2].world.node_of == HOMES
    job.lose(2, RAISED)
    assert set(job.end().values()) == {RAISED}


def test_a_spare_makes_up_for_a_lost_host_before_an_error_moves(start):
    job = start(steps=60, spares=1).train()
    heal(job, 2, RAISED)
    job.lose(2, RAISED)
    job.strike("kill", 2)
    assert job.end() == {0: 0, 1: 0, 2: None, 3: 0}
    assert job.plans[2].world.node_of == (0, 0, 1, 1, 3, 3)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_an_error_of_the_machine_never_ends_the_job(start, times):
    job = start(steps=60).train()
    job.strike("poison", 1, count=times)
    assert set(job.end().values()) == {0} and not any(plan.vacated for plan in job.plans.values())


def test_an_error_of_the_machine_that_goes_on_costs_the_host(start):
    job = start(steps=200).train()
    while not job.told(events.NodeFenced):
        done = len(job.told(events.SwapDone))
        job.strike("poison", 1, count=1)
        job.until(lambda n=done: len(job.told(events.SwapDone)) > n)
        job.hold()
        job.idle(job.timing.slow_after_s + 1.0)
        job.release()
    assert job.end() == {0: 0, 1: 87, 2: 0, 3: 0, 4: 0} and 3 <= len(job.told(events.RankLost)) <= 7


def test_an_error_of_the_machine_on_every_rank_at_once_costs_nobody_its_place(start):
    job = start(steps=60).train()
    for node in range(3):
        job.strike("poison", node, count=2)
    assert set(job.end().values()) == {0}
    assert job.plans[1].world.node_of == HOMES and len(job.told(events.RankLost)) == 6


@pytest.mark.parametrize("seed", range(4))
def test_all_processes_killed_at_once_are_back_from_host_memory(start, seed):
    job = start(seed=seed, steps=30).train()
    committed = job.newest_committed
    job.strike("storm", 0, pick=0)
    assert set(job.end().values()) == {0} and job.plans[1].restore_step >= committed
    assert not job.told(events.NodeLost)


def test_an_error_that_comes_back_beside_a_newcomer_may_be_the_newcomers(start):
    """A collective that a newcomer issues and the others do not is an error in who reads its answer."""
    job = start(steps=60).train()
    job.strike("kill", 2)
    job.until(lambda: job.told(events.SwapDone))
    for _ in range(2):
        heal(job, 2, RAISED)
    job.lose(2, RAISED)
    assert job.end() == {0: RAISED, 1: RAISED, 2: None, 3: RAISED, 4: RAISED}
    assert all("rank(s) 3, 4, 5 run in new processes" in reason for reason in job.reasons.values())


def test_an_error_long_after_another_is_another(start):
    job = start(steps=60).train()
    for _ in range(2):
        heal(job, 2, RAISED)
        newest = job.newest_committed
        job.until(lambda n=newest: job.newest_committed > n + 3)
    assert set(job.end().values()) == {0}


@pytest.mark.parametrize("seed", [1, 2])
def test_an_error_of_every_rank_ends_the_job_at_once(start, seed):
    job = start(seed=seed).train()
    for rank in range(6):
        job.lose(rank, RAISED)
    assert set(job.end().values()) == {RAISED} and "the script of every rank" in job.reasons[3]


@pytest.mark.parametrize("seed", [1, 2])
def test_errors_that_differ_are_tried_again(start, seed):
    job = start(seed=seed, steps=60).train()
    for rank in range(6):
        job.lose(rank, RAISED + rank)
    assert set(job.end().values()) == {0}


@pytest.mark.parametrize("seed", [1, 2])
def test_an_error_before_training_ends_the_job(start, seed):
    job = start(seed=seed)
    job.until(lambda: job.all(api.StartWorkers))
    job.lose(2, RAISED)
    assert set(job.end().values()) == {RAISED} and not job.plans


@pytest.mark.parametrize("rank", range(6))
def test_a_process_lost_before_training_begins_the_script_again(start, rank):
    job = start(seed=rank)
    job.until(lambda: job.all(api.StartWorkers))
    job.lose(rank)
    assert set(job.end().values()) == {0}
    assert job.plans[1].restore_step == NO_STEP and job.plans[1].world.spares == (3, 4)


@pytest.mark.parametrize("seed", range(4))
def test_losses_while_the_script_begins_again(start, seed):
    job = start(seed=seed)
    processes = job.nodes[2].processes
    job.until(lambda: job.nodes[0].processes.of(1) and processes.of(4))
    first = job.process(4)
    job.lose(1)
    job.until(lambda: 1 in job.plans and processes.of(4) not in (None, first))
    job.lose(4)
    job.until(lambda: 2 in job.plans)
    job.strike("kill", 0)
    assert job.end() == {0: None, 1: 0, 2: 0, 3: 0, 4: 0}


@pytest.mark.parametrize("exit_code", [KILLED, RAISED])
def test_the_only_node_replaces_its_processes_too(start, exit_code):
    job = start(active=1, spares=0, slots=2)
    job.until(lambda: job.newest_committed >= 2)
    job.lose(1, exit_code)
    assert job.end() == {0: 0} and list(job.plans) == [1]
