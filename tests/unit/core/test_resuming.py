"""A job that goes on from the files of an earlier one: nobody begins the script, all take one plan."""

from __future__ import annotations

import pytest

from deadpool_plugin.core import api, events
from deadpool_plugin.core.controller import Phase
from deadpool_plugin.core.types import Holding, NodeId, SwapPlan, World

from .wired import Wired

WORLD = World(0, (0, 0, 1, 1, 2, 2), (3,))
STEP = 7


class Job(Wired):
    """Nodes that have met."""

    def __init__(self) -> None:
        super().__init__(WORLD)
        for node in WORLD.members:
            self.feed(node, api.WorldFormed(WORLD, STEP))

    def read(self, node: NodeId, *ranks: int) -> None:
        for rank in ranks:
            self.feed(node, api.SnapshotHeld(Holding(rank, STEP, True, (rank,)), 0))
        self.feed(node, api.FilesRead())

    def tick(self) -> None:
        self.now += 0.02
        for node in tuple(self.controllers):
            self.feed(node, api.Ticked())

    def plans(self) -> dict[NodeId, SwapPlan]:
        return {node: action.plan for node, action in self.actions if isinstance(action, api.Reconfigure)}

    def stops(self) -> set[str]:
        told = (action.event for _, action in self.actions if isinstance(action, api.Emit))
        return {event.reason for event in told if isinstance(event, events.JobStopped)}


def test_all_take_one_plan_once_all_have_read_and_a_store_is_offered():
    job = Job()
    for node in (0, 1, 2):
        assert not job.plans()
        job.read(node, 2 * node, 2 * node + 1)
        job.tick()
    assert {one.phase for one in job.controllers.values()} == {Phase.RESTORING}
    job.read(3)
    job.tick()
    assert not job.plans(), "there is no store to build groups over"
    job.feed(1, api.StoreOffered("store", 0, True))
    job.tick()
    assert job.plans().keys() == job.controllers.keys()
    plan = job.plans()[0]
    assert all(one == plan for one in job.plans().values())
    assert plan.restore_step == STEP and plan.world.node_of == WORLD.node_of and plan.store == "store"
    assert plan.lost_ranks == tuple(range(6)) and not plan.sources and not plan.lost_nodes
    assert not any(isinstance(action, api.StartWorkers) for _, action in job.actions)
    assert {one.newest_committed for one in job.controllers.values()} == {STEP}


def test_ranks_whose_files_are_elsewhere_are_fetched_from_there():
    job = Job()
    job.feed(1, api.StoreOffered("store", 0, True))
    for node, ranks in ((0, ()), (1, (2, 3, 0, 1)), (2, (4, 5)), (3, ())):
        job.read(node, *ranks)
    job.tick()
    assert [(one.rank, one.header_node, one.payload_node) for one in job.plans()[0].sources] == [(0, 1, 1), (1, 1, 1)]


def test_what_is_not_whole_ends_the_job_at_once_and_says_so():
    job = Job()
    job.feed(1, api.StoreOffered("store", 0, True))
    for node, ranks in ((0, (0,)), (1, (2, 3)), (2, (4, 5)), (3, ())):
        assert not job.stops()
        job.read(node, *ranks)
    job.tick()
    (reason,) = job.stops()
    assert "the job cannot be resumed: no surviving node holds any snapshot of rank(s) 1; its files are as" in reason
    assert not job.plans()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_host_that_is_lost_while_files_are_read_ends_the_job_without_harm(lost):
    job = Job()
    job.read(1, 2, 3)
    job.lose(lost)
    job.tick()
    (reason,) = job.stops()
    assert f"node {lost} was lost" in reason and "the files of the earlier job are as they were: start again" in reason


def test_a_host_that_is_lost_when_all_is_read_is_replaced():
    job = Job()
    for node, ranks in ((0, (0, 1, 4, 5)), (1, (2, 3, 0, 1)), (2, (4, 5, 2, 3)), (3, ())):
        job.read(node, *ranks)
    job.feed(1, api.StoreOffered("store", 0, True))
    job.lose(2)
    plan = job.plans()[0]
    assert plan.world.node_of == (0, 0, 1, 1, 3, 3) and plan.lost_ranks == (0, 1, 2, 3)
