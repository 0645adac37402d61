"""spares.py: when the coordinator runs `spare_command`, for how many hosts. Whole jobs: simulator/test_supply.py."""

from __future__ import annotations

from deadpool_plugin.core import api, events
from deadpool_plugin.core.context import Context
from deadpool_plugin.core.policy import Policy
from deadpool_plugin.core.spares import ATTEMPTS_MAX, ATTEMPTS_WINDOW_S, RETRY_MAX_S, SpareSupply
from deadpool_plugin.core.types import World

from .test_controller import TIMING

WHOLE, ONE_LOST = World(0, (0, 1, 2), (3, 4)), World(1, (0, 1, 3), (4,))
LIMIT_S = 100.0
P = TIMING.silent_after_s


class Supplied:
    """A node of a job that was given two spares, on a clock of whole seconds."""

    def __init__(self, world: World = ONE_LOST, node: int = 0) -> None:
        policy = Policy(spares=2, spare_command=True, spare_command_limit_s=LIMIT_S)
        self.ctx = Context(node, TIMING, policy)
        self.supply = SpareSupply(self.ctx)
        self.ctx.form(world)

    def after(self, seconds: float) -> list[api.Action]:
        """Return what is done within so many seconds."""
        for _ in range(int(seconds)):
            self.ctx.now += 1.0
            self.ctx.awake = self.ctx.contact_at = self.ctx.now
            self.supply.tick()
        return self.ctx.take_actions()

    def ended(self, failed: int = 0, said: str = "") -> list[api.Action]:
        self.supply.ended(api.SpareCommandEnded(failed, said))
        return self.ctx.take_actions()


def runs(actions: list[api.Action]) -> list[int]:
    """Return for how many hosts each run was."""
    return [action.hosts for action in actions if isinstance(action, api.RunSpareCommand)]


def told(actions: list[api.Action]) -> list[events.Event]:
    return [action.event for action in actions if isinstance(action, api.Emit)]


def test_it_runs_when_hosts_are_missing_once_until_its_host_is_late():
    assert not Supplied(WHOLE).after(1000)
    job = Supplied()
    first = job.after(1)
    assert (runs(first), told(first)) == ([1], [events.SpareCommandStarted(1, 1)])
    assert not job.after(10 * LIMIT_S), "it still runs"
    assert told(job.ended(said="job 7")) == [events.SpareCommandDone("job 7", LIMIT_S)]
    assert not job.after(LIMIT_S - 1)
    late = job.after(1 + P)
    assert told(late) == [
        events.SpareCommandFailed("none has joined within 100 s of its end", P), events.SpareCommandStarted(1, 2)
    ]  # fmt: skip
    assert runs(late) == [1]


def test_pauses_double_and_attempts_are_bounded_until_the_window_is_over_or_a_host_has_joined():
    job, pauses = Supplied(), list[float]()
    assert runs(job.after(1)) == [1]
    for _ in range(ATTEMPTS_MAX - 1):
        (failed,) = told(job.ended(1, "exit code 1"))
        assert isinstance(failed, events.SpareCommandFailed) and failed.reason == "exit code 1"
        pauses.append(failed.retry_s)
        assert not job.after(failed.retry_s - 1) and runs(job.after(1)) == [1]
    assert pauses == [min(P * 2**attempt, RETRY_MAX_S) for attempt in range(ATTEMPTS_MAX - 1)]
    job.ended(1, "exit code 1")
    assert told(job.after(2 * RETRY_MAX_S)) == [events.SpareCommandExhausted(ATTEMPTS_MAX, ATTEMPTS_WINDOW_S)]
    job.supply.joined(1)
    job.supply.joined(0)
    assert told(job.after(1)) == [events.SpareCommandStarted(1, 1)], "a host joined, and another one is missing"
    job = Supplied()
    for _ in range(ATTEMPTS_MAX):
        job.after(RETRY_MAX_S)
        job.ended(1)
    assert not runs(job.after(ATTEMPTS_WINDOW_S - (ATTEMPTS_MAX + 1) * RETRY_MAX_S))
    assert runs(job.after(2 * RETRY_MAX_S)) == [1]


def test_what_an_earlier_run_is_to_bring_is_not_asked_for_again():
    job = Supplied(World(2, (4, 1, 3)), node=1)
    assert runs(job.after(1)) == [2]
    job.ended(failed=1, said="no quota")
    assert not job.after(P - 1) and runs(job.after(1)) == [1], "only for the one that failed"
    job.ended()
    job.ctx.form(World(3, (4, 1, 3), (7,)))
    job.supply.joined(1)
    assert not job.after(LIMIT_S - 10), "the other is awaited still"
    job.ctx.form(World(4, (7, 1, 3)))
    assert runs(job.after(1)) == [1], "a further loss"


def test_a_command_that_brings_two_hosts_is_not_run_again():
    job = Supplied()
    job.after(1)
    job.ended()
    job.ctx.form(World(2, (0, 1, 3), (4, 7, 8)))
    job.supply.joined(2)
    assert not job.after(10 * LIMIT_S)


def test_what_becomes_of_a_command_whose_host_has_joined_matters_to_nobody():
    job = Supplied()
    job.after(1)
    job.ctx.form(World(2, (0, 1, 3), (4, 7)))
    job.supply.joined(1)
    assert not job.ended(1, "exit code 1") and not job.after(10 * LIMIT_S)
    job.ctx.form(World(3, (0, 1, 3), (4,)))
    assert runs(job.after(1)) == [1]


def test_a_host_that_asks_to_join_is_not_missing():
    job = Supplied()
    job.ctx.candidates[7] = ""
    job.ctx.watch.hear(7, 0.0)
    assert not job.after(P - 1)
    assert runs(job.after(2)) == [1], "it is not heard any more"


def test_only_a_coordinator_that_decides_runs_it():
    job = Supplied(node=1)
    assert not job.after(100)
    job.ctx.suspect(0, "gone")
    assert not job.after(100), "whether node 0 is lost is undecided"
    job.ctx.form(World(2, (4, 1, 3)))
    job.ctx.watch.evidence.clear()
    job.after(0)
    assert runs(job.after(1)) == [2]
    fenced = Supplied()
    fenced.ctx.swapping = True
    assert not fenced.after(100)
    fenced.ctx.waiting = True
    fenced.ctx.suspect(3, "gone")
    assert runs(fenced.after(1)) == [2], "who is lost is decided, and nobody can take its place"
    alone = Supplied()
    alone.ctx.now = 100.0
    alone.supply.tick()
    assert alone.ctx.cut_off and not alone.ctx.take_actions()


def test_a_new_coordinator_waits_as_the_command_may_just_have_been_run():
    job = Supplied(World(1, (0, 1, 3), (4,)), node=1)
    job.after(50)
    job.ctx.form(World(2, (4, 1, 3)))
    assert job.ctx.leads
    assert not job.after(P - 1)
    assert runs(job.after(1)) == [2]


def test_without_a_command_nothing_is_run():
    job = Supplied()
    job.ctx.policy = Policy(spares=2)
    assert not job.after(1000)
