"""A rank in training among stand-ins of its agent, groups and framework, for tests of its calls and its swaps."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from deadpool_plugin.comm.generations import Generations
from deadpool_plugin.core.chain import Chain
from deadpool_plugin.mirror.arena import SlotPair
from deadpool_plugin.worker.follow import Follow
from deadpool_plugin.worker.live import Live
from deadpool_plugin.worker.resumable import Tapes
from deadpool_plugin.worker.staging import Layout

from .stand_in import fake


class Rank(Live):
    """One that made `step` steps, of which nothing is ever committed; its swaps do nothing but enter a generation."""

    _groups: Any
    _stager: Any

    def __init__(self, step: int = 0) -> None:
        self.generations, self.swaps = Generations(explain_timeout_s=0.0), 0
        self.said: list[tuple[str, Any]] = []
        self.weights = torch.zeros(3)
        link = fake(
            committed=-1,
            wait_until=self._wait_until,
            wait_for_end=lambda: 0,
            send=lambda message: None,
            event=lambda kind, **fields: self.said.append((kind, fields.get("text"))),
            chain=Chain(),
            locked=contextlib.nullcontext,
        )
        adapter = fake(
            guessed=lambda: "",
            rng_states=dict,
            set_rng_states=lambda states: None,
            state=fake(changing=(), entry_state=lambda: lambda: None, left=lambda: None, owns=lambda tensor: False),
        )
        self.groups = fake(generations=self.generations, generation=0)
        saves = fake(step=0, under_way=contextlib.nullcontext)
        context = fake(link=link, adapter=adapter, groups=self.groups, tapes=Tapes(), saves=saves)
        layout = Layout([self.weights])
        super().__init__(context, layout, SlotPair.create(3, 4096, layout.payload_bytes), step)
        self._restored = step

    def _wait_until(self, done: Any, interruptible: bool = True) -> None:
        assert done(), "it would wait for ever"

    def _swap(self) -> None:
        self.swaps += 1
        self.generations.enter(self.generations.announced)

    def stages_nothing(self, swap_began: float | None = None) -> None:
        """Let its cuts copy nothing. `swap_began`: as if it had been in a swap since then."""
        self.stage, self._swap_began = lambda step, random_states=None: None, swap_began  # type: ignore[method-assign]
        self._stager = fake(wait=lambda: None, oldest=-1, begun=0)


def follower(rank: Rank) -> Follow:
    """Make a process that has the records of `rank` since its last step."""
    context = fake(tapes=Tapes(), difference=None, adapter=rank._adapter, link=rank._link, groups=rank.groups)
    one = Follow(context, 3, "", fake(), fake(gone=()), fake(finish=lambda restored: None))
    one._layout = fake()
    one._segments.append(rank._log.records(rank._log.step))
    return one
