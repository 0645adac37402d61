"""Words for what a job has: mirrored, covered, protected. Each said at once, and taken back at once."""

from __future__ import annotations

from deadpool_plugin.core import api
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.coordination import Coverage
from deadpool_plugin.core.events import Mirrored, Protected, SpareReady
from deadpool_plugin.core.messages import Report
from deadpool_plugin.core.policy import Timing
from deadpool_plugin.core.types import Holding, World

WORLD = World(0, (0, 1, 2), (3, 4))
READY_FOR = {3: ((0, 0),), 4: ((0, 1),)}
SHORT = "too little memory"


def coverage(world: World = WORLD, /, **reports: Report) -> Coverage:
    """As the nodes' reports (`n3=...`) tell it."""
    found = Coverage(world)
    for name, report in reports.items():
        found.absorb(int(name[1:]), report)
    return found


def test_one_spare_that_is_able_covers_every_host():
    unable = Report(0, unable=SHORT)
    assert coverage().uncovered() == (0, 1, 2)
    assert coverage(n3=Report(0, able=True)).uncovered() == ()
    assert coverage(n3=unable, n4=Report(0, able=True)).uncovered() == ()
    found = coverage(n3=unable)
    assert found.uncovered() == (0, 1, 2)
    said = "spare node 3 cannot stand in: too little memory; spare node 4 is not ready yet"
    assert found.why((0, 1, 2)) == f"no spare can take node 0, 1, 2 ({said})"
    assert coverage(World(0, (0, 1))).why((0, 1)) == "no spare is left"


def test_a_host_whose_records_are_dropped_is_covered_by_who_has_followed_it_alone():
    able = {f"n{spare}": Report(0, able=True, rehearsed=pairs) for spare, pairs in READY_FOR.items()}
    dropped = Report(0, pruned=True)
    assert coverage(**able, n0=dropped, n1=dropped).uncovered() == ()
    found = coverage(**able, n2=dropped)
    assert found.uncovered() == (2,)
    assert "no spare can take node 2 (" in found.why((2,)) and "history_limit_mib" in found.why((2,))
    assert coverage(n3=able["n3"], n0=dropped, n1=dropped).uncovered() == (1,)


def test_what_changes_no_answer_is_no_news():
    found = Coverage(WORLD)
    assert not found.absorb(0, Report(0)) and not found.absorb(3, Report(0))
    assert found.absorb(3, Report(0, able=True)) and not found.absorb(3, Report(0, able=True))
    assert found.absorb(1, Report(0, pruned=True)) and not found.absorb(1, Report(0, pruned=True))


class Coordinator:
    """Node 0 of a job that trains, and what it says of its protection."""

    def __init__(self, world: World) -> None:
        self.world, self.now, self.controller = world, 0.0, Controller(0, Timing())
        self.controller.step(api.WorldFormed(world), 0.0)
        self.controller.step(api.WorkerReady(0), 0.0)

    def hears(self, node: int, **fields) -> list[tuple[str, object]]:
        self.now += 0.1
        holdings = tuple(Holding(rank, 0, True, (rank,)) for rank in range(3)) if node < 3 else ()
        report = Report(0, holdings, self.world.ranks_of(node), **fields)
        actions = self.controller.step(api.Received(node, report), self.now)
        told = [action.event for action in actions if isinstance(action, api.Emit)]
        return [
            (type(event).__name__, event.uncovered if isinstance(event, Mirrored) else None)
            for event in told
            if isinstance(event, (Mirrored, Protected, SpareReady))
        ]

    def mirrored(self) -> list[tuple[str, object]]:
        """All others say that they hold step 0."""
        for rank in range(3):
            self.controller.step(api.SnapshotHeld(Holding(rank, 0, True, (rank,)), 0), self.now)
        return [*self.hears(1), *self.hears(2)]


def test_protected_is_said_once_a_spare_is_able_and_taken_back_at_once():
    job = Coordinator(World(0, (0, 1, 2), (3,)))
    assert job.mirrored() == [("Mirrored", (0, 1, 2))]
    assert job.hears(3, able=True) == [("Protected", None)]
    assert job.hears(3, able=True) == [] and job.hears(1) == []
    assert job.hears(3, unable=SHORT) == [("Mirrored", (0, 1, 2))]
    assert job.hears(3, unable=SHORT) == []
    assert job.hears(3, able=True) == [("Protected", None)]


def test_a_second_spare_that_cannot_stand_in_takes_nothing_back():
    job = Coordinator(WORLD)
    assert job.hears(3, able=True) == []
    assert job.mirrored() == [("Mirrored", ()), ("Protected", None)]
    assert job.hears(4, unable=SHORT) == []
    assert job.hears(3, unable=SHORT) == [("Mirrored", (0, 1, 2))]


def test_without_a_spare_a_job_is_mirrored_never_protected():
    assert Coordinator(World(0, (0, 1, 2))).mirrored() == [("Mirrored", (0, 1, 2))]
