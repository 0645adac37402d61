"""Which steps are snapshots: what the coordinator says of it, and what each node tells its workers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deadpool_plugin.core import api, events, local
from deadpool_plugin.core.chain import AUTO
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.messages import Decided, Report, Status
from deadpool_plugin.core.placement import buddies_of
from deadpool_plugin.core.policy import Policy, Timing
from deadpool_plugin.core.types import NO_STEP, Ballot, Holding, Step, SwapPlan, World

WORLD = World(0, (0, 1, 2), (3,))
TIMING = Timing(heartbeat_interval_s=1.0, silent_after_s=10.0)


class Job:
    """The controller of one node, which hears everybody's reports."""

    def __init__(self, every: int, node: int = 0) -> None:
        self.controller, self.now = Controller(node, TIMING, Policy(mirror_every=every)), 0.1
        self.actions = self.controller.step(api.WorldFormed(WORLD), self.now)

    def step(self, event: api.Input) -> None:
        self.now += 0.01
        self.actions += self.controller.step(event, self.now)

    def commit(self, step: Step, took_steps: float = 0.0, **said: Sequence[Step]) -> None:
        """Every rank has `step` at home and on its buddy."""
        for node in WORLD.active:
            held = [rank for rank, home in enumerate(WORLD.node_of) if node in (home, *buddies_of(WORLD, home, 1))]
            holdings = tuple(Holding(rank, step, True, (rank,)) for rank in held)
            ready = WORLD.ranks_of(node)
            self.step(api.Received(node, Report(0, holdings, ready, took_steps=took_steps, **said)))  # type: ignore[arg-type]

    def report(self, **said: Sequence[Step]) -> None:
        self.step(api.Received(1, Report(0, ready=(1,), **said)))  # type: ignore[arg-type]

    @property
    def status(self) -> Status:
        sent = [action.message for action in self.actions if isinstance(action, api.Send)]
        return [message for message in sent if isinstance(message, Status)][-1]

    def of(self, kind: type[api.Action]) -> list[api.Action]:
        return [action for action in self.actions if isinstance(action, kind)]

    @property
    def paced(self) -> list[tuple[int, float]]:
        told = [action.event for action in self.actions if isinstance(action, api.Emit)]
        return [(event.every, event.steps) for event in told if isinstance(event, events.MirroringPaced)]


def test_every_step_is_one_as_long_as_mirroring_keeps_up():
    job = Job(AUTO)
    for step in range(6):
        job.commit(step, 0.9)
        assert (job.status.committed, job.status.snapshots, job.status.every) == (step, (step + 1, step + 2), 1)
        assert job.of(api.Commit)[-1] == api.Commit(step, (step + 1, step + 2))
    assert not job.paced and not job.of(api.Announce)


def test_of_a_fixed_distance_nothing_need_be_said():
    job = Job(4)
    for step in (0, 4, 8):
        job.commit(step, 9.0)
        assert (job.status.committed, job.status.snapshots, job.status.void) == (step, (), ())
        assert job.of(api.Commit)[-1] == api.Commit(step)
    assert not job.paced


def test_who_mirrors_slowly_mirrors_less_often_and_it_is_said():
    job = Job(AUTO)
    for step in (0, 1):
        job.commit(step)
    job.commit(2, 3.1)
    assert job.status.snapshots == (3, 4)
    job.commit(3, 3.1)
    assert job.paced == [(4, 3.1)] and job.status.snapshots == (4, 8) and job.status.every == 4
    for step in range(4, 40, 4):
        job.commit(step, 0.2)
    assert job.paced == [(4, 3.1), (1, 0.2)] and job.status.every == 1


