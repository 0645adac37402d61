"""Steps that all hosts write to disk while the job runs: who is told, when a step is whole, and who begins anew."""

from __future__ import annotations

from deadpool_plugin.core import api, events
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.policy import Policy, Timing
from deadpool_plugin.core.types import Holding, NodeId, Step, World

from .wired import Wired

WORLD = World(0, (0, 1, 2), (3,))
EVERY_S = 1.0


class Job(Wired):
    """A job in training."""

    def __init__(self) -> None:
        super().__init__(WORLD, Policy(store_every_s=EVERY_S))
        for node in WORLD.members:
            self.feed(node, api.WorldFormed(WORLD))
        self.feed(0, api.StoreOffered("store"))
        for rank, home in enumerate(WORLD.node_of):
            self.feed(home, api.WorkerReady(rank))
            self.feed(home, api.StoreOffered(f"store {rank}"))

    def commit(self, step: Step, after_s: float = 0.3, generation: int = 0) -> None:
        self.now += after_s
        world = next(iter(self.controllers.values())).world
        assert world is not None
        for rank, home in enumerate(world.node_of):
            for holder in (home, world.active[(world.active.index(home) + 1) % len(world.active)]):
                self.feed(holder, api.SnapshotHeld(Holding(rank, step, True, (rank,)), generation, step - 1))

    def written(self, step: Step, generation: int = 0) -> None:
        for node in tuple(self.controllers):
            self.feed(node, api.StepWritten(step, generation))

    def told(self, kind: type[api.WriteStep | api.StepStored]) -> dict[NodeId, list[Step]]:
        found: dict[NodeId, list[Step]] = {}
        for node, action in self.actions:
            if isinstance(action, kind):
                found.setdefault(node, []).append(action.step)
        return found

    def stored(self) -> list[Step]:
        said = (action.event for _, action in self.actions if isinstance(action, api.Emit))
        return [event.step for event in said if isinstance(event, events.StepStored)]


def test_all_are_told_the_same_steps_no_oftener_than_they_are_to():
    job = Job()
    for step in range(12):
        job.commit(step)
        job.written(step)
    assert job.told(api.WriteStep) == dict.fromkeys(WORLD.members, [0, 4, 8])


def test_nothing_more_is_to_be_written_while_somebody_still_writes():
    """Writing takes longer than the pause: each step that is named becomes whole all the same."""
    job = Job()
    for step in range(20):
        job.commit(step)
        if step % 6 == 5:
            job.written(job.told(api.WriteStep)[0][-1])
    assert job.told(api.WriteStep)[0] == [*job.stored(), 18] == [0, 6, 12, 18]


def test_a_step_that_somebody_leaves_out_holds_up_no_later_one():
    job = Job()
    job.commit(0)
    job.feed(0, api.StepWritten(0, 0, False))
    for node in (1, 2):
        job.feed(node, api.StepWritten(0, 0))
    for step in range(1, 6):
        job.commit(step)
    job.written(4)
    assert job.told(api.WriteStep)[0] == [0, 4] and job.stored() == [4]


def test_a_step_is_whole_once_all_that_run_ranks_have_written_it():
    job = Job()
    job.commit(0)
    for node in (2, 1):
        job.feed(node, api.StepWritten(0, 0))
        assert not job.stored() and not job.told(api.StepStored)
    job.feed(0, api.StepWritten(0, 0))
    assert job.stored() == [0] and job.told(api.StepStored) == dict.fromkeys(WORLD.members, [0])


def test_after_a_swap_it_begins_anew_and_what_was_written_before_does_not_count():
    job = Job()
    job.commit(0)
    job.lose(1)
    assert {one.generation for one in job.controllers.values()} == {1}
    job.written(0)
    assert not job.stored()
    job.commit(1, generation=1)
    assert job.told(api.WriteStep)[3] == [0, 1], "the spare, too, which runs a rank now"
    job.written(1)
    assert not job.stored(), "these are words of the generation before"
    job.written(1, generation=1)
    assert job.stored() == [1]


def test_without_a_folder_nothing_is_written():
    assert Controller(0, Timing())._ctx.policy.store_every_s is None
