"""Exhaustive search: does the real ledger always find a step to go back to, whatever node is lost whenever?

Three nodes, a few steps, two slots a rank, every interleaving of training, staging and mirroring, every choice of which
steps are snapshots; after each event every single loss is tried. With the gate no state is lost, and nobody comes to a
step of which it does not know whether it is a snapshot; without it the search finds a state that is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from deadpool_plugin.core.chain import Chain
from deadpool_plugin.core.ledger import Ledger
from deadpool_plugin.core.placement import buddies_of
from deadpool_plugin.core.types import NO_STEP, Holding, World

WORLD = World(0, (0, 1, 2), (3,))
EMPTY = None

# One rank: (step trained, own slots, step being staged, mirrored slots at its buddy, step being mirrored).
Rank = tuple[int, tuple[int | None, ...], int | None, tuple[int | None, ...], int | None]
State = tuple[tuple[Rank, ...], tuple[int, ...]]
"""The ranks, and the snapshots that are chosen so far."""


class Rules(NamedTuple):
    """How far training goes, how far apart snapshots may be (the first three: `first`), and whether there is a gate."""

    steps: int
    first: int = 1
    apart: tuple[int, ...] = (1,)
    gated: bool = True


def ledger_of(state: tuple[Rank, ...]) -> Ledger:
    held: dict[int, list[Holding]] = {node: [] for node in WORLD.members}
    for rank, (_, own, _, mirrored, _) in enumerate(state):
        home = WORLD.node_of[rank]
        held[home] += [Holding(rank, step, True, (rank,)) for step in own if step is not EMPTY]
        held[buddies_of(WORLD, home, 1)[0]] += [
            Holding(rank, step, True, (rank,)) for step in mirrored if step is not EMPTY
        ]
    return Ledger(held)


def put(slots: tuple[int | None, ...], keep: int, value: int | None) -> tuple[int | None, ...]:
    """Write `value` over what need not be kept, as mirror/arena.py does: what is empty, else the older one."""
    worth = [NO_STEP if one is EMPTY else one for one in slots]
    place = 1 - slots.index(keep) if keep in slots else worth.index(min(worth))
    return tuple(value if index == place else old for index, old in enumerate(slots))


def moves(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """Every next state, with the name of the event that leads there."""
    ranks, snapshots = state
    committed = view(tuple(rank[1:4:2] for rank in ranks))[0]
    chain = Chain(0, rules.first, fixed=False)
    chain.learn(snapshots)
    following = chain.after(committed)
    if chain.after(following) == NO_STEP:  # what is committed says which it is
        for apart in rules.apart:
            yield f"snapshot {following + apart}", (ranks, (*snapshots, following + apart))
        return
    for rank, (step, own, staging, mirrored, mirroring) in enumerate(ranks):
        is_snapshot, before = step in chain, chain.before(step)
        nexts: list[tuple[str, Rank]] = []
        if step < rules.steps and (step in own or not is_snapshot) and all(other[0] >= step for other in ranks):
            assert chain.after(step) != NO_STEP or not rules.gated, "it would not know which step is a snapshot"
            nexts.append(("train", (step + 1, own, staging, mirrored, mirroring)))
        may_stage = not rules.gated or chain.may_stage(step, committed)
        if is_snapshot and staging is None and step not in own and may_stage:
            nexts.append(("stage", (step, put(own, before, EMPTY), step, mirrored, mirroring)))
        if staging is not None:
            nexts.append(("staged", (step, put(own, chain.before(staging), staging), None, mirrored, mirroring)))
        newest = max((s for s in own if s is not EMPTY), default=EMPTY)
        if mirroring is None and newest is not EMPTY and newest not in mirrored:
            nexts.append(("send", (step, own, staging, put(mirrored, chain.before(newest), EMPTY), newest)))
        if mirroring is not None:
            arrived = put(mirrored, chain.before(mirroring), mirroring)
            nexts.append(("sent", (step, own, staging, arrived, None)))
        for name, after in nexts:
            yield f"{name} {rank}", ((*ranks[:rank], after, *ranks[rank + 1 :]), snapshots)


@cache
def view(slots: tuple[tuple[tuple[int | None, ...], ...], ...]) -> tuple[int, int | None]:
    """(committed step, a node whose loss would be fatal) of what the slots hold."""
    ledger = ledger_of(tuple((0, own, None, mirrored, None) for own, mirrored in slots))
    for lost in WORLD.active:
        survivors = [node for node in WORLD.members if node != lost]
        if isinstance(ledger.restore_point(WORLD, survivors), str):
            return ledger.committed(WORLD), lost
    return ledger.committed(WORLD), None


def search(rules: Rules) -> tuple[tuple[str, ...] | None, int, int]:
    """(the shortest trace to a fatal loss or None, states seen, newest step committed anywhere)."""
    start: State = tuple((0, (0, EMPTY), None, (0, EMPTY), None) for _ in WORLD.node_of), ()
    seen, newest = {start}, 0
    queue: deque[tuple[State, tuple[str, ...]]] = deque([(start, ())])
    while queue:
        state, trace = queue.popleft()
        committed, fatal = view(tuple(rank[1:4:2] for rank in state[0]))
        newest = max(newest, committed)
        if fatal is not None:
            return (*trace, f"lose {fatal}"), len(seen), newest
        for name, after in moves(state, rules):
            if after not in seen:
                seen.add(after)
                queue.append((after, (*trace, name) if not rules.gated else ()))
    return None, len(seen), newest


@pytest.mark.parametrize(
    "rules",
    [Rules(5), Rules(8, 2, (2,)), Rules(12, 3, (3,)), Rules(6, 1, (1, 2)), Rules(9, 1, (3,)), Rules(7, 2, (1, 2))],
    ids=["1", "2", "3", "1 or 2", "1, then 3", "2, then 1 or 2"],
)
def test_two_slots_with_the_gate_lose_nothing(rules):
    trace, states, newest = search(rules)
    assert trace is None, trace
    assert states > 2_000 and newest > rules.steps - max(rules.apart), "the search must have gone all the way"


@pytest.mark.parametrize("rules", [Rules(5, gated=False), Rules(8, 2, (2,), gated=False)], ids=["1", "2"])
def test_two_slots_without_the_gate_lose_a_state(rules):
    trace, _, _ = search(rules)
    assert trace is not None and trace[-1].startswith("lose")
