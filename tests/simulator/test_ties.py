"""Ties that a witness breaks: one half goes on, whichever it is; the other, or a half without its answer, leaves."""

from __future__ import annotations

import pytest

from deadpool_plugin.core import events
from deadpool_plugin.core.types import EXIT_FENCED, SwapPlan, World

PAIR = {"active": 1, "spares": 1, "witness": True, "restarts_max": 9}


@pytest.mark.parametrize("lost", [0, 1])
def test_one_active_node_and_a_spare_survive_the_loss_of_either(start, lost):
    job = start(**PAIR, steps=40).train()
    job.strike("kill", lost)
    assert job.end() == {lost: None, 1 - lost: 0}
    assert job.witnessed == job.plans and job.plans[1].lost_nodes == (lost,)


@pytest.mark.parametrize("half", [{0, 2}, {0, 3}])
@pytest.mark.parametrize("heals_after_s", [9.2, 10.2, 11.0, 14.0, 60.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_of_two_halves_one_goes_on(start, seed, half, heals_after_s):
    """ONE_WORLD_PER_GENERATION and that the other one has stopped before are checked with every plan."""
    job = start(seed=seed, active=2, spares=2, slots=1, witness=True, restarts_max=9).train()
    job.hold()
    job.isolate(half)
    job.idle(heals_after_s)
    job.heal()
    job.idle(6 * job.timing.silent_after_s)
    codes = job.end()
    assert {number for number, code in codes.items() if code == 0} == set(job.newest_world.members)
    assert set(codes.values()) <= {0, 86, 87}


def test_a_half_that_gets_no_answer_leaves(start, monkeypatch):
    def stale(name: str, plan: SwapPlan) -> SwapPlan:
        raise OSError("stale file handle")

    job = start(**PAIR, steps=40).train()
    monkeypatch.setattr(job.witness, "keep", stale)
    job.excuses = ("witness has not answered",)
    job.strike("kill", 0)
    assert job.end()[1] == 86 and job.excuses[0] in job.reasons[1]


@pytest.mark.parametrize("half", [0, 1])
def test_a_half_that_waits_for_a_host_finds_that_the_other_has_gone_on(start, half):
    job = start(active=2, spares=0, witness=True, wait_for_hosts=True, restarts_max=9, steps=40).train()
    job.strike("rift", 0)
    job.until(lambda: len(job.told(events.WaitingForHost)) == 2)
    job.idle(3 * job.timing.silent_after_s)
    assert all(node.up for node in job.nodes.values()), "the witness keeps nothing yet"
    job.witness.kept[1] = SwapPlan(World(1, (half, half, 7, 7)), 0, (1 - half,), (), "store", joined=(7,))
    job.strike("kill", half)
    job.until(lambda: not job.nodes[1 - half].up)
    assert job.exits[1 - half] == EXIT_FENCED
