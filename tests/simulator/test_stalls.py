"""Jobs whose processes live and get no further: who never arrived is found, said, and cured step by step."""

from __future__ import annotations

import pytest

from deadpool_plugin.core import api, events, local
from deadpool_plugin.core.stalls import AGAIN_TIMES, FLOOR_S, NOTICE_S, SAME_WITHIN_STEPS, UNKNOWN_MAX
from simulator.tasks import Signal

SMALL = {"active": 2, "spares": 1, "slots": 1, "stall_timeout_s": "auto"}
FIELDS = {"slots": 1, "steps": 60, "stall_timeout_s": "auto"}


def cures(job):
    return [event for event in job.told(events.Stalled) if event.cure]


def notices(job):
    return [event for event in job.told(events.Stalled) if not event.cure]


def hang(job, number, kind="hang", deaf=False, **how):
    """The process of that node hangs; a `deaf` one also when it is interrupted."""
    found = len(cures(job))
    job.strike(kind, number, pick=int(deaf), **how)
    return found


def cured(job, count=1):
    """Until so many hangs were acted on, and all train again."""
    job.until(lambda: job.is_over or len(cures(job)) >= count)
    plans = len(job.plans)
    job.until(lambda: job.is_over or (len(job.plans) > plans and job.context(0).training))


def steps(job, count):
    before = job.newest_committed
    job.until(lambda: job.is_over or job.newest_committed >= before + count)


@pytest.fixture
def training(start):
    """Return what begins a job of three active nodes with a rank each, which has made some steps."""

    def begin(**fields):
        job = start(**{**FIELDS, **fields}).train(6)
        job.until(lambda: job.told(events.Protected))
        return job

    return begin


# ---- who never arrived


def test_who_hangs_in_a_call_is_said_within_seconds_and_interrupted_at_the_limit(training):
    job = training()
    began = job.timeline.now
    hang(job, 1)
    job.until(lambda: notices(job))
    assert job.timeline.now - began < NOTICE_S + 2
    (first,) = notices(job)
    assert (first.ranks, first.hosts) == ((1,), (1,)) and first.limit_s == FLOOR_S
    assert "rank 1 on node 1 has not come to collective" in first.what and "all_reduce float32 x 1 sum" in first.what
    assert "rank(s) 0, 2 wait" in first.what and "in train_step, after step" in first.what
    cured(job)
    assert FLOOR_S <= job.told(events.Stalled)[-1].waited_s < FLOOR_S + 2
    (cure,) = cures(job)
    assert cure.ranks == (1,) and cure.stack == ("train (toy.py:0)",) and "interrupted" in cure.cure
    assert list(job.plans) == [1] and not job.told(events.RankLost)
    assert set(job.end().values()) == {0}


def test_who_does_not_join_a_collective_is_found_though_it_waits_itself(training):
    job = training()
    hang(job, 2, "skip")
    cured(job)
    assert cures(job)[0].ranks == (2,) and not job.told(events.RankLost)
    assert set(job.end().values()) == {0} and list(job.plans) == [1]


def test_who_does_not_let_go_is_replaced_in_place(training):
    job = training()
    hang(job, 1, deaf=True)
    cured(job)
    job.until(lambda: len(job.plans) == 2)
    assert job.plans[2].lost_ranks == (1,) and not job.plans[2].lost_nodes
    assert set(job.end().values()) == {0}


def test_the_scripts_own_code_is_reported_and_not_touched(training):
    job = training()
    hang(job, 1, "script", seconds=4 * FLOOR_S)
    steps(job, 6)
    assert "in the script's own code" in notices(job)[0].what and len(notices(job)) > 2
    assert not cures(job) and not job.plans
    assert set(job.end().values()) == {0}


def test_a_false_alarm_doubles_the_limit_and_interrupts_nobody(training):
    job = training()
    hang(job, 1, "slow", seconds=2.5 * FLOOR_S)
    steps(job, 6)
    limits = [event.limit_s for event in notices(job)]
    assert limits[0] == FLOOR_S and limits[-1] >= 4 * FLOOR_S and limits == sorted(limits)
    assert "its stack changes" in notices(job)[-1].what
    assert not cures(job) and not job.plans
    assert set(job.end().values()) == {0}


def test_a_long_step_is_none_as_long_as_somebody_gets_on(training):
    job = training()
    job.hold()
    for rank in (1, 0, 1, 2, 0):
        job.process(rank).tell(local.WorkerMoved(rank))
        job.idle(0.8 * FLOOR_S)
    assert not job.plans
    assert set(job.end().values()) == {0}


# ---- cures, in their order


