"""Random worlds and holdings."""

from __future__ import annotations

from hypothesis import strategies as st

from deadpool_plugin.core.types import Holding, World


@st.composite
def worlds(draw, nodes_max: int = 4, spares_max: int = 2) -> World:
    names = draw(st.permutations(range(nodes_max + spares_max)))
    active = names[: draw(st.integers(1, nodes_max))]
    rest = names[len(active) :]
    per_node = draw(st.integers(1, 2))
    node_of = tuple(node for node in active for _ in range(per_node))
    return World(draw(st.integers(0, 3)), node_of, tuple(rest[: draw(st.integers(0, spares_max))]))


@st.composite
def inventories(draw, world: World, steps: int = 3) -> dict[int, tuple[Holding, ...]]:
    """Draw what each node holds, dense enough for answers to exist; replica groups are the same everywhere."""
    ranks = range(len(world.node_of))
    size = draw(st.sampled_from([1, 2]))
    replicas = {
        rank: tuple(r for r in ranks if r % max(1, len(ranks) // size) == rank % max(1, len(ranks) // size))
        for rank in ranks
    }
    density = draw(st.sampled_from([3, 6, 9]))
    return {
        node: tuple(
            Holding(rank, step, draw(st.booleans()) or world.node_of[rank] == node, replicas[rank])
            for rank in ranks
            for step in range(steps)
            if draw(st.integers(0, 9)) < (9 if world.node_of[rank] == node else density)
        )
        for node in world.members
    }
