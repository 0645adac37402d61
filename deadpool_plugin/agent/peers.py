"""Bulk connections to the other nodes, made when first needed, and threads to wait for their answers.

Rules of this file: everything that blocks on another node's memory goes through `ask`, which tries again while the
connection fails and gives up after the job's patience (whether the node is lost is the controllers' to decide).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..core import io
from ..core.types import NodeId
from ..errors import TransportError
from ..mirror.peer import BulkPeer
from ..mirror.store import SnapshotStore
from ..mirror.wire import RefusedByPeer
from ..transport.handshake import Credentials
from ..transport.sockets import Address
from ..transport.tasks import loop_time

T = TypeVar("T")
_RETRY_S = 0.2
_THREADS = 16


class Peers:
    """Thread: the event loop's only."""

    def __init__(
        self,
        node: NodeId,
        credentials: Credentials,
        store: SnapshotStore,
        patience_s: float,
        feed: Callable[[io.Input], None],
    ) -> None:
        self._node, self._credentials, self._store, self.patience_s = node, credentials, store, patience_s
        self._feed = feed
        self._addresses: dict[NodeId, Address] = {}
        self._peers: dict[NodeId, BulkPeer] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="deadpool-ask")

    def know(self, addresses: Mapping[NodeId, Address]) -> None:
        self._addresses = dict(addresses)

    def add(self, node: NodeId, address: Address) -> None:
        self._addresses[node] = address

    def to(self, node: NodeId) -> BulkPeer:
        """The connection to `node` (this node included: its own server answers)."""
        if node not in self._peers:
            self._peers[node] = BulkPeer(
                self._addresses[node], self._credentials, self._store, self._node, self.patience_s
            )
        return self._peers[node]

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def ask(self, work: Callable[[], T], *nodes: NodeId) -> T:
        """`work()`, which asks `nodes`, in a thread; a connection that fails is tried again until the patience, counted
        from the first failure, is used up, which is said.

        Raises: TransportError; RefusedByPeer at once.
        """
        deadline: float | None = None
        while True:
            try:
                return await self.in_thread(work)
            except RefusedByPeer:
                raise
            except TransportError as error:
                now = loop_time()
                deadline = now + self.patience_s if deadline is None else deadline
                if now >= deadline:
                    for node in {*nodes} - {self._node}:
                        self._feed(io.LinkLost(node, f"node {self._node} cannot ask it: {error}", silent=True))
                    raise
            await asyncio.sleep(_RETRY_S)

    async def forget(self, nodes: tuple[NodeId, ...]) -> None:
        """`nodes` are lost: end everything that still waits for them."""
        gone = [self._peers.pop(node) for node in nodes if node in self._peers]
        await asyncio.gather(*(self.in_thread(peer.close) for peer in gone))

    async def close(self) -> None:
        await self.forget(tuple(self._peers))
        self._threads.shutdown(wait=False, cancel_futures=True)
