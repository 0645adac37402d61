"""Ranks that have issued other collectives: the newcomer among them is replaced, or the job ends.

Every process stands still after a swap, and has issued what the test says.
"""

from __future__ import annotations

import pytest

from deadpool_plugin.core import api, events, local
from deadpool_plugin.core.pairing import MISPAIRS
from deadpool_plugin.core.signatures import decoded
from deadpool_plugin.core.stalls import AGAIN_TIMES, FLOOR_S
from simulator.groups import MORE, ODD, SUM
from simulator.schedule import Fault

DIFFERS = f"collective 1 of rank 0 was {decoded(SUM)}, of rank 1 {decoded(MORE)}"
FIELDS = {"slots": 1, "spares": 1, "steps": 60, "stall_timeout_s": "auto"}


def issue(job, newcomer, others) -> None:
    """Rank 1 issues the codes of `newcomer`, the other two those of `others`."""
    for rank, codes in ((0, others), (1, newcomer), (2, others)):
        for code in codes:
            job.process(rank)._books.records[0].note(code)
    if newcomer != others:
        job.blows.mispairs(job.process(1), job.process(1).group, ODD[2])


def swapped(job) -> None:
    """Until all have restored their ranks in one generation more."""
    done = len(job.told(events.SwapDone))
    job.until(lambda: len(job.told(events.SwapDone)) > done)


@pytest.fixture
def after_a_swap(start):
    """Return what begins a job whose node 1 was lost to its spare."""

    def begin(newcomer, others=(SUM, SUM), **fields):
        job = start(**{**FIELDS, **fields}).train()
        job.until(lambda: job.told(events.Protected))
        job.hold()
        job.strike("kill", 1)
        swapped(job)
        issue(job, tuple(newcomer), tuple(others))
        return job

    return begin


@pytest.fixture
def after_a_stall(start):
    """Return a job that goes on in generation 1, in which every process is an old one."""
    job = start(**FIELDS).train()
    job.hold()
    swapped(job)
    assert list(job.plans) == [1]
    return job


def stall(job, share: float = 1.1) -> None:
    job.idle(share * AGAIN_TIMES * FLOOR_S)


def ended(job, why: str = ""):
    """The processes that were ended for what they had issued, and where."""
    return [(node, action.rank) for node, action in job.all(api.EndRank) if why in action.reason]


def newcomer(job):
    return [(job.plans[1].world.node_of[1], 1)]


def finish(job, *ranks: int) -> None:
    """The scripts of `ranks` have ended."""
    for rank in ranks:
        job.process(rank).tell(local.WorkerFinished(rank))


def codes(job) -> set[int | None]:
    return {code for number, code in job.exits.items() if number != 1}


def ends_well(job) -> bool:
    job.end()
    return codes(job) == {0}


def test_a_newcomer_that_hangs_with_another_call_is_replaced_and_then_the_job_ends(after_a_swap):
    job = after_a_swap([MORE, SUM])
    swapped(job)
    assert ended(job, DIFFERS) == newcomer(job)
    assert list(job.plans) == [1, 2] and job.plans[2].lost_ranks == (1,)
    issue(job, (MORE, SUM), (SUM, SUM))
    job.play()
    assert codes(job) == {86}
    assert all(DIFFERS in reason and "rank(s) 1 were replaced" in reason for reason in job.reasons.values())


def test_a_stall_of_ranks_that_pair_is_a_stall(after_a_swap):
    job = after_a_swap([SUM, SUM])
    stall(job)
    assert not ended(job) and list(job.plans) == [1, 2]
    assert ends_well(job)


def test_a_newcomer_that_waits_for_ranks_that_have_finished_is_replaced(after_a_swap):
    """One collective more in the last step, of the same kind: none of the others is left to pair with it."""
    job = after_a_swap([SUM, SUM], others=[SUM])
    finish(job, 0, 2)
    swapped(job)
    assert ended(job, "its script has ended") == newcomer(job)
    assert ends_well(job)


def test_who_has_finished_has_all_the_time_it_needs_if_all_pairs(after_a_swap):
    job = after_a_swap([SUM, SUM])
    finish(job, 1)
    stall(job, 3.0)
    assert not ended(job) and list(job.plans) == [1]


