"""The seam between the agent and whatever carries its control messages.

Rules of this file: interface only. Order of calls: `listen` once, `connect` once with every node's address, then
`send` and the callbacks, `close` last. All of it on one event loop's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from ..core.messages import AnyMessage
from ..core.types import NodeId
from .sockets import Address

OnMessage = Callable[[NodeId, AnyMessage], None]
OnLost = Callable[[NodeId, str], None]


class ControlTransport(ABC):
    """Small typed messages between all nodes of a job, in order per pair, over links that fail loudly.

    `on_message(node, message)` is called for each message received; `on_lost(node, reason)` once when the link to
    a node ends, unless the node said Goodbye, or was dropped by us, or the transport is closed.
    """

    @abstractmethod
    async def listen(self) -> Address:
        """Starts to accept links; the address to tell the others."""

    @abstractmethod
    async def connect(self, table: Mapping[NodeId, Address], timeout_s: float = 60.0) -> None:
        """Returns when there is a link to every node of `table` (the own entry is ignored).

        Raises: TransportError naming the nodes that are missing at the deadline; PeerRefused.
        """

    @abstractmethod
    def send(self, node: NodeId, message: AnyMessage) -> None:
        """Queues `message`; without a link it is dropped and counted in `dropped`. Blocks: never."""

    @abstractmethod
    def drop(self, node: NodeId) -> None:
        """Ends the link to `node` and accepts none from it any more: it is lost to the world."""

    @abstractmethod
    async def close(self, goodbye: AnyMessage | None = None) -> None:
        """Sends `goodbye` to everyone, sends what is queued within a short deadline, and ends all links."""
