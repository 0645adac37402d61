"""chain.py: the gate's table, what each rank knows of the snapshots when, and how far they are apart."""

from __future__ import annotations

import random

import pytest

from deadpool_plugin.core.chain import Chain, Pace
from deadpool_plugin.core.types import NO_STEP


@pytest.mark.parametrize(
    ("step", "committed", "allowed"),
    [
        (0, -1, True),
        (1, -1, True),
        (2, -1, False),
        (2, 0, False),
        (2, 1, True),
        (7, 5, False),
        (7, 6, True),
        (7, 9, True),
    ],
)
@pytest.mark.parametrize("every", [1, 4])
def test_gate(every, step, committed, allowed):
    assert Chain(0, every).may_stage(every * step, every * committed) is allowed


def test_a_fixed_chain_knows_all_of_its_snapshots():
    chain = Chain(7, 3)
    assert [step for step in range(20) if step in chain] == [7, 10, 13, 16, 19]
    assert [chain.after(step) for step in (6, 7, 8, 9, 10)] == [7, 10, 10, 10, 13]
    assert [chain.before(step) for step in (7, 8, 10, 11, 13)] == [NO_STEP, 7, 7, 10, 10]


def test_of_a_chain_that_is_chosen_three_snapshots_are_known():
    chain = Chain(7, 2, fixed=False)
    assert [step for step in range(20) if step in chain] == [7, 9, 11]
    assert chain.after(11) == NO_STEP
    assert chain.learn([11, 16]) and not chain.learn([16])
    chain.forget_before(9)
    assert chain.after(11) == 16 and chain.before(16) == 11 and chain.announced(9) == (11, 16)
    assert 7 not in chain and 9 in chain


@pytest.mark.parametrize("fixed", [True, False])
def test_a_snapshot_that_is_wanted_between_two_others_may_come_to_nothing(fixed):
    chain = Chain(0, 4, fixed)
    chain.forget_before(4)
    assert chain.learn([6]) and chain.before(8) == 6 and chain.after(4) == 6 and not chain.may_stage(8, 4)
    assert chain.learn([6], [6]) and chain.is_void(6) and 6 not in chain
    assert chain.before(8) == 4 and chain.may_stage(8, 4), "the slot that it was written to is free"
    assert not chain.learn([6], [6]), "it stays void"
    chain.forget_before(8)
    assert not chain.is_void(6)


@pytest.mark.parametrize("seed", range(50))
def test_ranks_that_hear_of_it_at_different_times_take_the_same_snapshots(seed):
    """Whoever has staged a snapshot knows the next one, whatever it has not heard yet."""
    draw = random.Random(seed)
    chooser, committed, chosen = Chain(5, draw.randint(1, 3), fixed=False), 5, list[tuple[int, tuple[int, ...]]]()
    while committed < 60:
        following = chooser.after(committed)
        if chooser.after(following) == NO_STEP:
            chooser.learn([following + draw.randint(1, 5)])
        chosen.append((committed, chooser.announced(committed)))
        committed = following
        chooser.forget_before(committed)
    taken = set()
    for _ in range(5):
        rank, heard, mine = Chain(5, chooser.every, fixed=False), -1, []
        for step in range(5, 50):
            if step in rank:
                while not rank.may_stage(step, chosen[heard][0] if heard >= 0 else NO_STEP) or draw.random() < 0.5:
                    heard += 1
                    rank.learn(chosen[heard][1])
                    rank.forget_before(chosen[heard][0])
                    if step - chosen[heard][0] <= 0:
                        break
                mine.append(step)
                assert rank.after(step) != NO_STEP
        taken.add(tuple(mine))
    assert len(taken) == 1


def steps_apart(pace: Pace, *took: float) -> list[int]:
    return [pace.every for one in took if pace.note(one, 16) or True]


def test_mirroring_that_keeps_up_changes_nothing():
    assert set(steps_apart(Pace(1), *[0.3, 0.99, 0.0, 5.0] * 5)) == {1}, "once is no measure"


def test_snapshots_come_as_seldom_as_mirroring_needs_and_as_often_as_it_can():
    pace = Pace(1)
    assert steps_apart(pace, 0.5, 3.1, 3.1) == [1, 1, 4]
    assert steps_apart(pace, *[3.2] * 20) == [4] * 20
    assert steps_apart(pace, *[10.0] * 3) == [4, 11, 11]
    assert steps_apart(pace, *[0.9] * 9) == [11] * 6 + [11, 1, 1]


def test_no_more_steps_lie_between_two_snapshots_than_may():
    assert steps_apart(Pace(1), 200.0, 200.0)[-1] == 16
