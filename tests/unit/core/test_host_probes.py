"""Signs of life of quiet nodes: who asks whose kernel when, who waits longer for it, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deadpool_plugin.core import api
from deadpool_plugin.core.controller import Controller
from deadpool_plugin.core.messages import AnyMessage, NodeFailed, Prepare, Probe, Promise, Report, Status
from deadpool_plugin.core.policy import Timing
from deadpool_plugin.core.types import Ballot, NodeId, World

TIMING = Timing(
    heartbeat_interval_s=1.0, silent_after_s=8.0, slow_after_s=40.0, phase_timeout_s=80.0, decision_timeout_s=900.0
)
WORLD = World(0, (0, 1, 2, 3), (4,))


def formed(node: NodeId) -> Controller:
    controller = Controller(node, TIMING)
    controller.step(api.WorldFormed(WORLD), 0.0)
    for other in WORLD.members:
        if other != node:
            controller.step(api.Received(other, Report(0)), 0.0)
    return controller


class Story:
    """What a node does while the seconds go by, in which it hears of all others but the `quiet` ones."""

    def __init__(self, node: NodeId, quiet: Sequence[NodeId]) -> None:
        self.controller, self.node, self.quiet, self.now = formed(node), node, set(quiet), 0.0
        self.asked: list[tuple[float, NodeId]] = []
        self.sent: list[tuple[NodeId, AnyMessage]] = []

    def go_on(self, until: float, answering: Sequence[NodeId] = ()) -> Story:
        while self.now < until:
            self.now += 1.0
            for other in WORLD.members:
                if other not in self.quiet and other != self.node:
                    self.take(api.Received(other, Status(0, -1, False) if other == 0 else Report(0)))
            for other in answering:
                self.take(api.HostAnswered(other, 0.5))
            self.take(api.Ticked())
        return self

    def take(self, event: api.Input) -> None:
        for action in self.controller.step(event, self.now):
            if isinstance(action, api.AskHost):
                self.asked.append((self.now, action.node))
            elif isinstance(action, api.Send):
                self.sent.append((action.to, action.message))

    def probes(self) -> list[tuple[NodeId, Probe]]:
        return [(to, message) for to, message in self.sent if isinstance(message, Probe)]

    @property
    def lost(self) -> set[NodeId]:
        return set(self.controller._ctx.suspects)


def test_nobody_is_asked_while_all_are_heard():
    for node in (0, 1):
        story = Story(node, ()).go_on(60.0)
        assert not story.asked and not story.probes() and not story.lost


def test_a_member_that_has_grown_quiet_is_looked_for_and_lost_if_nothing_answers():
    story = Story(0, (2,)).go_on(7.0)
    assert story.asked == [(4.0, 2), (5.0, 2), (6.0, 2), (7.0, 2)]
    assert story.probes()[:2] == [(3, Probe(0, 2)), (4, Probe(0, 2))], "the next two behind it among the members"
    assert not story.lost and story.go_on(8.0).lost == {2}


def test_a_quiet_coordinator_is_looked_for_by_every_member_without_witnesses():
    story = Story(3, (0,)).go_on(7.0)
    assert story.asked == [(4.0, 0), (5.0, 0), (6.0, 0), (7.0, 0)] and not story.probes()
    assert story.go_on(8.0).lost == {0}


@pytest.mark.parametrize(("node", "quiet"), [(0, 2), (3, 0)])
def test_a_slow_node_is_waited_for_and_lost_in_the_end(node, quiet):
    story = Story(node, (quiet,)).go_on(39.0, answering=(quiet,))
    assert not story.lost and story.go_on(40.0, answering=(quiet,)).lost == {quiet}


def test_a_host_that_answers_no_more_is_lost_a_patience_later():
    story = Story(0, (2,)).go_on(20.0, answering=(2,)).go_on(27.0)
    assert not story.lost and story.go_on(28.0).lost == {2}


def test_a_slow_node_that_speaks_again_is_well():
    story = Story(0, (2,)).go_on(30.0, answering=(2,))
    story.quiet.clear()
    assert not story.go_on(100.0).lost
    story.quiet.add(2)
    assert story.go_on(108.0).lost == {2}, "what its host answered long ago does not count"


def test_a_slow_node_does_not_keep_a_dead_one_from_being_replaced():
    story = Story(0, (2, 3)).go_on(8.0, answering=(2,))
    assert story.lost == {3} and any(isinstance(message, Prepare) for _, message in story.sent)


def test_a_witness_passes_on_what_it_finds_and_nothing_else():
    story = Story(3, ())
    story.take(api.Received(0, Probe(0, 2)))
    assert story.asked == [(0.0, 2)] and not story.probes()
    story.take(api.HostAnswered(2, 0.1))
    assert story.probes() == [(0, Probe(0, 2, answered=True))]
    story.take(api.HostAnswered(2, 0.1))
    assert len(story.probes()) == 1, "nobody has asked again"
    story.take(api.Received(0, Probe(0, 3)))
    assert story.asked == [(0.0, 2)], "of itself it need not ask"


def test_what_a_witness_finds_is_a_sign_of_life():
    story = Story(0, (2,)).go_on(6.0)
    story.take(api.Received(4, Probe(0, 2, answered=True)))
    assert not story.go_on(13.0).lost and story.go_on(14.0).lost == {2}


def test_a_voter_helps_nobody_to_replace_a_coordinator_that_is_only_slow():
    story = Story(2, (0,)).go_on(10.0, answering=(0,))
    story.take(api.Received(1, Prepare(Ballot(1, 1, 1), (0,), (0,))))
    story.go_on(30.0, answering=(0,))
    assert not any(isinstance(message, Promise) for _, message in story.sent)
    story.go_on(39.0)
    assert any(isinstance(message, Promise) for _, message in story.sent), "its host answers no more"


def test_who_does_not_hear_a_host_that_answers_has_lost_its_own_way_to_it():
    """A complaint about a node whose host answers the coordinator is no evidence of a loss."""
    story = Story(0, (2,)).go_on(10.0, answering=(2,))
    story.take(api.Received(3, NodeFailed(0, 2, "cannot mirror to it", silent=True)))
    assert not story.lost
