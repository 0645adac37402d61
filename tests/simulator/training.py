"""The toy model every simulated job trains: floating point arithmetic, small enough to compute in advance.

Rules of this file: an update needs every rank's gradient of the same step in the order of ranks, so ranks that mix
steps get other numbers, which `Reference` shows. Ranks of one shard keep the same payload (data-parallel replicas);
header and random state are each rank's own. `history` names the generations all steps were made in, so that two
histories differ even where their numbers do not (a real job need not repeat itself bit for bit).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from deadpool_plugin.core.types import Generation, Rank, Step


class State(NamedTuple):
    """State that a rank must get back to go on as if nothing had happened."""

    weight: float
    momentum: float
    random: int
    position: int
    history: int

    @property
    def payload(self) -> bytes:
        return struct.pack("<ddQ", self.weight, self.momentum, self.history)

    @property
    def header(self) -> bytes:
        return struct.pack("<QQQ", self.random, self.position, self.history)

    @property
    def numbers(self) -> tuple[float, float, int, int]:
        """All but the history."""
        return self[:4]


def restored(payload: bytes, header: bytes) -> State | None:
    """The state of a snapshot; None if payload and header are of different histories."""
    weight, momentum, history = struct.unpack("<ddQ", payload)
    random, position, same = struct.unpack("<QQQ", header)
    return State(weight, momentum, random, position, history) if history == same else None


def first_state(rank: Rank, shard: int) -> State:
    return State(1.0 + shard / 8, 0.0, rank + 1, 0, 0)


def gradient(state: State) -> float:
    """Depends on the shard, the random state and the data position."""
    sample = ((state.random * 48271 + state.position * 69621) % 2147483647) / 2147483647
    return state.weight * 0.5 - sample


def updated(state: State, total: float, shard: int, generation: Generation) -> State:
    """One step, made in `generation` from the sum of all ranks' gradients."""
    momentum = 0.9 * state.momentum + total * (1.0 + shard / 16)
    return State(
        state.weight - 0.01 * momentum,
        momentum,
        (state.random * 48271 + 11) % 2147483647,
        state.position + 1,
        (state.history * 1000003 + generation + 1) % (1 << 61),
    )


def summed(gradients: Sequence[float]) -> float:
    total = 0.0
    for one in gradients:
        total += one
    return total


class Reference:
    """The job without a failure: each rank's state at each step. `shard_of[rank]` names who keeps the same payload."""

    def __init__(self, shard_of: tuple[int, ...]) -> None:
        self._shard_of = shard_of
        self._states = [tuple(first_state(rank, shard) for rank, shard in enumerate(shard_of))]

    def state(self, rank: Rank, step: Step) -> State:
        while len(self._states) <= step:
            newest = self._states[-1]
            total = summed([gradient(state) for state in newest])
            self._states.append(
                tuple(updated(state, total, shard, 0) for state, shard in zip(newest, self._shard_of, strict=True))
            )
        return self._states[step][rank]


@lru_cache(maxsize=256)
def reference(shard_of: tuple[int, ...]) -> Reference:
    return Reference(shard_of)
