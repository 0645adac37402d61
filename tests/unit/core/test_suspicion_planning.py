"""Suspicion and planning: tables; and what a node says that it holds and offers."""

from __future__ import annotations

import pytest
from support import expect

from deadpool_plugin import errors
from deadpool_plugin.core import api, local, types
from deadpool_plugin.core.context import Context, Watch
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.ledger import Ledger, NoSpare, plan_swap
from deadpool_plugin.core.messages import Decided, Report
from deadpool_plugin.core.policy import Policy, Timing
from deadpool_plugin.core.processes import STORE_GONE, Processes
from deadpool_plugin.core.types import NO_STEP, Ballot, Holding, Source, SwapPlan, Unrecoverable, World

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
    result = dict(watch.silences(watched, now))
    assert set(result) == found and all(result.values())


def test_who_has_yet_to_say_a_first_word_is_waited_for_longer():
    """It may still link up with others, one of which has died just now."""
    context = Context(0, TIMING, Policy())
    watch = context.watch
    watch.heard, watch.unheard = {1: 0.0, 2: 0.0}, {1, 2}
    watch.hear(2, 0.0)
    assert dict(watch.silences((1,), 29.0)) == {}
    assert dict(watch.silences((1,), 30.0)).keys() == {1}
    assert dict(watch.silences((1, 2), 10.0)).keys() == {2}
    context.suspect(1, "link lost")
    assert watch.evidence.keys() == {1}, "that its link has ended counts as ever"


def test_the_first_reason_stays():
    context = Context(0, TIMING, Policy())
    watch = context.watch
    watch.heard = {1: 0.0}
    context.suspect(2, "first")
    context.suspect(2, "second")
    assert watch.evidence == {2: "first"}
    assert dict(watch.silences((1, 2), 10.0)).keys() == {1}


def test_ones_own_pause_is_no_evidence():
    controller = Controller(0, TIMING, Policy())
    controller.step(api.WorldFormed(World(0, (0, 1))), 5.0)
    controller.step(api.Received(1, Report(0)), 5.0)
    for now in (6.0, 8.0, 68.0, 70.0, 72.0, 74.0):
        controller.step(api.Ticked(), now)
    assert not controller._ctx.suspects, "it stood still for 60 s, and was awake for 9"
    controller.step(api.Ticked(), 75.0)
    assert controller._ctx.suspects.keys() == {1}


def test_a_plan():
    ledger = Ledger({node: h for node, h in FULL.items() if node != 1})
    plan = plan_swap(WORLD, ledger, {1}, {0: "", 2: "two", 4: "four"}, 4)
    assert plan == SwapPlan(World(5, (0, 4, 2), (3,)), 5, (1,), (Source(1, 2, 2, 1),), "two")


def test_a_spare_is_lost_and_nobody_takes_over():
    plan = plan_swap(WORLD, Ledger(FULL), {4}, {0: "zero"}, 4)
    assert plan == SwapPlan(World(5, (0, 1, 2), (3,)), 5, (4,), (), "zero")


def test_no_store_yet_is_a_plan_without_store():
    assert expect(SwapPlan, plan_swap(WORLD, Ledger(FULL), {4}, {}, 4)).store == ""


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
    result = plan_swap(WORLD, ledger, lost, {2: "two"}, 4)
    assert isinstance(result, Unrecoverable) and says in result.reason
    assert isinstance(result, NoSpare) == ("spare" in says)
    assert (result.lost_ranks, result.newest_committed) == (ranks, newest)


def test_lost_ranks_and_joined_hosts_are_named():
    plan = plan_swap(WORLD, Ledger(FULL), (), {0: "zero"}, 4, lost_ranks=(2,), joined={7: ""})
    assert plan == SwapPlan(World(5, (0, 1, 2), (3, 4, 7)), 5, (), (), "zero", lost_ranks=(2,), joined=(7,))


@pytest.mark.parametrize(
    ("held", "may_start_over", "step"),
    [({}, True, NO_STEP), ({}, False, None), (FULL, True, 5), ({0: FULL[0]}, True, NO_STEP)],
)
def test_the_script_begins_again_only_if_nothing_can_be_gone_back_to(held, may_start_over, step):
    plan = plan_swap(WORLD, Ledger(held), {1}, {0: "zero"}, may_start_over=may_start_over)
    if step is None:
        assert isinstance(plan, Unrecoverable)
    else:
        assert isinstance(plan, SwapPlan)
        assert (plan.restore_step, plan.store) == (step, "" if step == NO_STEP else "zero")
        assert plan.world.node_of == (0, 4, 2)


def test_nobody_takes_over_even_if_the_script_begins_again():
    assert isinstance(plan_swap(WORLD, Ledger(), {0, 3, 4}, {}, may_start_over=True), NoSpare)


class Node:
    """Node 0, which runs rank 0 and mirrors rank 1, and what it would promise."""

    def __init__(self) -> None:
        self.context = Context(0, TIMING, Policy())
        self.processes = Processes(self.context)
        self.context.form(World(0, (0, 1)))
        self.processes.begin_generation()

    def holds(self, rank: int, step: int, generation: int) -> bool:
        """Return whether a snapshot of that generation counts."""
        before = self.processes.holdings
        self.processes.take_in(api.SnapshotHeld(Holding(rank, step, True, (rank,)), generation, step - 1))
        return self.processes.holdings != before

    def offers(self, store: str) -> bool:
        return self.processes.take_in(api.StoreOffered(store, 0))

    def goes_back(self, generation: int, step: int, store: str) -> None:
        plan = SwapPlan(World(generation, (0, 1)), step, (), (), store)
        self.context.enter(Decided(plan, Ballot(generation, 1, 0)), 0.0)
        self.processes.begin_generation()

    def report(self) -> Report:
        self.processes.report()
        return expect(Report, self.context.loopback.pop())


def test_a_node_keeps_two_steps_and_forgets_what_did_not_happen():
    node = Node()
    for step in range(4):
        assert node.holds(0, step, 0)
    assert not node.holds(0, 3, 0)
    assert [h.step for h in node.processes.holdings] == [2, 3]
    node.processes.take_in(api.WorkerReady(0))
    node.processes.take_in(local.WorkerFinished(0))
    node.offers("used")
    assert (node.report().ready, node.report().finished, node.report().store) == ((0,), (0,), "used")
    node.goes_back(1, 2, "used")
    report = node.report()
    assert [h.step for h in report.holdings] == [2]
    assert (report.ready, report.finished, report.store) == ((), (), "")
    assert not node.holds(0, 3, 0), "the old history's"
    assert node.holds(1, 2, 0), "late, but true of both histories"
    assert not node.holds(1, 3, 2), "not decided yet"
    node.processes.take_in(api.HoldingsDropped(1, 1))
    assert [h.rank for h in node.processes.holdings] == [0]


def test_a_store_is_offered_until_it_is_built_upon_or_gone():
    node = Node()
    assert node.offers("kept") and not node.offers("kept")
    node.goes_back(1, 2, "another's")
    assert node.processes.store == "kept" and not node.context.stuck
    assert node.processes.take_in(api.StoreLost("kept"))
    node.offers("of an old process")
    node.goes_back(2, NO_STEP, "kept")
    assert node.context.stuck == STORE_GONE and node.processes.store == ""
    node.goes_back(3, 2, "kept")
    assert not node.context.stuck


def test_exit_codes_are_those_of_errors():
    assert (types.EXIT_UNRECOVERABLE, types.EXIT_FENCED) == (errors.EXIT_UNRECOVERABLE, errors.EXIT_FENCED)
