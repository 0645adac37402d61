"""A worker's newest committed step and the reach of its calls: neither holds for a history that did not happen."""

from __future__ import annotations

import pytest
from support.stand_in import fake

from deadpool_plugin.comm.generations import Generations
from deadpool_plugin.core import local
from deadpool_plugin.worker.calls import CallLog
from deadpool_plugin.worker.link import AgentLink
from deadpool_plugin.worker.live import Live


def told(*messages: local.LocalMessage) -> AgentLink:
    """A link that has heard `messages` (its thread would end this process together with the connection)."""
    link = AgentLink(fake(), Generations(explain_timeout_s=0.0))
    for message in messages:
        link._note(message, [])
    return link


def test_a_plan_that_goes_behind_a_committed_step_closes_the_gate_again(monkeypatch):
    link = told(local.Committed(9), local.Join(1, "store", 7))
    assert link.committed == 7
    looks = iter([False, True, True])  # the staging thread would wait: it looks again only when something has changed
    monkeypatch.setattr(link._changed, "wait_for", lambda done: done() or done())
    assert link.wait_for_gate(9, lambda: next(looks)) is None
    link._note(local.Committed(8), [])
    assert link.wait_for_gate(9, lambda: False) == 8


def test_a_plan_that_goes_back_no_further_leaves_the_gate_as_it_is():
    assert told(local.Committed(9), local.Join(1, "store", 10)).committed == 9


class Told(Live):
    """A rank in a swap that has made `steps` steps since it took over at `first`; what it would redo is kept."""

    def __init__(self, first: int, steps: int, restore_step: int) -> None:
        self.entered: list[int] = []
        self.said: list[local.LocalMessage] = []
        self._log, self._rank = CallLog(first), 3
        for step in range(first + 1, first + steps + 1):
            self._log.prune(step, step - 2)
        saves = fake(cancel=lambda: [], report_cancelled=lambda *_: None, sweep=lambda *_: None)
        self._context, self._stager = fake(saves=saves), fake(settle=lambda: None)
        self._groups = fake(generations=Generations(explain_timeout_s=0.0))
        self._link = fake(
            event=lambda kind, **fields: None,
            wait_for_join=lambda: local.Join(2, "store", restore_step),
            wait_for_end=lambda interruptible: 86,
            send=self.said.append,
        )

    def _enter(self, order: local.Join | local.TakeOver) -> None:
        self.entered.append(order.restore_step)


@pytest.mark.parametrize("first, steps, restore_step", [(0, 9, 7), (0, 1, 0), (5, 1, 5), (5, 9, 14)])
def test_calls_since_the_restore_step_are_there(first, steps, restore_step):
    rank = Told(first, steps, restore_step)
    rank._swap()
    assert rank.entered == [restore_step] and not rank.said


@pytest.mark.parametrize("first, steps, restore_step", [(0, 9, 6), (5, 1, 4), (5, 0, 0)])
def test_who_lacks_calls_since_the_restore_step_says_so_and_redoes_nothing(first, steps, restore_step):
    rank = Told(first, steps, restore_step)
    with pytest.raises(SystemExit) as end:
        rank._swap()
    assert end.value.code == 86 and not rank.entered
    (message,) = rank.said
    assert isinstance(message, local.OutOfReach)
    for part in (f"go back to step {restore_step}", f"expected step {max(first, first + steps - 2)} or later"):
        assert part in message.reason