@pytest.mark.parametrize("every", [AUTO, 8])
def test_a_step_that_a_save_waits_for_becomes_a_snapshot_or_is_void(every):
    job = Job(every)
    for step in (0, 1, 2, 3, 4) if every == AUTO else (0, 8):
        job.commit(step, 9.0)
    last, following = job.status.committed, job.controller._ctx.chain.after(job.status.committed)
    wanted = following + 1
    job.report(wanted=(wanted,))
    assert wanted in job.status.snapshots and wanted in job.controller._ctx.chain
    assert job.of(api.Announce)[-1] == api.Announce(job.status.snapshots, ())
    job.report(wanted=(wanted,), passed=(wanted,))
    assert wanted not in job.status.snapshots and job.status.void == (wanted,)
    assert job.of(api.Announce)[-1] == api.Announce(job.status.snapshots, (wanted,))
    job.report(wanted=(wanted, last))
    assert wanted not in job.controller._ctx.chain and job.controller._ctx.chain.is_void(wanted)
    assert last not in job.status.snapshots, "it is committed"
    job.commit(following)
    job.commit(job.controller._ctx.next_snapshot)
    assert not job.status.void


def test_a_snapshot_that_is_void_after_the_commit_before_it_leaves_two_known():
    """Else the commit of the one after it says none, and all ranks wait for ever."""
    job = Job(AUTO)
    for step in (0, 1, 2, 3, 4):
        job.commit(step, 3.1)
    following, last = job.status.snapshots
    assert last - following == 4
    wanted = following + 1
    job.report(wanted=(wanted,))
    job.commit(following, 3.1)
    assert job.status.snapshots == (wanted, last), "two are known"
    job.report(wanted=(wanted,), passed=(wanted,))
    assert (job.status.snapshots, job.status.void) == ((last, last + 4), (wanted,))
    assert job.of(api.Announce)[-1] == api.Announce((last, last + 4), (wanted,))
    job.commit(last, 3.1)
    assert (job.status.snapshots, job.status.void) == ((last + 4, last + 8), ())
    job.report(passed=(wanted,))
    assert not job.status.void, "that is settled"


def test_who_leads_for_want_of_another_chooses_nothing():
    """Its coordinator is silent for it, which is not enough for a swap yet: that one may have chosen something else."""
    job = Job(AUTO, node=1)
    job.step(api.Received(0, Status(0, 5, True, every=2, snapshots=(7, 9))))
    assert job.of(api.Commit) == [api.Commit(5, (7, 9))]
    job.now = 7.0
    job.controller._ctx.suspect(0, "silent", silent=True)
    for node in (1, 2):
        holdings = tuple(Holding(rank, 7, True, (rank,)) for rank in range(3))
        job.step(api.Received(node, Report(0, holdings, (0, 1, 2), wanted=(8,))))
    job.step(api.Ticked())
    assert job.controller._ctx.leads and not job.controller._ctx.chooses
    assert (job.status.committed, job.status.snapshots) == (NO_STEP, ()), "what it says takes nothing back"
    assert job.controller._ctx.chain.announced(5) == (7, 9)


def test_what_workers_say_of_snapshots_is_reported_until_it_is_settled():
    job = Job(8, node=2)
    for said in (local.Wanted(2, 3, 0), local.Passed(2, 5, 0), local.Wanted(2, 4, 9)):
        job.step(said)
    reports = [action.message for action in job.actions if isinstance(action, api.Send)]
    report = reports[-1]
    assert isinstance(report, Report) and (report.wanted, report.passed) == ((3,), (5,)), "9 is another generation"
    job.step(api.Received(0, Status(0, 3, True)))
    job.controller._processes.report()
    newest = job.controller.step(api.Ticked(), job.now)
    sent = [action.message for action in newest if isinstance(action, api.Send)]
    assert [(one.wanted, one.passed) for one in sent if isinstance(one, Report)][-1] == ((), (5,))


def test_a_swap_begins_the_chain_anew_as_far_apart_as_the_plan_says():
    job = Job(AUTO, node=2)
    job.step(api.Received(0, Status(0, 5, True, every=2, snapshots=(7, 9))))
    plan = SwapPlan(World(1, (0, 3, 2)), 5, (1,), (), "store", every=3)
    job.step(api.Received(0, Decided(plan, Ballot(1, 1, 0))))
    chain = job.controller._ctx.chain
    assert [step for step in range(20) if step in chain] == [5, 8, 11] and chain.after(11) == NO_STEP
