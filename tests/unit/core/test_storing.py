"""Steps that all hosts write to disk while the job runs: who is told, when a step is whole, and who begins anew."""

from __future__ import annotations

from collections import deque

from deadpool_plugin.core import api, events
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.policy import Policy, Timing
from deadpool_plugin.core.types import Holding, NodeId, Step, World

WORLD = World(0, (0, 1, 2), (3,))
EVERY_S = 1.0


class Job:
    """Controllers of a job in training; messages arrive in the order in which they were sent."""

    def __init__(self) -> None:
        policy = Policy(store_every_s=EVERY_S)
        self.controllers = {node: Controller(node, Timing(), policy) for node in WORLD.members}
        self.actions, self.now = list[tuple[NodeId, api.Action]](), 0.0
        self._queue: deque[tuple[NodeId, api.Input]] = deque()
        for node in WORLD.members:
            self.feed(node, api.WorldFormed(WORLD))
        self.feed(0, api.StoreOffered("store"))
        for rank, home in enumerate(WORLD.node_of):
            self.feed(home, api.WorkerReady(rank))
            self.feed(home, api.StoreOffered(f"store {rank}"))

    def feed(self, node: NodeId, event: api.Input) -> None:
        self._queue.append((node, event))
        while self._queue:
            to, what = self._queue.popleft()
            if to not in self.controllers:
                continue
            for action in self.controllers[to].step(what, self.now):
                self.actions.append((to, action))
                if isinstance(action, api.Send):
                    self._queue.append((action.to, api.Received(to, action.message)))

    def commit(self, step: Step, after_s: float = 0.3, generation: int = 0) -> None:
        self.now += after_s
        world = next(iter(self.controllers.values())).world
        assert world is not None
        for rank, home in enumerate(world.node_of):
            for holder in (home, world.active[(world.active.index(home) + 1) % len(world.active)]):
                self.feed(holder, api.SnapshotHeld(Holding(rank, step, True, (rank,)), generation, step - 1))

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
    assert job.told(api.WriteStep) == dict.fromkeys(WORLD.members, [3, 7, 11])


def test_a_step_is_whole_once_all_that_run_ranks_have_written_it():
    job = Job()
    for step in range(4):
        job.commit(step)
    for node in (2, 1):
        job.feed(node, api.StepWritten(3, 0))
        assert not job.stored() and not job.told(api.StepStored)
    job.feed(0, api.StepWritten(3, 0))
    assert job.stored() == [3] and job.told(api.StepStored) == dict.fromkeys(WORLD.members, [3])


def test_a_step_that_one_host_has_left_out_is_never_whole():
    """Host 1 could not write step 3: that the others have it, and that it has step 7, makes neither whole by itself."""
    job = Job()
    for step in range(8):
        job.commit(step)
        for node in (0, 2) if step == 3 else ():
            job.feed(node, api.StepWritten(3, 0))
    job.feed(1, api.StepWritten(7, 0))
    assert not job.stored()
    for node in (0, 2):
        job.feed(node, api.StepWritten(7, 0))
    assert job.stored() == [7]


def test_after_a_swap_it_begins_anew_and_what_was_written_before_does_not_count():
    job = Job()
    for step in range(4):
        job.commit(step)
    del job.controllers[1]
    for node in tuple(job.controllers):
        job.feed(node, api.LinkLost(1, "connection reset"))
    assert {one.generation for one in job.controllers.values()} == {1}
    for node in (0, 2, 3):
        job.feed(node, api.StepWritten(3, 0))
    job.commit(4, generation=1)
    assert not job.stored() and job.told(api.WriteStep)[0] == [3]
    for step in range(5, 8):
        job.commit(step, generation=1)
    assert job.told(api.WriteStep)[3] == [3, 7], "the spare, too, which runs a rank now"
    for node in (0, 2, 3):
        job.feed(node, api.StepWritten(7, 1))
    assert job.stored() == [7]


def test_without_a_folder_nothing_is_written():
    controller = Controller(0, Timing())
    assert controller._ctx.policy.store_every_s is None
