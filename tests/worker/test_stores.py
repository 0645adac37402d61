"""Who hosts the next store: a worker whose entry into a generation is interrupted offers another one."""

from __future__ import annotations

import types

import pytest

from deadpool_plugin.errors import GenerationChanged
from deadpool_plugin.transport import local
from deadpool_plugin.worker.swap import Swapping


class Interrupted(Swapping):
    """A rank whose group builds are interrupted so many times; everything else of it is left out."""

    def __init__(self, interruptions: int) -> None:
        self.entered, self.offers, self._left = [], 0, interruptions
        self._swap_began = None
        saves = types.SimpleNamespace(cancel=lambda: [], report_cancelled=lambda cancelled, step: None)
        self._context = types.SimpleNamespace(saves=saves, offer_store=self._offer)
        self._link = types.SimpleNamespace(
            aborted_at=0.0, event=lambda kind, **fields: None, wait_for_join=lambda rank: local.Join(2, "store", 5)
        )
        self._log = types.SimpleNamespace(after_cut=lambda step: [], oldest=0)
        self._adapter = types.SimpleNamespace(random_states=lambda: None)
        self._rank = 0

    def _offer(self) -> None:
        self.offers += 1

    def enter(self, generation: int, store: str, restore_step: int) -> None:
        if self._left:
            self._left -= 1
            raise GenerationChanged(generation + 1)
        self.entered.append(generation)


@pytest.mark.parametrize("interruptions", [0, 1, 3])
def test_an_interrupted_entry_offers_one_store_more(interruptions):
    rank = Interrupted(interruptions)
    rank._swap()
    assert rank.entered == [2] and rank.offers == interruptions
