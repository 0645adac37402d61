"""The contract of `BulkTransfers`: of its body in mirror/transfers.py over real connections, and of the simulator's.

Rules of this file: one store and one body a node, and nothing of the agent; what is asserted of one body is of both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from simulator.cluster import Cluster
from simulator.network import faked
from simulator.schedule import scenario
from support.stores import free

from deadpool_plugin.config import Config
from deadpool_plugin.core.types import Generation, Holding, NodeId, Rank, Source, Step
from deadpool_plugin.errors import StaleGeneration, TransportError
from deadpool_plugin.mirror.records import NotHeld
from deadpool_plugin.mirror.store import CorruptSnapshot, SnapshotStore
from deadpool_plugin.mirror.transfers import LANES, BulkTransfers, SnapshotPush
from deadpool_plugin.mirror.wire import InAnotherGeneration, RefusedByPeer
from deadpool_plugin.transport.handshake import Credentials

NODES = 3
PATIENCE_S = 2.0
HEADER_BYTES, PAYLOAD_BYTES = 4096, 64
Heard = tuple[Holding, Generation]


class Bodies:
    """Nodes 0 to 2. `heard`: what each was told of snapshots that have arrived there."""

    def __init__(
        self, bulk: list[Any], stores: list[SnapshotStore], end: Callable[[NodeId], Coroutine[Any, Any, None]]
    ) -> None:
        self.bulk, self.stores, self.end = bulk, stores, end
        self.heard: list[list[Heard]] = [[] for _ in bulk]
        for node, body in enumerate(bulk):
            (port,) = body.serve(lambda *told, node=node: self.heard[node].append(told), lambda error: None)  # type: ignore[misc]
            for other in bulk:
                other.know(node, [("127.0.0.1", port)])

    def stage(self, node: NodeId, rank: Rank, step: Step, generation: Generation = 0) -> None:
        """Make an own snapshot there, with records of its step."""
        store = self.stores[node]
        pair = store.own(rank) or store.create_own(rank, HEADER_BYTES, PAYLOAD_BYTES)
        pair.invalidate(step)
        pair.payload(step)[:] = content(rank, step)
        pair.seal(step, generation, "layout", b"scalars")
        store.staged(rank, step, generation, (rank,))
        store.history(rank).append(step, b"records %d" % step)

    async def push(self, source: NodeId, target: NodeId, rank: Rank, step: Step, **other: Any) -> None:
        arguments: dict[str, Any] = {
            "generation": 0,
            "with_payload": True,
            "replicas": (rank,),
            "layout_hash": "layout",
        } | other
        push = SnapshotPush(rank, step, records=b"records %d" % step, **arguments)
        await self.bulk[source].push(target, push)

    async def fetch(self, node: NodeId, rank: Rank, step: Step, where: NodeId, generation: Generation = 0) -> bytes:
        """Return the payload that `node` then has."""
        into = self.stores[node].make_own(rank, HEADER_BYTES, PAYLOAD_BYTES)
        try:
            await self.bulk[node].fetch(Source(rank, where, where, rank), step, into, generation)
            return bytes(into.payload(step)) if into.open(step) is not None else b""
        finally:
            self.stores[node].put_back(into)


Work = Callable[[Bodies], Coroutine[Any, Any, None]]
Run = Callable[[Work], None]


def content(rank: Rank, step: Step) -> bytes:
    return bytes([rank + 1, step]) * (PAYLOAD_BYTES // 2)


@contextlib.contextmanager
def real() -> Iterator[Run]:
    async def whole(work: Work) -> None:
        stores = [SnapshotStore() for _ in range(NODES)]
        bulk = [
            BulkTransfers(node, Credentials(b"secret"), store, ["127.0.0.1"], Config(patience_s=PATIENCE_S))
            for node, store in enumerate(stores)
        ]
        ended = set[NodeId]()

        async def end(node: NodeId) -> None:
            ended.add(node)
            await bulk[node].close()

        try:
            await work(Bodies([*bulk], stores, end))
        finally:
            for node in set(range(NODES)) - ended:
                await bulk[node].close()
            for store in stores:
                free(store)

    yield lambda work: asyncio.run(asyncio.wait_for(whole(work), 60.0))


@contextlib.contextmanager
def simulated() -> Iterator[Run]:
    """Hosts whose agents never begin."""

    def run(work: Work) -> None:
        cluster = Cluster(scenario(1, fixed={"active": NODES, "spares": 0, "slots": 1, "shards": 3, "faults": ()}))
        cluster.timeline._due.clear()
        nodes = [cluster.nodes[number] for number in range(NODES)]

        async def end(number: NodeId) -> None:
            nodes[number].die()

        with faked():
            nodes[0].loop.run_from_here()
            bodies = Bodies([node.machine.bulk for node in nodes], [node.store for node in nodes], end)
            task = nodes[0].loop.create_task(work(bodies))
            while not task.done() and cluster.timeline.step():
                pass
            assert task.done(), "it waits for nothing that will happen"
            task.result()
            for node in nodes:
                node.loop.forget()

    yield run


@pytest.fixture(params=[real, simulated])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with request.param() as body:
        yield body


def test_what_was_pushed_is_sealed_told_and_can_be_fetched(run):
    async def work(bodies: Bodies) -> None:
        bodies.stage(0, 0, 3)
        await bodies.push(0, 1, 0, 3)
        holding = Holding(0, 3, True, (0,))
        assert bodies.stores[1].holdings() == (holding,) and bodies.heard[1] == [(holding, 0)]
        assert await bodies.fetch(2, 0, 3, where=1) == content(0, 3)
        assert bodies.heard[0] == bodies.heard[2] == []

    run(work)


def test_a_header_goes_alone_where_a_replica_has_the_payload(run):
    async def work(bodies: Bodies) -> None:
        bodies.stage(0, 0, 3)
        await bodies.push(0, 1, 0, 3, with_payload=False, replicas=(0, 1))
        assert bodies.stores[1].holdings() == (Holding(0, 3, False, (0, 1)),)
        with pytest.raises(RefusedByPeer):
            await bodies.fetch(2, 0, 3, where=1)

    run(work)


def test_records_that_the_other_node_lacks_go_along(run):
    async def work(bodies: Bodies) -> None:
        for step in range(1, 5):
            bodies.stage(0, 0, step)
        await bodies.push(0, 1, 0, 4)
        records = [b"records %d" % step for step in range(1, 5)]
        assert await bodies.bulk[2].get_history(1, 0, 1, 4) == records
        with pytest.raises(TransportError):
            await bodies.bulk[2].get_history(1, 0, 1, 5)

    run(work)


def test_recordings_are_kept_and_given(run):
    async def work(bodies: Bodies) -> None:
        with pytest.raises(TransportError):
            await bodies.bulk[2].get_recording(1, 0)
        await bodies.bulk[0].push_recording(1, 0, 0, b"recording")
        assert await bodies.bulk[2].get_recording(1, 0) == b"recording"

    run(work)


def test_an_older_generation_than_the_other_nodes_changes_nothing(run):
    async def work(bodies: Bodies) -> None:
        bodies.stage(0, 0, 3)
        await bodies.push(0, 1, 0, 3)
        bodies.stores[1].fence(1)
        bodies.stage(0, 0, 5)
        with pytest.raises(InAnotherGeneration):
            await bodies.push(0, 1, 0, 5)
        assert [held.step for held in bodies.stores[1].holdings()] == [3]
        assert await bodies.fetch(2, 0, 3, where=1) == content(0, 3), "what is held may be read in any generation"

    run(work)


def test_a_generation_that_the_other_node_has_not_entered_is_waited_for_and_then_refused(run):
    async def work(bodies: Bodies) -> None:
        for store in bodies.stores:
            store.fence(1)
        bodies.stage(0, 0, 3, generation=1)
        with pytest.raises(InAnotherGeneration):
            await bodies.push(0, 1, 0, 3, generation=1)
        pushing = asyncio.get_running_loop().create_task(bodies.push(0, 1, 0, 3, generation=1))
        await asyncio.sleep(0.05)
        assert not pushing.done()
        bodies.stores[1].enter(1)
        await pushing
        assert bodies.heard[1] == [(Holding(0, 3, True, (0,)), 1)]

    run(work)


def test_an_older_generation_than_ones_own_is_not_sent_or_fetched(run):
    async def work(bodies: Bodies) -> None:
        bodies.stage(0, 0, 3)
        bodies.stores[0].fence(1)
        with pytest.raises((InAnotherGeneration, StaleGeneration)):
            await bodies.push(0, 1, 0, 3)
        bodies.stores[2].fence(1)
        with pytest.raises(StaleGeneration):
            await bodies.fetch(2, 0, 3, where=0)

    run(work)


def test_what_is_not_held_or_laid_out_otherwise_is_not_sent(run):
    async def work(bodies: Bodies) -> None:
        bodies.stage(0, 0, 3)
        with pytest.raises(NotHeld):
            await bodies.push(0, 1, 0, 4)
        with pytest.raises(NotHeld):
            await bodies.push(0, 1, 0, 3, layout_hash="another layout")
        with pytest.raises(RefusedByPeer):
            await bodies.fetch(2, 0, 4, where=0)
        assert bodies.stores[1].holdings() == () and bodies.heard[1] == []

    run(work)


def test_a_rank_that_runs_there_is_not_mirrored_there(run):
    async def work(bodies: Bodies) -> None:
        bodies.stage(0, 0, 3)
        bodies.stage(1, 0, 3)
        with pytest.raises(RefusedByPeer):
            await bodies.push(0, 1, 0, 3)
        assert bodies.heard[1] == []

    run(work)


def test_a_payload_that_has_changed_is_not_sent_again(run):
    """Its checksums are those of its first reading."""

    async def work(bodies: Bodies) -> None:
        bodies.stage(0, 0, 3)
        await bodies.push(0, 1, 0, 3)
        own = bodies.stores[0].own(0)
        assert own is not None
        own.payload(3)[5] ^= 1
        with pytest.raises(CorruptSnapshot):
            await bodies.push(0, 2, 0, 3)
        assert bodies.stores[2].holdings() == ()

    run(work)


def test_pushes_of_a_rank_to_one_node_go_in_their_order(run):
    async def work(bodies: Bodies) -> None:
        loop = asyncio.get_running_loop()
        for step in (3, 4):
            bodies.stage(0, 0, step)
        bodies.stage(0, LANES, 3)  # it has the same connection
        pushes = [loop.create_task(bodies.push(0, 1, rank, step)) for rank, step in ((0, 3), (LANES, 3), (0, 4))]
        for one in pushes:
            await one
        assert [(held.rank, held.step) for held, _ in bodies.heard[1]] == [(0, 3), (LANES, 3), (0, 4)]

    run(work)


def test_a_node_that_has_ended_answers_nothing(run):
    async def work(bodies: Bodies) -> None:
        bodies.stage(0, 0, 3)
        await bodies.push(0, 1, 0, 3)
        await bodies.end(1)
        for asked in (bodies.push(0, 1, 0, 3), bodies.bulk[2].get_recording(1, 0), bodies.fetch(2, 0, 3, where=1)):
            with pytest.raises(TransportError):
                await asked

    run(work)


def test_a_forgotten_node_can_be_known_anew(run):
    async def work(bodies: Bodies) -> None:
        bodies.stage(0, 0, 3)
        await bodies.push(0, 1, 0, 3)
        await bodies.bulk[0].forget((1,))
        bodies.stage(0, 0, 4)
        await bodies.push(0, 1, 0, 4)
        assert [held.step for held in bodies.stores[1].holdings()] == [3, 4]

    run(work)
