"""Exhaustive search over the real controllers: three nodes and a spare (or two and two), two losses, lost messages.

What must hold in every state: ONE_WORLD_PER_GENERATION; RESTORABLE, whoever restores from a memory finds
there what the plan says; a verdict only where who sees everything agrees; LIVENESS, an end within a few time-outs.
"""

from __future__ import annotations

import pytest

from deadpool_plugin.core import swaps
from deadpool_plugin.core.ledger import Ledger, RestorePoint
from deadpool_plugin.core.placement import buddies_of
from deadpool_plugin.core.types import Holding, World

from .search import Search, Violation

THREE_AND_ONE = World(0, (0, 1, 2), (3,))
TWO_AND_TWO = World(0, (0, 1), (2, 3))


def committed(world: World) -> dict[int, list[Holding]]:
    """Step 1 is at home and mirrored, step 2 at home on some."""
    held: dict[int, list[Holding]] = {node: [] for node in world.members}
    for rank, node in enumerate(world.node_of):
        for holder in (node, *buddies_of(world, node, 1)):
            held[holder].append(Holding(rank, 1, True, (rank,)))
        if rank != 1:
            held[node].append(Holding(rank, 2, True, (rank,)))
    return held


def searched(world: World, losses: int, cuts: int, overtakings: int | None, states_max: int) -> Search:
    search = Search(world, committed(world), losses, cuts, overtakings)
    search.run(states_max)
    return search


@pytest.mark.parametrize("world", [THREE_AND_ONE, TWO_AND_TWO], ids=["3+1", "2+2"])
def test_one_loss_in_every_order(world):
    search = searched(world, 1, 0, None, states_max=20_000)
    assert search.states > 1_000 and set(search.ends) == {"goes on, left: []"}, search.ends


@pytest.mark.parametrize("overtakings", [0])
@pytest.mark.parametrize(
    ("world", "losses", "cuts"),
    [(THREE_AND_ONE, 2, 0), (TWO_AND_TWO, 2, 0), (THREE_AND_ONE, 1, 1), (THREE_AND_ONE, 0, 1)],
    ids=["3+1, two losses", "2+2, two losses", "3+1, a loss and a cut link", "3+1, a cut link"],
)
def test_two_faults_at_any_time(world, losses, cuts, overtakings):
    """The second one too, during the first one's swap and after it."""
    search = searched(world, losses, cuts, overtakings, states_max=30_000)
    assert search.states > 50
    assert all(how.startswith("goes on") or "86" in how for how in search.ends), search.ends
    assert any(how.startswith("goes on") for how in search.ends)


def test_a_decision_without_a_majority_is_found(monkeypatch):
    monkeypatch.setattr(swaps.Proposal, "is_decided", lambda self, world, witness: True)
    with pytest.raises(Violation, match="ONE_WORLD_PER_GENERATION|RESTORABLE|wrong verdict"):
        searched(THREE_AND_ONE, 1, 1, 0, states_max=30_000)


def test_a_step_that_not_everybody_has_is_found(monkeypatch):
    found = Ledger.restore_point

    def newer(self, world, survivors, losses_max=0, committed=-1, vacated=()):
        point = found(self, world, survivors, losses_max, committed, vacated)
        return RestorePoint(point.step + 1, point.sources) if isinstance(point, RestorePoint) else point

    monkeypatch.setattr(Ledger, "restore_point", newer)
    with pytest.raises(Violation, match="RESTORABLE"):
        searched(THREE_AND_ONE, 1, 0, 0, states_max=30_000)
