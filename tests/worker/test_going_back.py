"""A worker's newest committed step and the reach of its calls: neither holds for a history that did not happen."""

from __future__ import annotations

import pytest
import torch
from support.live_rank import Rank
from support.stand_in import fake

from deadpool_plugin.comm.generations import Generations
from deadpool_plugin.core import local
from deadpool_plugin.worker import live
from deadpool_plugin.worker.calls import CallLog
from deadpool_plugin.worker.copies import COPIED_BYTES_MAX, Kept
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


@pytest.mark.parametrize("free_mib, ranks, most", [(1024, 1, 3), (1024, 2, 1), (16, 1, 1), (64 << 10, 1, 255)])
def test_snapshots_are_no_further_apart_than_memory_allows_for_what_calls_were_given(
    monkeypatch, free_mib, ranks, most
):
    """Two steps keep 64 MiB: of 1,024 MiB that are free, and those, a quarter is enough for eight steps."""
    rank = Rank()
    rank._log.prune(2, 0)
    monkeypatch.setattr(live, "budgets", lambda: [fake(available_bytes=free_mib << 20)])
    monkeypatch.setattr(Kept, "nbytes", {False: 64 << 20, True: 0})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    for _ in range(2):
        rank._limit_distance()
    assert rank._stager.most == most
    notes = [text for kind, text in rank.said if kind == "Note"]
    assert len(notes) == (most < 16)
    assert all("32.0 MiB a step" in str(text) and f"{most} steps apart at most" in str(text) for text in notes)


def test_what_is_kept_is_counted_until_it_is_forgotten():
    before = Kept.nbytes[False]
    kept = [Kept([torch.zeros(1000), torch.zeros(COPIED_BYTES_MAX)]) for _ in range(2)]
    assert Kept.nbytes[False] - before == 2 * (4000 + 4 * COPIED_BYTES_MAX)
    kept.pop()
    assert Kept.nbytes[False] - before == 4000 + 4 * COPIED_BYTES_MAX
