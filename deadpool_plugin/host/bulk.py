"""Bulk transfers of one node: its server, its connections to other nodes, and the threads that wait for them.

Rules of this file: the contract of `Bulk` in agent/host.py. Every connection is made when it is first needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..core.types import Generation, Holding, NodeId, Rank, Source, Step
from ..errors import PeerRefused
from ..mirror.arena import SlotPair
from ..mirror.peer import BulkPeer, SnapshotPush
from ..mirror.server import BulkServer
from ..mirror.store import SnapshotStore
from ..transport.handshake import Credentials
from ..transport.sockets import Address, Port
from ..transport.tasks import soon

T = TypeVar("T")
_THREADS = 16


class BulkTransfers:
    """Thread: the event loop's only. `bind_host`, `port_range`: where the server listens, as for `listen_tcp`."""

    def __init__(
        self,
        node: NodeId,
        credentials: Credentials,
        store: SnapshotStore,
        bind_host: str,
        port_range: tuple[int, int] | None,
        silent_after_s: float,
    ) -> None:
        self._node, self._credentials, self._store = node, credentials, store
        self._bind, self._silent_after_s = (bind_host, port_range), silent_after_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="deadpool-ask")
        self._addresses: dict[NodeId, Address] = {}
        self._peers: dict[NodeId, BulkPeer] = {}
        self._server: BulkServer | None = None

    def serve(
        self, on_mirrored: Callable[[Rank, Step, Generation, Holding], None], on_refused: Callable[[PeerRefused], None]
    ) -> Port:
        loop = asyncio.get_running_loop()
        self._server = BulkServer(
            self._store, self._credentials, *self._bind,
            lambda *mirrored: soon(loop, on_mirrored, *mirrored), self._node, self._silent_after_s, on_refused,
        )  # fmt: skip
        return self._server.address[1]

    def know(self, node: NodeId, address: Address) -> None:
        self._addresses[node] = address

    def _to(self, node: NodeId) -> BulkPeer:
        """Return the connection to `node` (this node included: its own server answers)."""
        if node not in self._peers:
            self._peers[node] = BulkPeer(
                self._addresses[node], self._credentials, self._store, self._node, self._silent_after_s
            )
        return self._peers[node]

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def push(self, node: NodeId, push: SnapshotPush) -> None:
        await asyncio.wrap_future(self._to(node).push(push))

    async def push_recording(self, node: NodeId, rank: Rank, generation: Generation, recording: bytes) -> None:
        await asyncio.wrap_future(self._to(node).push_recording(rank, generation, recording))

    async def get_recording(self, node: NodeId, rank: Rank) -> bytes:
        return await self._in_thread(self._to(node).get_recording, rank)

    async def get_history(self, node: NodeId, rank: Rank, first: Step, last: Step) -> list[bytes]:
        return await self._in_thread(self._to(node).get_history, rank, first, last)

    async def fetch(self, source: Source, step: Step, into: SlotPair, generation: Generation) -> None:
        header_peer, payload_peer = self._to(source.header_node), self._to(source.payload_node)
        await self._in_thread(header_peer.fetch, source.rank, step, source.payload_rank, into, payload_peer, generation)

    async def forget(self, nodes: tuple[NodeId, ...]) -> None:
        gone = [self._peers.pop(node) for node in nodes if node in self._peers]
        await asyncio.gather(*(self._in_thread(peer.close) for peer in gone))

    async def close(self) -> None:
        """End the server and every connection; threads that do not end are left behind."""
        if self._server is not None:
            await self._server.close()
        await self.forget(tuple(self._peers))
        self._threads.shutdown(wait=False, cancel_futures=True)
