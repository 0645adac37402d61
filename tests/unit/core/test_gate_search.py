"""Exhaustive search: does the real ledger always find a step to go back to, whatever node is lost whenever?

Three nodes, five steps, two slots a rank, every interleaving of training, staging and mirroring; after each event every
single loss is tried. With the gate no state is lost; without it the search finds one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache

from deadpool_plugin.core.ledger import Ledger, may_stage
from deadpool_plugin.core.placement import buddies_of
from deadpool_plugin.core.types import Holding, World

WORLD = World(0, (0, 1, 2), (3,))
STEPS = 5
EMPTY = None

# One rank: (step trained, own slots, step being staged, mirrored slots at its buddy, step being mirrored).
Rank = tuple[int, tuple[int | None, ...], int | None, tuple[int | None, ...], int | None]
State = tuple[Rank, ...]


def ledger_of(state: State) -> Ledger:
    held: dict[int, list[Holding]] = {node: [] for node in WORLD.members}
    for rank, (_, own, _, mirrored, _) in enumerate(state):
        home = WORLD.node_of[rank]
        held[home] += [Holding(rank, step, True, (rank,)) for step in own if step is not EMPTY]
        held[buddies_of(WORLD, home, 1)[0]] += [
            Holding(rank, step, True, (rank,)) for step in mirrored if step is not EMPTY
        ]
    return Ledger(held)


def put(slots: tuple[int | None, ...], step: int, value: int | None) -> tuple[int | None, ...]:
    return tuple(value if index == step % 2 else old for index, old in enumerate(slots))


def moves(state: State, gated: bool) -> Iterator[tuple[str, State]]:
    """Every next state, with the name of the event that leads there."""
    committed = view(tuple(rank[1:4:2] for rank in state))[0]
    for rank, (step, own, staging, mirrored, mirroring) in enumerate(state):
        open_gate = not gated or may_stage(step, committed)
        nexts: list[tuple[str, Rank]] = []
        if step < STEPS and step in own and all(other[0] >= step for other in state):
            nexts.append(("train", (step + 1, own, staging, mirrored, mirroring)))
        if staging is None and step not in own and open_gate:
            nexts.append(("stage", (step, put(own, step, EMPTY), step, mirrored, mirroring)))
        if staging is not None:
            nexts.append(("staged", (step, put(own, staging, staging), None, mirrored, mirroring)))
        newest = max((s for s in own if s is not EMPTY), default=EMPTY)
        if mirroring is None and newest is not EMPTY and newest not in mirrored:
            nexts.append(("send", (step, own, staging, put(mirrored, newest, EMPTY), newest)))
        if mirroring is not None:
            nexts.append(("sent", (step, own, staging, put(mirrored, mirroring, mirroring), None)))
        for name, after in nexts:
            yield f"{name} {rank}", (*state[:rank], after, *state[rank + 1 :])


@cache
def view(slots: tuple[tuple[tuple[int | None, ...], ...], ...]) -> tuple[int, int | None]:
    """(committed step, a node whose loss would be fatal) of what the slots hold."""
    ledger = ledger_of(tuple((0, own, None, mirrored, None) for own, mirrored in slots))
    for lost in WORLD.active:
        survivors = [node for node in WORLD.members if node != lost]
        if isinstance(ledger.restore_point(WORLD, survivors), str):
            return ledger.committed(WORLD), lost
    return ledger.committed(WORLD), None


def search(gated: bool) -> tuple[tuple[str, ...] | None, int, int]:
    """(the shortest trace to a fatal loss or None, states seen, newest step committed anywhere)."""
    start: State = tuple((0, (0, EMPTY), None, (0, EMPTY), None) for _ in WORLD.node_of)
    seen, newest = {start}, 0
    queue: deque[tuple[State, tuple[str, ...]]] = deque([(start, ())])
    while queue:
        state, trace = queue.popleft()
        committed, fatal = view(tuple(rank[1:4:2] for rank in state))
        newest = max(newest, committed)
        if fatal is not None:
            return (*trace, f"lose {fatal}"), len(seen), newest
        for name, after in moves(state, gated):
            if after not in seen:
                seen.add(after)
                queue.append((after, (*trace, name) if not gated else ()))
    return None, len(seen), newest


def test_two_slots_with_the_gate_lose_nothing():
    trace, states, newest = search(gated=True)
    assert trace is None, trace
    assert states > 2_000 and newest == STEPS, "the search must have gone all the way"


def test_two_slots_without_the_gate_lose_a_state():
    trace, _, _ = search(gated=False)
    assert trace is not None and trace[-1].startswith("lose")
