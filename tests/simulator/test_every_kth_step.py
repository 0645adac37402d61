"""Jobs that mirror every k-th step: what is committed, what a loss costs, and how far apart snapshots come to be."""

from __future__ import annotations

import pytest

from deadpool_plugin.core import events, local


def committed(job):
    return sorted({event.step for event in job.told(events.StepCommitted)})


@pytest.mark.parametrize("every", [2, 4, 8])
def test_only_snapshots_are_committed(start, every):
    job = start(steps=35, mirror_every=every)
    assert set(job.end().values()) == {0}
    assert committed(job) == [*range(0, 35, every)], "the last step need not be one"


@pytest.mark.parametrize("every", [2, 4, 8])
@pytest.mark.parametrize("lost", range(3))
def test_a_loss_costs_no_committed_step(start, every, lost):
    job = start(seed=lost, steps=40, mirror_every=every).train(2 * every)
    job.strike("kill", lost)
    job.until(lambda: job.plans)
    assert job.plans[1].restore_step >= 2 * every and job.plans[1].restore_step % every == 0
    assert job.plans[1].every == every
    assert job.end() and job.newest_committed % every == 0


def test_snapshots_come_as_seldom_as_the_network_needs_and_as_often_as_it_can(start):
    job = start(steps=120, mirror_every=0, transfer=8.0)
    job.until(lambda: job.told(events.MirroringPaced))
    paced = job.told(events.MirroringPaced)[0]
    assert paced.every >= paced.steps > 1
    job.until(lambda: len(committed(job)) > 6)
    apart = {later - earlier for earlier, later in zip(committed(job), committed(job)[1:], strict=False)}
    assert max(apart) > 1
    job.strike("kill", 1)
    job.until(lambda: job.plans)
    assert job.plans[1].every > 1, "the next generation begins as it is"
    assert job.end()[1] is None


@pytest.mark.parametrize("all_save", [True, False])
@pytest.mark.parametrize("every", [0, 4, 8])
def test_a_step_that_is_saved_is_committed_before(start, every, all_save):
    job = start(steps=20, mirror_every=every, transfer=4.0, save_every=3, all_save=all_save)
    assert set(job.end().values()) == {0}
    assert {3, 6, 9, 12, 15, 18} <= {*committed(job)}
    assert len(committed(job)) < 20 or every == 0


@pytest.mark.parametrize("lost", range(3))
def test_a_loss_while_a_save_waits(start, lost):
    job = start(seed=lost, steps=20, mirror_every=8, transfer=4.0, save_every=3)
    job.until(lambda: job.told(events.Mirrored) and any(3 in node.controller._ctx.chain for node in job.nodes.values()))
    job.strike("kill", lost)
    job.until(lambda: job.plans)
    assert job.plans[1].restore_step in (0, 3)
    job.end()
    assert {6, 9, 12, 15, 18} <= {*committed(job)}


def test_a_snapshot_that_is_void_once_the_one_before_it_is_committed_stops_nobody(start):
    job = start(steps=60, mirror_every=0, transfer=16.0, save_every=30)
    known = lambda: job.context(0).chain.announced(job.committed)  # noqa: E731
    job.until(lambda: job.committed > 0 and len(known()) == 3)  # a save's lies between those that were chosen
    before, wanted, _ = known()
    job.until(lambda: job.committed == before)
    job.checkers.saves = lambda process, step: None  # what is void is saved all the same
    job.feed(1, local.Passed(2, wanted, 0))
    assert set(job.end().values()) == {0}
    assert wanted not in committed(job) and not job.plans, "nobody has stalled"


def test_training_does_not_wait_for_a_network_that_carries_a_tenth_of_what_a_step_needs(start):
    """Time is simulated: nothing but the gate makes a step longer than the longest that is drawn."""

    def steps_s(**fields):
        job, made = start(seed=3, steps=150, slots=1, compute_s=0.4, latency_s=0.002, **fields), dict[int, float]()
        seen = job.checkers.updated
        job.checkers.updated = lambda process: (made.setdefault(process.step, job.timeline.now), seen(process))
        job.end()
        return [made[step + 1] - made[step] for step in range(60, 150)]

    alone, waits, auto = steps_s(transfer=0.0), steps_s(transfer=10.0), steps_s(transfer=10.0, mirror_every=0)
    assert max(auto) < 1.02 * max(alone) and sum(auto) < 1.05 * sum(alone), "but for the times that were drawn"
    assert sum(waits) > 4 * sum(alone)