def test_a_job_whose_last_step_does_not_pair_does_not_end_well(after_a_swap):
    """All scripts have ended before the last step was mirrored, and so before its sums were compared."""
    job = after_a_swap([MORE, SUM])
    finish(job, 0, 1, 2)
    swapped(job)
    assert ended(job) == newcomer(job)
    assert ends_well(job)


def test_what_was_compared_before_scripts_ended_is_compared_again_at_their_end(after_a_swap):
    job = after_a_swap([SUM, SUM])
    finish(job, 1)
    stall(job)
    assert job.all(api.ReadCalls) and not ended(job) and list(job.plans) == [1], "compared, and nothing found"
    issue(job, (MORE,), (SUM,))
    finish(job, 0, 2)
    swapped(job)
    assert ended(job) == newcomer(job)


def test_a_job_does_not_end_well_while_a_newcomers_node_is_silent(after_a_swap):
    """It takes the last step's collectives along: nobody knows what they were."""
    job = after_a_swap([MORE, SUM])
    ((number, _),) = newcomer(job)
    finish(job, 0, 1, 2)
    job.until(lambda: job.nodes[number].ends)
    job.freeze(number)
    job.idle(1.5 * job.timing.slow_after_s)
    assert 0 not in job.exits.values()
    assert number in job.context(0).suspects or number in job.plans[2].lost_nodes


@pytest.mark.parametrize("seed", range(4))
def test_a_coordinator_that_stood_still_waits_for_the_answers_it_has_in_hand(after_a_swap, seed):
    job = after_a_swap([MORE, SUM], seed=seed)
    finish(job, 0, 1, 2)
    pairing = job.nodes[0].controller._pairing
    job.until(lambda: pairing._asked_at > 0)
    assert not pairing.answered
    job.freeze(*job.nodes)
    job.idle(1.2 * job.timing.slow_after_s)
    job.thaw(*job.nodes)
    job.idle(0.3 * job.timing.slow_after_s)
    assert ended(job) == newcomer(job)


def test_a_last_step_that_does_not_pair_ends_a_job_without_newcomers_too(after_a_stall):
    job = after_a_stall
    job.excuses += (MISPAIRS,)
    issue(job, (MORE, SUM), (SUM, SUM))
    finish(job, 0, 1, 2)
    assert set(job.play().values()) == {86} and not ended(job)


def test_a_script_whose_own_ranks_differ_is_told_so_when_it_stalls_again(after_a_stall):
    """Generation 0 is not compared: all go on in generation 1, where the same happens, and no process is new."""
    job = after_a_stall
    job.excuses += (MISPAIRS,)
    issue(job, (MORE, SUM), (SUM, SUM))
    assert set(job.play().values()) == {86} and not ended(job)
    assert all(DIFFERS in reason and "correct the script" in reason for reason in job.reasons.values())


def test_who_was_replaced_is_not_forgotten_with_the_coordinator(after_a_swap):
    """The first one dies when it has asked for the newcomer's end; the next one learns of that from its node."""
    job = after_a_swap([MORE, SUM], spares=2)
    job.until(lambda: ended(job))
    job.strike("kill", 0)
    swapped(job)
    issue(job, (MORE, SUM), (SUM, SUM))
    job.play()
    assert codes(job) == {None, 86} and ended(job) == newcomer(job)
    assert all("as before rank(s) 1 were replaced" in reason for reason in job.reasons.values())


@pytest.mark.parametrize("odd", range(len(ODD)))
def test_a_step_that_does_not_pair_has_its_newcomer_replaced(start, odd):
    """What the snapshots say of their collectives is enough; where the step hangs, what the processes have issued."""
    job = start(**FIELDS).train()
    job.until(lambda: job.told(events.Protected))
    job.blows.deal(Fault("mispair", pick=odd), job.nodes[0])
    job.strike("kill", 1)
    swapped(job)
    restored = job.plans[1].restore_step
    swapped(job)
    assert ended(job) == newcomer(job) and job.plans[2].lost_ranks == (1,)
    assert job.plans[2].restore_step == restored, "its first step was not committed"
    assert ends_well(job)


def test_an_error_after_a_swap_may_be_the_newcomers(after_a_swap):
    """Rank 0 is answered with what it cannot read, and raises: rank 1 goes, too."""
    job = after_a_swap([MORE, SUM])
    job.lose(0, 1)
    swapped(job)
    assert ended(job) == newcomer(job)
    assert ends_well(job)
