"""Bulk traffic between simulated nodes: snapshots and recordings pushed to buddies, restore steps fetched.

Rules of this file: the contract of mirror/peer.py and mirror/server.py. Pushes to one node go one after the other;
questions do not queue behind them. A connection that carries nothing for the job's patience fails, as does one whose
bytes fail their checksum; one to a node whose processes are gone fails at once. A fence at the receiver cuts what older
generations send. What a refusal says is final, what a connection's failure says may be tried again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..core.io import HoldingsDropped, LinkLost, SnapshotHeld
from ..core.types import Generation, Holding, NodeId, Rank, Source, Step
from .store import Refused, Snapshot, Stale
from .tasks import Signal, Task, Work

if TYPE_CHECKING:
    from .node import Node

RETRY_S = 0.2
ENTRY_S = 0.01
OnDone = Callable[[Exception | None], None]


class Unreadable(Refused):
    """The snapshot to be sent cannot be read at its own node."""


class Broken(Exception):
    """A bulk connection failed; another may not. `nodes`: its ends."""

    def __init__(self, reason: str, *nodes: NodeId) -> None:
        super().__init__(reason)
        self.nodes = nodes


class Bulk:
    """The sending and asking end of one node's bulk connections."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._queues: dict[NodeId, deque[Callable[[], Work]]] = {}

    # -- crossing ----------------------------------------------------------------------------------------------

    def _cross(self, source: Node, target: Node) -> Generator[float, None, None]:
        """The time it takes bytes to get from node to node. Raises: Broken."""
        network, patience_s, waited_s = self._node.network, self._node.timing.silent_after_s, 0.0
        ends = (source.number, target.number)
        while True:
            if not target.up and target.number not in network.dark:
                raise Broken(f"node {target.number} refuses connections", *ends)
            if not target.paused and network.passes(source.number, target.number):
                break
            if waited_s >= patience_s:
                raise Broken(f"node {target.number} did not answer for {patience_s:g} s", *ends)
            waited_s += RETRY_S
            yield RETRY_S
        if self._node.cluster.flips_a_bit(source.number, target.number):
            raise Broken("a frame fails its checksum", *ends)
        yield network.latency()

    # -- pushes ------------------------------------------------------------------------------------------------

    def push(
        self, buddy: NodeId, rank: Rank, step: Step, generation: Generation, payload: bool,
        replicas: tuple[Rank, ...], done: OnDone,
    ) -> None:  # fmt: skip
        self._enqueue(buddy, lambda: self._attempt(self._push(buddy, rank, step, generation, payload, replicas), done))

    def push_recording(self, buddy: NodeId, rank: Rank, generation: Generation, done: OnDone) -> None:
        self._enqueue(buddy, lambda: self._attempt(self._push_recording(buddy, rank, generation), done))

    def _enqueue(self, buddy: NodeId, job: Callable[[], Work]) -> None:
        queue = self._queues.setdefault(buddy, deque())
        queue.append(job)
        if len(queue) == 1:
            Task(self._node, self._serve(queue))

    def _serve(self, queue: deque[Callable[[], Work]]) -> Work:
        while queue:
            yield from queue[0]()
            queue.popleft()

    def _attempt(self, work: Work, done: OnDone) -> Work:
        try:
            yield from work
        except (Broken, Refused) as error:
            done(error)
        else:
            done(None)

    def _push_recording(self, buddy: NodeId, rank: Rank, generation: Generation) -> Work:
        target = self._node.cluster.nodes[buddy]
        yield from self._cross(self._node, target)
        yield from self._await_entry(target, generation)
        target.store.recordings.add(rank)
        yield from self._cross(target, self._node)

    def _push(
        self, buddy: NodeId, rank: Rank, step: Step, generation: Generation, payload: bool, replicas: tuple[Rank, ...]
    ) -> Work:
        node, target = self._node, self._node.cluster.nodes[buddy]
        node.store.check(generation)
        try:
            snapshot = replace(node.store.readable(rank, step, payload), generation=generation)
        except Refused as error:
            raise Unreadable(str(error)) from error
        if not payload:
            snapshot = replace(snapshot, payload=None)
        yield from self._cross(node, target)
        yield from self._await_entry(target, generation)
        while rank in target.store.writers:
            yield RETRY_S
            target.store.check(generation)
        held = target.store.already_mirrored(snapshot)
        if held is None or held.replicas != replicas:
            held = yield from self._write(target, snapshot, replicas)
        target.do(target.feed, SnapshotHeld(held, generation))
        yield from self._cross(target, node)

    def _await_entry(self, target: Node, generation: Generation) -> Generator[float, None, None]:
        """Until others may mirror there in `generation`, for a while. Raises: Refused."""
        waited_s = 0.0
        while target.store.entered < generation and waited_s < target.timing.silent_after_s / 4:
            yield ENTRY_S
            waited_s += ENTRY_S
        target.store.check(generation)
        if target.store.entered < generation:
            raise Stale(f"node {target.number} has not entered generation {generation}")

    def _write(self, target: Node, snapshot: Snapshot, replicas: tuple[Rank, ...]) -> Generator[float, None, Holding]:
        rank, step = snapshot.rank, snapshot.step
        pair = target.store.begin_mirror(rank, step, snapshot.generation)
        target.store.writers[rank] = snapshot
        try:
            yield from self._cross(self._node, target)
            yield self._node.cluster.transfer_s()
            if not (self._node.up and target.up):
                raise Broken("the other end is gone")
            source = self._node.store.pair(rank)
            there = source.get(step) if source is not None else None
            if there is None or there.sum != snapshot.sum:
                raise Unreadable("the snapshot was overwritten while it was sent")
            try:
                self._verified(self._node, there)
            except Refused as error:
                raise Unreadable(str(error)) from error
            holding = Holding(rank, step, snapshot.payload is not None, replicas, snapshot.paired)
            target.store.finish_mirror(pair, snapshot, holding)
            return holding
        finally:
            target.store.writers.pop(rank, None)

    def _verified(self, holder: Node, snapshot: Snapshot) -> None:
        """Check that what is read out of `holder`'s memory was written there; else it is no holding any more."""
        if not snapshot.is_whole:
            holder.store.forget_corrupt(snapshot.rank, snapshot.step)
            holder.do(holder.feed, HoldingsDropped(snapshot.rank, snapshot.step - 1))
            raise Refused(f"rank {snapshot.rank}'s snapshot of step {snapshot.step} has changed in memory")

    # -- questions ---------------------------------------------------------------------------------------------

    def ask(self, work: Callable[[], Work]) -> Work:
        """`work` until it succeeds, is refused, or the patience is used up, which is said. Raises: Broken, Refused."""
        node = self._node
        deadline = node.timeline.now + node.timing.silent_after_s
        while True:
            try:
                yield from work()
                return
            except Broken as error:
                if node.timeline.now >= deadline:
                    for silent in set(error.nodes) - {node.number}:
                        node.feed(LinkLost(silent, f"node {node.number} cannot ask it: {error}", silent=True))
                    raise
            yield RETRY_S

    def get_recording(self, source: NodeId, rank: Rank) -> Work:
        holder = self._node.cluster.nodes[source]
        yield from self._cross(self._node, holder)
        if rank not in holder.store.recordings:
            raise Refused(f"no recording of rank {rank} is held by node {source}")
        yield from self._cross(holder, self._node)

    def fetch(self, source: Source, step: Step, arrived: Callable[[Snapshot], None]) -> Work:
        """The snapshot (source.rank, step): its header from one node, its payload perhaps from another."""
        node, nodes = self._node, self._node.cluster.nodes
        generation = node.store.fence
        header_at, payload_at = nodes[source.header_node], nodes[source.payload_node]
        yield from self._cross(node, header_at)
        header = header_at.store.readable(source.rank, step, payload=False)
        yield from self._cross(header_at, node)
        yield from self._cross(node, payload_at)
        payload_at.store.readable(source.payload_rank, step, payload=True)
        yield from self._cross(payload_at, node)
        yield node.cluster.transfer_s()
        there = payload_at.store.readable(source.payload_rank, step, payload=True)
        self._verified(payload_at, there)
        node.store.check(generation)
        arrived(replace(header, generation=generation, payload=there.payload, sum=there.sum))


__all__ = ["Broken", "Bulk", "Refused", "Signal"]
