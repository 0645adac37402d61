"""Jobs whose processes live and get no further: all are interrupted and go on, or the job ends and says why."""

from __future__ import annotations

import pytest

from deadpool_plugin.core import events, local
from deadpool_plugin.core.coordination import STALLS_MAX
from deadpool_plugin.core.processes import AGAIN_WITHIN_STEPS
from simulator.tasks import Signal

SMALL = {"active": 2, "spares": 1, "slots": 1}


@pytest.fixture
def stands_still(start):
    """Return what begins a job in training whose processes then do nothing."""

    def begin(**fields):
        job = start(**SMALL, **fields).train()
        job.hold()
        return job

    return begin


def stall(job, share: float = 1.1) -> None:
    job.idle(share * job.timing.stall_timeout_s)


def stalls_after(job, steps: int) -> bool:
    """Let so many more steps be committed, and then nothing for too long; tell whether the job has ended."""
    before = job.newest_committed
    job.release()
    job.until(lambda: job.is_over or job.newest_committed >= before + steps)
    job.hold()
    stall(job, 1.2)
    return bool(job.is_over)


@pytest.mark.parametrize("seed", [1, 2])
def test_when_nothing_comes_of_training_all_are_interrupted_and_go_on(stands_still, seed):
    job = stands_still(seed=seed)
    stall(job)
    assert list(job.plans) == [1] and job.plans[1].lost_nodes == job.plans[1].lost_ranks == ()
    assert any("got any further" in note.text for note in job.told(events.Note))
    assert set(job.end().values()) == {0} and list(job.plans) == [1]


def test_when_nothing_comes_of_that_either_the_job_ends(stands_still):
    job = stands_still()
    assert set(job.play().values()) == {86} and list(job.plans) == [1]
    assert "stall_timeout_s" in job.reasons[1] and "again" in job.reasons[1]


def test_whoever_goes_on_after_a_stall_may_stall_again(stands_still):
    job = stands_still()
    stall(job)
    assert not stalls_after(job, 3)
    assert set(job.end().values()) == {0} and list(job.plans) == [1, 2]


def test_a_job_that_stalls_after_each_step_ends(stands_still):
    """A cause that interrupting does not mend may let one step through each time: a receive that nobody answers."""
    job = stands_still(steps=40)
    stall(job)
    assert not stalls_after(job, 1)
    assert stalls_after(job, 1)
    assert set(job.exits.values()) == {86} and "stalls after steps" in job.reasons[1]


def test_stalls_with_steps_between_them_end_no_job(stands_still):
    job = stands_still(steps=40)
    stall(job)
    assert not any(stalls_after(job, AGAIN_WITHIN_STEPS + 1) for _ in range(STALLS_MAX + 1))


def test_a_long_step_is_none_as_long_as_somebody_gets_on(stands_still):
    job = stands_still()
    for rank in (1, 0, 1):
        job.process(rank).tell(local.WorkerMoved(rank))
        stall(job, 0.8)
    assert not job.plans


def test_whoever_has_finished_leaves_the_others_all_the_time_they_need(stands_still):
    job = stands_still()
    job.process(1).tell(local.WorkerFinished(1))
    stall(job, 2.0)
    assert not job.plans


def test_a_coordinator_that_stood_still_takes_its_own_pause_for_no_stall(stands_still):
    job = stands_still()
    stall(job, 0.8)
    job.freeze(*job.nodes)
    stall(job, 0.5)
    job.thaw(*job.nodes)
    stall(job, 0.1)
    assert not job.told(events.Note) and not job.plans


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
