"""Bulk transfers between simulated hosts: the contract of mirror/transfers.py.

Rules of this file: pushes of one rank to one node go one after the other; questions do not queue behind them. A
connection that carries nothing for the job's patience fails, as does one whose bytes fail their checksum; one to a node
whose processes are gone fails at once. A fence at the receiver cuts what older generations send. What the other node
refuses is final.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import xxhash

from deadpool_plugin.core.types import Generation, Holding, NodeId, Rank, Source, Step
from deadpool_plugin.errors import DeadpoolError, PeerRefused, StaleGeneration, TransportError
from deadpool_plugin.mirror.arena import SlotPair, Snapshot, goes_on
from deadpool_plugin.mirror.records import NotHeld
from deadpool_plugin.mirror.store import CorruptSnapshot, NotEntered
from deadpool_plugin.mirror.transfers import LANES, SnapshotPush
from deadpool_plugin.mirror.wire import InAnotherGeneration, RefusedByPeer, frames
from deadpool_plugin.transport.framing import ConnectionClosed
from deadpool_plugin.transport.sockets import Address, Port

if TYPE_CHECKING:
    from .machine import Store
    from .node import Node

RETRY_S = 0.2
ENTRY_S = 0.01
Mirrored = Callable[[Holding, Generation], None]


class OwnFault(TransportError):
    """What is to be sent cannot be read where it is: `error` says why."""

    def __init__(self, error: DeadpoolError) -> None:
        super().__init__(str(error))
        self.error = error


class Bulk:
    """One node's."""

    def __init__(self, node: Node, store: Store) -> None:
        self._node, self._store, self._cluster = node, store, node.cluster
        self._turns: dict[NodeId, list[asyncio.Lock]] = {}  # of lanes
        self._known: set[NodeId] = set()
        self._mirrored: Mirrored | None = None

    def serve(self, on_mirrored: Mirrored, on_refused: Callable[[PeerRefused], None]) -> list[Port]:
        self._mirrored = on_mirrored
        return [1]

    def know(self, node: NodeId, addresses: Sequence[Address]) -> None:
        self._known.add(node)

    def _at(self, node: NodeId) -> Node:
        if node not in self._known:
            raise KeyError(f"no address of node {node} is known to node {self._node.number}")
        return self._cluster.nodes[node]

    def _turn(self, node: NodeId, rank: Rank) -> asyncio.Lock:
        return self._turns.setdefault(node, [asyncio.Lock() for _ in range(LANES)])[rank % LANES]

    async def forget(self, nodes: tuple[NodeId, ...]) -> None:
        for node in nodes:
            self._turns.pop(node, None)

    async def _cross(self, source: Node, target: Node, transfer_s: float = 0.0) -> None:
        """The time it takes bytes to get from node to node, the last of them `transfer_s` after the first.

        Raises: TransportError.
        """
        network, patience_s, waited_s = self._cluster.network, self._cluster.config.slow_after_s, 0.0
        while True:
            if not target.runs and not network.kernels[target.number].dark:
                raise ConnectionClosed(f"node {target.number} refuses connections")
            if not target.paused and network.passes(source.number, target.number):
                break
            if waited_s >= patience_s:
                raise ConnectionClosed(f"node {target.number} did not answer for {patience_s:g} s")
            waited_s += RETRY_S
            await asyncio.sleep(RETRY_S)
        if network.flips_a_bit(source.number, target.number):
            raise ConnectionClosed("a frame fails its checksum")
        await asyncio.sleep(network.latency() + transfer_s)
        if not target.runs:
            raise ConnectionClosed(f"node {target.number} is gone")

    async def _answered(self, target: Node, work: Callable[[], Awaitable[None]]) -> None:
        """`work`, which is the other end's: what it refuses comes back as its refusal."""
        try:
            await work()
        except (StaleGeneration, NotEntered) as error:
            await self._cross(target, self._node)
            raise InAnotherGeneration(str(error)) from error
        except (ConnectionClosed, OwnFault):
            raise
        except DeadpoolError as error:
            await self._cross(target, self._node)
            raise RefusedByPeer(str(error)) from error

    # ---- pushes

    async def push(self, node: NodeId, push: SnapshotPush) -> None:
        target = self._at(node)
        async with self._turn(node, push.rank):
            self._store.check_generation(push.generation)
            snapshot = self._store.readable(push.rank, push.step, payload=push.with_payload)
            if snapshot.header.layout_hash != push.layout_hash:
                raise NotHeld(f"rank {push.rank}, step {push.step} has layout {snapshot.header.layout_hash}")
            await self._cross(self._node, target)
            try:
                await self._answered(target, lambda: self._receive(target, snapshot, push))
            except OwnFault as fault:
                raise fault.error from fault
            await self._cross(target, self._node)

    async def _receive(self, target: Node, sent: Snapshot, push: SnapshotPush) -> None:
        rank, step, generation, store = push.rank, push.step, push.generation, target.store
        await self._await_entry(target, generation)
        waited_s = 0.0
        while rank in store.writers:
            writer, sent_in = store.writers[rank]
            if not writer.runs or sent_in < store.generation:
                break  # its end has come, or the fence has cut it, however long its sender stands still
            if waited_s >= self._cluster.config.slow_after_s / 4:
                raise TransportError(f"another transfer of rank {rank} still runs")
            waited_s += RETRY_S
            await asyncio.sleep(RETRY_S)
        held = store.already_mirrored(rank, step, sent.digest, push.with_payload)
        if held is None or held.replicas != push.replicas:
            mine = store.writers[rank] = (self._node, generation)
            try:
                held = await self._write(target, sent, push)
            finally:
                if store.writers.get(rank) is mine:
                    del store.writers[rank]
        assert target.machine.bulk._mirrored is not None
        target.loop.call_soon(target.machine.bulk._mirrored, held, generation)

    async def _await_entry(self, target: Node, generation: Generation) -> None:
        """Until others may mirror there in `generation`, for a while. Raises: NotEntered, StaleGeneration."""
        waited_s = 0.0
        while target.store.entered < generation and waited_s < self._cluster.config.slow_after_s / 4:
            target.store.check_generation(generation)
            await asyncio.sleep(ENTRY_S)
            waited_s += ENTRY_S
        target.store.check_generation(generation)
        if target.store.entered < generation:
            raise NotEntered(f"node {target.number} has not entered generation {generation}")

    async def _write(self, target: Node, sent: Snapshot, push: SnapshotPush) -> Holding:
        rank, step, generation, store = push.rank, push.step, push.generation, target.store
        size = sent.header.payload_bytes if push.with_payload else 0
        pair = store.begin_mirror(rank, step, generation, sent.pair.header_bytes, size, goes_on, push.before)
        history = store.history(rank)
        known = min(history.last, step - 1) if history.first < step else -1
        await self._cross(self._node, target, self._cluster.transfer_s(self._node.number, target.number))
        if not self._node.runs:
            raise ConnectionClosed("the other end is gone")
        sums = tuple(map(xxhash.xxh3_64_intdigest, frames(sent.payload)))
        try:
            self._store.check_read(sent, sums)
        except (NotHeld, CorruptSnapshot) as error:
            raise OwnFault(error) from error
        if generation < store.generation:
            raise ConnectionClosed("the fence has cut the transfer")
        pair.payload(step)[:size] = sent.payload
        holding = Holding(rank, step, push.with_payload, push.replicas, sent.header.paired)
        records = self._records(rank, step, known, push.records)
        store.finish_mirror(pair, sent.encoded, generation, holding, records, sums)
        return holding

    def _records(self, rank: Rank, step: Step, known: Step, records: bytes) -> list[bytes]:
        """As BulkTransfers: records that end at `step` and close the other node's gap, as far back as they are held."""
        history = self._store.history(rank)
        if not 0 <= history.first < step <= history.last + 1:
            return [records]
        return [*history.get(max(history.first, known + 1), step - 1), records]

    async def push_recording(self, node: NodeId, rank: Rank, generation: Generation, recording: bytes) -> None:
        target = self._at(node)

        async def receive() -> None:
            await self._await_entry(target, generation)
            target.store.put_recording(rank, recording, generation)

        async with self._turn(node, rank):
            await self._cross(self._node, target)
            await self._answered(target, receive)
            await self._cross(target, self._node)

    # ---- questions

    async def get_recording(self, node: NodeId, rank: Rank) -> bytes:
        return (await self._asked(node, lambda holder: [holder.store.recording(rank)]))[0]

    async def get_history(self, node: NodeId, rank: Rank, first: Step, last: Step) -> list[bytes]:
        return await self._asked(node, lambda holder: holder.store.history(rank).get(first, last))

    async def _asked(self, node: NodeId, look: Callable[[Node], list[bytes]]) -> list[bytes]:
        holder, found = self._at(node), list[bytes]()

        async def answer() -> None:
            found.extend(look(holder))

        await self._cross(self._node, holder)
        await self._answered(holder, answer)
        await self._cross(holder, self._node)
        return found

    async def fetch(self, source: Source, step: Step, into: SlotPair, generation: Generation) -> None:
        header_at, payload_at = self._at(source.header_node), self._at(source.payload_node)
        headers: list[Snapshot] = []

        async def header() -> None:
            headers.append(header_at.store.readable(source.rank, step, payload=False))

        await self._cross(self._node, header_at)
        await self._answered(header_at, header)
        await self._cross(header_at, self._node)
        self._store.check_generation(generation)
        into.invalidate(step)
        payloads: list[bytes] = []

        async def payload() -> None:
            found = payload_at.store.readable(source.payload_rank, step, payload=True)
            asked = headers[0].header
            if (found.header.layout_hash, found.header.payload_bytes) != (asked.layout_hash, asked.payload_bytes):
                raise NotHeld("it is laid out otherwise")
            await asyncio.sleep(self._cluster.transfer_s(payload_at.number, self._node.number))
            if not payload_at.runs:
                raise ConnectionClosed("the other end is gone")
            sent = bytes(found.payload)
            payload_at.store.check_read(found, tuple(map(xxhash.xxh3_64_intdigest, frames(found.payload))))
            payloads.append(sent)

        await self._cross(self._node, payload_at)
        await self._answered(payload_at, payload)
        await self._cross(payload_at, self._node)
        self._store.check_generation(generation)
        into.payload(step)[: len(payloads[0])] = payloads[0]
        into.seal_encoded(step, headers[0].encoded)
