"""The holders of each snapshot; from them the committed step, the step a world can go back to, and the plan for that.

Rules of this file: the ledger believes verified holdings only and draws conclusions from nothing else; functions
return a reason for people where there is no answer. Two slots per rank are enough because of the gate (chain.py;
exhaustive search over 3 nodes and 5 steps: without it even 4 slots lose a recoverable state).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

import msgspec

from .placement import buddies_of, copies_needed, needs_payload, world_after
from .types import (
    MASK,
    NO_STEP,
    Holding,
    NodeId,
    Rank,
    Source,
    Step,
    Suspicion,
    SwapPlan,
    Unrecoverable,
    World,
    listed,
)


class RestorePoint(msgspec.Struct, frozen=True):
    """A step every rank can go back to; `sources` for the ranks whose node does not hold it itself."""

    step: Step
    sources: tuple[Source, ...]


class Ledger:
    """The holdings of the nodes of one generation."""

    def __init__(self, holdings: Mapping[NodeId, Iterable[Holding]] | None = None) -> None:
        self._of_node: dict[NodeId, tuple[Holding, ...]] = {}
        self._copies: dict[tuple[Rank, Step], dict[NodeId, Holding]] = {}
        # A rank that was not safe when a step was last looked at: the next look begins there and costs little.
        self._blocking: dict[Step, Rank] = {}
        self.unpaired: Step = NO_STEP  # the newest step that is safe, but whose collectives do not pair
        for node, held in (holdings or {}).items():
            self.replace(node, held)

    def replace(self, node: NodeId, holdings: Iterable[Holding]) -> bool:
        """Note that `node` holds exactly `holdings`. Returns: whether that is news."""
        held = tuple(holdings)
        if self._of_node.get(node) == held:
            return False
        for holding in self._of_node.get(node, ()):
            copies = self._copies[holding.rank, holding.step]
            copies.pop(node, None)
            if not copies:
                del self._copies[holding.rank, holding.step]
        self._of_node[node] = held
        for holding in held:
            self._copies.setdefault((holding.rank, holding.step), {})[node] = holding
        return True

    def committed(self, world: World, above: Step = NO_STEP, copies: int = 1) -> Step:
        """The newest step that is committed in `world`, or `above` if none newer than that is."""
        own = self._of_node.get(world.node_of[0], ())
        steps = sorted({h.step for h in own if h.rank == 0 and h.payload and h.step > above}, reverse=True)
        return next((step for step in steps if self.is_committed(world, step, copies)), above)

    def is_committed(self, world: World, step: Step, copies: int = 1) -> bool:
        """Return whether every rank's snapshot of `step` is staged at home and mirrored on `copies` (or all) others."""
        ranks = len(world.node_of)
        suspect = self._blocking.get(step, 0)
        for rank in chain(range(suspect, ranks), range(suspect)):
            if not self._is_safe(world, rank, step, copies):
                self._blocking[step] = rank
                return False
        if not self._is_paired(world, step, set(world.active)):
            self.unpaired = max(self.unpaired, step)
            return False
        self._blocking = {later: rank for later, rank in self._blocking.items() if later > step}
        return True

    def _is_paired(self, world: World, step: Step, nodes: Collection[NodeId]) -> bool:
        """Return whether the collectives of all ranks paired up to `step`, which `nodes` hold of each (pairing.py)."""
        total = 0
        for rank in range(len(world.node_of)):
            copies = self._copies.get((rank, step), {})
            total += next((copy.paired for node, copy in copies.items() if node in nodes), 0)
        return total & MASK == 0

    def _is_safe(self, world: World, rank: Rank, step: Step, copies: int) -> bool:
        home, held = world.node_of[rank], self._copies.get((rank, step), {})
        own = held.get(home)
        if own is None or not own.payload:
            return False
        buddies, with_payload = buddies_of(world, home, copies), needs_payload(world, rank, own.replicas, copies)
        if not all(node in held and (held[node].payload or not with_payload) for node in buddies):
            return False  # a header without the payload that is to be there is about to be written anew with it
        # Others let go of snapshots of an earlier world once this is committed.
        keepers = {*buddies, *(world.node_of[same] for same in own.replicas)}
        payloads = self._payload_nodes({rank, *own.replicas}, step, keepers) - {home}
        return len(payloads) >= copies_needed(world, copies)

    def lacking(self, world: World, step: Step, copies: int = 1) -> str:
        """Describe for people whose snapshot keeps `step` from being committed, the first one; "" if none does."""
        for rank, home in enumerate(world.node_of):
            held = self._copies.get((rank, step), {})
            if home not in held:
                return f"step {step} lacks the snapshot of rank {rank}, which node {home} has not staged"
            if not self._is_safe(world, rank, step, copies):
                without = [node for node in buddies_of(world, home, copies) if node not in held]
                where = f"node {home} has not mirrored to node {listed(without)}" if without else "too few nodes hold"
                return f"step {step} lacks the snapshot of rank {rank}, which {where}"
        return ""

    def restore_point(
        self,
        world: World,
        survivors: Collection[NodeId],
        losses_max: int = 0,
        committed: Step = NO_STEP,
        vacated: Collection[NodeId] = (),
    ) -> RestorePoint | str:
        """The step every rank goes back to, and where from; or why there is none. The ranks of `vacated` nodes move.

        Every rank's snapshot of it exists on `survivors`. Of several such steps it is the newest of those that bear
        most further losses (up to `losses_max`), and none older than `committed` if that can be had.
        """
        # Why not simply the newest: a step all ranks have just staged is mirrored by nobody yet. The loss of one node
        # more would be the end although an older step is still held twice. It costs one step to be redone at most.
        if not survivors:
            return "no node survives"
        alive = frozenset(survivors)
        points = {}
        for step in self._steps_of(0, alive):
            sources = [source for _, source in self._sources(world, step, alive, vacated)]
            # A committed step was compared when it was; its numbers may be of a generation before this one.
            if None not in sources and (step <= committed or self._is_paired(world, step, alive)):
                points[step] = RestorePoint(step, tuple(filter(None, sources)))
        allowed = [step for step in points if step >= committed] or list(points)
        if not allowed:
            return self._why_none(world, alive)
        bears = {step: self._bears(world, step, alive, losses_max) if losses_max else 0 for step in allowed}
        return points[max(allowed, key=lambda step: (bears[step], step))]

    def _bears(self, world: World, step: Step, nodes: Collection[NodeId], losses_max: int) -> int:
        """Count how many of `nodes` more may be lost before `step` is (`losses_max` or more count as that)."""
        bears = losses_max
        for rank in range(len(world.node_of)):
            headers = [node for node in self._copies[rank, step] if node in nodes]
            replicas = {rank, *self._copies[rank, step][headers[0]].replicas}
            bears = min(bears, len(headers) - 1, len(self._payload_nodes(replicas, step, nodes)) - 1)
            if bears <= 0:
                return 0
        return bears

    def _payload_nodes(self, replicas: Iterable[Rank], step: Step, nodes: Collection[NodeId]) -> set[NodeId]:
        """Those of `nodes` that hold the payload all `replicas` share."""
        return {
            node
            for same in replicas
            for node, copy in self._copies.get((same, step), {}).items()
            if copy.payload and node in nodes
        }

    def _steps_of(self, rank: Rank, nodes: Collection[NodeId]) -> set[Step]:
        return {s for (r, s), copies in self._copies.items() if r == rank and not copies.keys().isdisjoint(nodes)}

    def missing(self, world: World, step: Step, nodes: Collection[NodeId]) -> tuple[Rank, ...]:
        return tuple(rank for rank, source in self._sources(world, step, nodes) if source is None)

    def _sources(
        self, world: World, step: Step, nodes: Collection[NodeId], vacated: Collection[NodeId] = ()
    ) -> Iterator[tuple[Rank, Source | None]]:
        """Find the source of each rank that is not at home, or whose home is `vacated`, which is the last to be asked;
        None if `nodes` have its snapshot nowhere."""
        for rank, home in enumerate(world.node_of):
            copies = {node: copy for node, copy in self._copies.get((rank, step), {}).items() if node in nodes}
            if home in copies and copies[home].payload and home not in vacated:
                continue
            # `rank`'s own payload comes before a replica's.
            header_node = min(copies, key=lambda n: (n in vacated, not copies[n].payload, n), default=None)
            replicas = copies[header_node].replicas if header_node is not None else ()
            holders = ((self._payload_nodes((same,), step, nodes), same) for same in (rank, *replicas))
            found = next(((min(held, key=lambda n: (n in vacated, n)), same) for held, same in holders if held), None)
            yield rank, Source(rank, header_node, *found) if header_node is not None and found is not None else None

    def _why_none(self, world: World, survivors: Collection[NodeId]) -> str:
        held = {rank: sorted(self._steps_of(rank, survivors)) for rank in range(len(world.node_of))}
        bare = [rank for rank, steps in held.items() if not steps]
        if bare:
            return f"no surviving node holds any snapshot of rank(s) {listed(bare)}"
        shown = ", ".join(f"rank {rank}: {steps}" for rank, steps in list(held.items())[:8])
        return f"no step is held for all ranks by the surviving nodes {listed(sorted(survivors))} ({shown})"


