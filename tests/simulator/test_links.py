"""Few links are enough: who coordinates, and who would next, has one with everybody; others look when it matters."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deadpool_plugin.agent.links import LOWEST
from deadpool_plugin.core import api, events
from deadpool_plugin.transport.sockets import why_unreachable

from .network import node_at

NODES = {"active": 9, "spares": 5, "slots": 1, "copies": 1}


def links_of(job):
    return {number: node.agent._links.mesh.linked for number, node in job.nodes.items() if node.up}


def expected(members):
    lowest = set(sorted(members)[:LOWEST])
    return {node: frozenset((members if node in lowest else lowest) - {node}) for node in members}


def test_the_lowest_are_linked_with_everybody_and_a_loss_makes_no_other_links(start):
    job = start(**NODES).train()
    members = {*range(14)}
    assert links_of(job) == expected(members)
    job.strike("kill", 7)
    job.until(lambda: len(job.told(events.Mirrored)) > 1)
    assert links_of(job) == expected(members - {7}) and len(job.plans) == 1
    job.end()
    assert {code for node, code in job.exits.items() if node != 7} == {0}


@pytest.mark.parametrize("lost", [(0,), (0, 2), (0, 2, 4, 6)])
def test_after_a_loss_among_them_the_next_are(start, lost):
    job = start(**NODES).train()
    for node in lost:
        job.strike("kill", node)
    job.until(lambda: len(job.told(events.SwapDone)) and len(job.newest_world.members) == 14 - len(lost))
    job.hold()
    job.idle(2 * job.timing.silent_after_s)
    members = {*range(14)} - {*lost}
    assert all(links >= expected(members)[node] for node, links in links_of(job).items())
    job.end()
    assert {code for node, code in job.exits.items() if node not in lost} == {0}


def test_all_that_are_linked_with_everybody_are_lost_at_once(start):
    """Each loss is known in less than a silence: who listens no more is lost, and the next is turned to."""
    job = start(**NODES | {"copies": 5}).train()
    began = job.timeline.now
    for node in range(LOWEST + 1):
        job.strike("kill", node)
    job.until(lambda: len(job.newest_world.members) == 13 - LOWEST)
    assert job.timeline.now - began < job.timing.silent_after_s
    job.end()
    assert {code for node, code in job.exits.items() if node > LOWEST} == {0}


def test_all_that_are_linked_with_everybody_fall_silent_with_some_others(start):
    """Those after the four are asked all at once, not each when it is turned to: a first link may take longer."""
    job = start(**NODES | {"active": 12, "spares": 7, "copies": 7}).train()
    began, silent = job.timeline.now, range(LOWEST + 3)
    for node in silent:
        job.strike("crash", node)
    job.until(lambda: len(job.newest_world.members) == 19 - len(silent))
    assert job.timeline.now - began < 4 * job.timing.silent_after_s + job.timing.slow_after_s
    job.end()
    assert {code for node, code in job.exits.items() if node not in silent} == {0}


def test_who_look_around_do_so_one_after_another_and_ask_the_nearest_first(start, monkeypatch):
    job = start(**NODES).train()
    asked = []

    async def noted(address, within_s):
        loop: Any = asyncio.get_running_loop()
        asked.append((job.timeline.now, loop.kernel.node, node_at(address[0])))
        return await why_unreachable(address, within_s)

    monkeypatch.setattr("deadpool_plugin.transport.mesh.why_unreachable", noted)
    job.hold()
    job.until(lambda: len({looker for _, looker, _ in asked}) == 4)
    first = {looker: (now, node) for now, looker, node in reversed(asked)}
    assert {looker: node for looker, (_, node) in first.items()} == {looker: looker - 1 for looker in range(5, 9)}
    assert len({now for now, _ in first.values()}) == 4
    job.end()
    assert {*job.exits.values()} == {0}


def test_two_that_have_no_link_find_out_that_they_cannot_reach_each_other(start):
    """Their processes hang, and nobody knows whose fault that is."""
    job = start(**NODES).train()
    job.hold()
    job.isolate({5}, {6})
    job.until(lambda: job.told(events.NodeLost))
    assert {(6, api.LookAround((5, 4, 3, 2, 1, 0))), (5, api.LookAround((4, 3, 2, 1, 0)))} <= {*job.all(api.LookAround)}
    (lost,) = job.told(events.NodeLost)[0].lost
    assert lost in (5, 6) and "cannot reach each other" in " ".join(job.reasons.values())
    job.end()
    assert {code for node, code in job.exits.items() if node != lost} == {0}


def test_one_that_stands_still_while_many_hosts_link_up_costs_nobody_else(start, monkeypatch):
    """The four wait for it longer than the others do, who must not miss the four meanwhile."""
    monkeypatch.setattr(
        "deadpool_plugin.transport.first_links.LOOKS_MAX", 1.5
    )  # they look as rarely as in a job of 500
    job = start(**NODES | {"active": 8, "spares": 4})
    job.until(lambda: job.nodes[0].agent and job.nodes[0].agent._links.mesh._addresses)
    job.freeze(7)
    job.until(lambda: len(job.newest_world.members) < 12)
    assert set(range(12)) - {*job.newest_world.members} == {7}
    job.end()
    assert {code for node, code in job.exits.items() if node != 7} == {0}