def test_a_hang_that_comes_back_costs_the_process_then_the_host_then_the_job(training):
    job = training(spares=2)
    job.excuses = ("got any further",)
    hang(job, 1)
    cured(job)
    hang(job, 1)
    cured(job, 2)
    assert "is replaced" in cures(job)[1].cure and [rank for _, rank in ended(job)] == [1]
    assert job.plans[2].lost_ranks == (1,) and not job.plans[2].lost_nodes
    hang(job, 1)
    cured(job, 3)
    assert "asked to leave" in cures(job)[2].cure and job.plans[3].lost_nodes == (1,)
    began = job.timeline.now
    while not job.is_over:  # it may be something that is out for everybody
        hang(job, job.newest_world.node_of[1])
        cured(job, len(cures(job)) + 1)
    limits = [event.limit_s for event in cures(job)[3:]]
    assert limits == sorted(limits) and limits[-1] > limits[0], limits
    assert all("interrupted" in event.cure for event in cures(job)[3:-1]) and "ends" in cures(job)[-1].cure
    assert job.timeline.now - began > 0.5 * job.timing.start_timeout_s
    assert {code for number, code in job.exits.items() if number != 1} == {86}
    assert "start_timeout_s" in job.reasons[0] and "again" in job.reasons[0]


def test_a_number_ends_the_job_once_all_has_been_tried(training):
    job = training(spares=1, stall_timeout_s=60.0)
    job.excuses = ("got any further",)
    while not job.is_over:
        hang(job, job.newest_world.node_of[1])
        cured(job, len(cures(job)) + 1)
    said = [event.cure.split(",")[0] for event in cures(job)]
    assert said == ["all ranks are interrupted and go on from there", "the process of rank 1 is replaced",
                    "node 1 is asked to leave", "the job ends"]  # fmt: skip
    assert "raise stall_timeout_s" in job.reasons[0]


def ended(job):
    return [(node, action.rank) for node, action in job.all(api.EndRank)]


def test_a_step_in_between_neither_ends_the_job_nor_begins_anew(training):
    job = training(spares=2)
    hang(job, 1)
    cured(job)
    steps(job, 1)
    hang(job, 1)
    cured(job, 2)
    assert "is replaced" in cures(job)[1].cure
    assert set(job.end().values()) == {0}


def test_two_hangs_of_one_host_within_the_window_take_it_out(training):
    job = training()
    hang(job, 1)
    cured(job)
    steps(job, SAME_WITHIN_STEPS + 1)
    hang(job, 1)
    cured(job, 2)
    assert "asked to leave" in cures(job)[1].cure and job.plans[2].lost_nodes == (1,)
    job.end()
    assert {code for number, code in job.exits.items() if number != 1} == {0}


def test_hangs_of_different_hosts_are_each_interrupted_only(training):
    job = training()
    for count, number in enumerate((0, 1, 2), 1):
        hang(job, number)
        cured(job, count)
        steps(job, SAME_WITHIN_STEPS + 1)
    assert all("interrupted" in event.cure for event in cures(job))
    assert set(job.end().values()) == {0} and list(job.plans) == [1, 2, 3]


def test_without_a_spare_a_second_hang_of_a_host_is_interrupted(training):
    job = training(spares=1)
    job.strike("kill", 3)
    job.until(lambda: not job.newest_world.spares)
    for count in (1, 2):
        steps(job, SAME_WITHIN_STEPS + 1)
        hang(job, 1)
        cured(job, count)
    assert all("interrupted" in event.cure for event in cures(job))


def test_a_hang_of_nobody_known_is_interrupted_and_then_ends_the_job(start):
    """All stand still alike: no process could be replaced for it."""
    job = start(**SMALL).train()
    job.hold()
    assert set(job.play().values()) == {86}
    assert len(cures(job)) == UNKNOWN_MAX and all(not event.ranks for event in cures(job))
    assert list(job.plans) == [1, 2] and "again" in job.reasons[1]


def test_the_first_step_since_a_swap_has_longer(training):
    job = training()
    hang(job, 1)
    cured(job)
    job.hold()
    found = len(notices(job))
    job.until(lambda: len(notices(job)) > found)
    assert notices(job)[-1].limit_s >= AGAIN_TIMES * FLOOR_S


def test_whoever_has_finished_leaves_the_others_all_the_time_they_need(start):
    job = start(**SMALL).train()
    job.hold()
    job.process(1).tell(local.WorkerFinished(1))
    job.idle(3 * FLOOR_S)
    assert not job.plans


def test_a_coordinator_that_stood_still_takes_its_own_pause_for_no_stall(start):
    job = start(**SMALL).train()
    job.hold()
    job.idle(0.7 * FLOOR_S)
    job.freeze(*job.nodes)
    job.idle(FLOOR_S)
    job.thaw(*job.nodes)
    job.idle(0.1 * FLOOR_S)
    assert not cures(job) and not job.plans


@pytest.fixture
def never_ready(start, monkeypatch):
    """Return a job whose ranks do not come to training."""
    job = start(**SMALL)
    monkeypatch.setattr(job, "start_s", Signal)
    job.excuses = ("have not reached training",)
    return job


def test_ranks_that_never_get_ready_are_a_verdict(never_ready):
    job = never_ready
    assert set(job.play().values()) == {86} and job.excuses[0] in job.reasons[1]


def test_a_newcomer_on_its_way_through_past_steps_is_waited_for_while_it_gets_on(never_ready):
    job = never_ready
    job.until(lambda: job.nodes[1].processes.of(1))
    for step in range(3):
        job.process(1).tell(local.Moved(1, step))
        job.idle(0.8 * job.timing.start_timeout_s)
    assert set(job.exits.values()) == {None}
    assert set(job.play().values()) == {86} and "start_timeout_s" in job.reasons[1]