class NoSpare(Unrecoverable, frozen=True):
    """Nothing is lost, but nobody is there to take over: one may wait for a host."""


def plan_swap(
    world: World,
    ledger: Ledger,  # the survivors' holdings, taken after they fenced this generation
    lost: Collection[NodeId],
    stores: Mapping[NodeId, str],  # what the survivors offer
    newest_committed: Step = NO_STEP,  # the newest step somebody knows to be committed and no plan has undone
    *,
    lost_ranks: tuple[Rank, ...] = (),
    joined: Mapping[NodeId, str] = {},  # with their racks, "" for none
    may_start_over: bool = False,  # nothing is committed and nobody knows of training: the script may begin again
    copies: int = 1,
    covers: Mapping[NodeId, Mapping[Rank, bool]] = {},  # what spares rehearse, and whether each is done
    suspicions: tuple[Suspicion, ...] = (),
    doubted: Collection[NodeId] = (),  # whose ranks move as far as there are spares
    every: int = 1,  # how many steps the first snapshots of the next generation are apart
) -> SwapPlan | Unrecoverable:
    """The plan for the world without its lost nodes, or why there is none. One node takes all ranks of a lost one."""
    survivors = tuple(node for node in world.members if node not in lost)
    free = sum(spare in survivors for spare in world.spares) + len(joined) - sum(node in lost for node in world.active)
    vacated = tuple(node for node in world.active if node in doubted and node not in lost)[: max(free, 0)]
    lost_nodes = tuple(node for node in world.members if node in lost)
    vacant = tuple(rank for rank, node in enumerate(world.node_of) if node in lost)
    point = ledger.restore_point(world, survivors, copies, newest_committed, vacated)
    if isinstance(point, str) and may_start_over:
        point = RestorePoint(NO_STEP, ())
    if isinstance(point, str):
        return Unrecoverable(point, vacant, newest_committed)
    after = world_after(world, lost, joined, copies, covers, vacated)
    if after is None:
        spares = sum(spare in survivors for spare in world.spares) + len(joined)
        what = "no spare is left" if spares == 0 else f"only {spares} spare(s) are left"
        # Its coordinator may have died before it told anybody what was committed.
        newest = max(newest_committed, point.step)
        return NoSpare(f"{what} for lost node(s) {listed(lost_nodes)}", vacant, newest)
    # The lowest surviving active node that offers a store hosts it, else a spare. A script that begins anew needs none.
    living = [node for node in survivors if node not in vacated]  # the processes of these go on
    order = sorted(node for node in world.active if node in living) + [n for n in world.spares if n in living]
    store = next((stores[node] for node in order if stores.get(node)), "") if point.step != NO_STEP else ""
    in_place = tuple(rank for rank in lost_ranks if world.node_of[rank] not in vacated)
    return SwapPlan(
        after, point.step, lost_nodes, point.sources, store, in_place, tuple(joined), vacated, suspicions, every
    )
