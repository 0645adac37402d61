"""Suspicion, planning and inventory: tables."""

from __future__ import annotations

import pytest
from support import expect

from deadpool_plugin import errors
from deadpool_plugin.core import types
from deadpool_plugin.core.ledger import Ledger
from deadpool_plugin.core.messages import Report
from deadpool_plugin.core.planning import NoSpare, Situation, plan_swap
from deadpool_plugin.core.policy import Timing
from deadpool_plugin.core.processes import Inventory
from deadpool_plugin.core.suspicion import Watch
from deadpool_plugin.core.types import NO_STEP, Holding, Source, SwapPlan, Unrecoverable, World

TIMING = Timing(heartbeat_interval_s=1.0, silent_after_s=10.0)
WORLD = World(4, (0, 1, 2), (3, 4))


def held(*steps_of_rank: tuple[int, int]) -> list[Holding]:
    return [Holding(rank, step, True, (rank,)) for rank, step in steps_of_rank]


FULL = {0: held((0, 5), (2, 5)), 1: held((1, 5), (0, 5)), 2: held((2, 5), (1, 5)), 3: [], 4: []}


@pytest.mark.parametrize(
    ("now", "evidence", "watched", "found"),
    [
        (9.9, {}, (1, 2), set()),
        (10.0, {}, (1, 2), {1}),
        (10.0, {}, (2,), set()),
        (15.0, {}, (1, 2), {1, 2}),
        (15.0, {2: "link lost"}, (1, 2), {1}),
        (99.0, {}, (7,), set()),
    ],
)
def test_silences(now, evidence, watched, found):
    watch = Watch(TIMING, dict(evidence), heard={1: 0.0, 2: 5.0})
    result = watch.silences(watched, now)
    assert set(result) == found and all(result.values())


def test_who_has_yet_to_say_a_first_word_is_waited_for_longer():
    """It may still link up with others, one of which has died just now."""
    watch = Watch(TIMING, heard={1: 0.0, 2: 0.0}, unheard={1, 2})
    watch.hear(2, 0.0)
    assert watch.silences((1,), 29.0) == {}
    assert watch.silences((1,), 30.0).keys() == {1}
    assert watch.silences((1, 2), 10.0).keys() == {2}
    assert watch.suspect(1, "link lost") and watch.evidence.keys() == {1}, "that its link has ended counts as ever"


def test_the_first_reason_stays_and_ones_own_pause_is_no_evidence():
    watch = Watch(TIMING, heard={1: 0.0})
    assert watch.suspect(2, "first") and not watch.suspect(2, "second")
    assert watch.evidence == {2: "first"}
    assert watch.silences((1, 2), 10.0).keys() == {1}
    watch.excuse_pause(60.0)
    assert not watch.silences((1, 2), 65.0)


def test_a_plan():
    ledger = Ledger({node: h for node, h in FULL.items() if node != 1})
    plan = plan_swap(Situation(WORLD, ledger, {1}, {0: "", 2: "two", 4: "four"}, 4))
    assert plan == SwapPlan(World(5, (0, 4, 2), (3,)), 5, (1,), (Source(1, 2, 2, 1),), "two")


def test_a_spare_is_lost_and_nobody_takes_over():
    plan = plan_swap(Situation(WORLD, Ledger(FULL), {4}, {0: "zero"}, 4))
    assert plan == SwapPlan(World(5, (0, 1, 2), (3,)), 5, (4,), (), "zero")


def test_no_store_yet_is_a_plan_without_store():
    assert expect(SwapPlan, plan_swap(Situation(WORLD, Ledger(FULL), {4}, {}, 4))).store == ""


@pytest.mark.parametrize(
    ("lost", "ranks", "newest", "says"),
    [
        ({0, 3, 4}, (0,), 5, "no spare is left for lost node(s) 0, 3, 4"),
        ({0, 1}, (0, 1), 4, "rank(s) 0"),
        ({0, 1, 4}, (0, 1), 4, "rank(s) 0"),
        ({1, 3, 4}, (1,), 5, "no spare is left for lost node(s) 1, 3, 4"),
    ],
)
def test_no_plan(lost, ranks, newest, says):
    ledger = Ledger({node: h for node, h in FULL.items() if node not in lost})
    result = plan_swap(Situation(WORLD, ledger, lost, {2: "two"}, 4))
    if isinstance(result, NoSpare):
        assert "spare" in says
        result = result.verdict
    assert isinstance(result, Unrecoverable) and says in result.reason
    assert (result.lost_ranks, result.newest_committed) == (ranks, newest)


def test_lost_ranks_and_joined_hosts_are_named():
    plan = plan_swap(Situation(WORLD, Ledger(FULL), (), {0: "zero"}, 4, lost_ranks=(2,), joined=(7,)))
    assert plan == SwapPlan(World(5, (0, 1, 2), (3, 4, 7)), 5, (), (), "zero", lost_ranks=(2,), joined=(7,))


@pytest.mark.parametrize(
    ("held", "may_start_over", "step"),
    [({}, True, NO_STEP), ({}, False, None), (FULL, True, 5), ({0: FULL[0]}, True, NO_STEP)],
)
def test_the_script_begins_again_only_if_nothing_can_be_gone_back_to(held, may_start_over, step):
    plan = plan_swap(Situation(WORLD, Ledger(held), {1}, {0: "zero"}, may_start_over=may_start_over))
    if step is None:
        assert isinstance(plan, Unrecoverable)
    else:
        assert isinstance(plan, SwapPlan)
        assert (plan.restore_step, plan.store) == (step, "" if step == NO_STEP else "zero")
        assert plan.world.node_of == (0, 4, 2)


def test_nobody_takes_over_even_if_the_script_begins_again():
    assert isinstance(plan_swap(Situation(WORLD, Ledger(), {0, 3, 4}, {}, may_start_over=True)), NoSpare)


def test_inventory_keeps_two_steps_and_forgets_what_did_not_happen():
    inventory = Inventory()
    for step in range(4):
        assert inventory.held(Holding(0, step, True, (0,)), 0, 0)
    assert not inventory.held(Holding(0, 3, True, (0,)), 0, 0)
    assert [h.step for h in inventory.holdings] == [2, 3]
    inventory.ready.add(0)
    inventory.finished.add(0)
    inventory.offer("used", 0, stand_in=False)
    inventory.begin_generation(2, "used")
    report = inventory.fill(Report(1))
    assert [h.step for h in report.holdings] == [2]
    assert (report.ready, report.finished, report.store) == ((), (), "")
    assert not inventory.held(Holding(0, 3, True, (0,)), 0, 1), "the old history's"
    assert inventory.held(Holding(1, 2, True, (1,)), 0, 1), "late, but true of both histories"
    assert not inventory.held(Holding(1, 3, True, (1,)), 2, 1), "not decided yet"
    assert inventory.dropped(1, 1) and not inventory.dropped(1, 1)
    assert inventory.offer("kept", 0, stand_in=False) and not inventory.offer("kept", 0, stand_in=False)
    inventory.begin_generation(2, "another's")
    assert inventory.store == "kept"
    assert inventory.lose_store("kept") and inventory.has_lost("kept") and not inventory.has_lost("another's")
    inventory.offer("of an old process", 0, stand_in=False)
    inventory.begin_generation(NO_STEP, "")
    assert inventory.store == "" and not inventory.holdings and not inventory.has_lost("kept")


def test_exit_codes_are_those_of_errors():
    assert (types.EXIT_UNRECOVERABLE, types.EXIT_FENCED) == (errors.EXIT_UNRECOVERABLE, errors.EXIT_FENCED)
