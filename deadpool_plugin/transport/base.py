"""The seam between the agent and whatever carries its control messages.

Rules of this file: interface only. Order of calls: `listen` once, `connect` once with every node's address (a host that
joins a running job: `visit` each member instead), then `send` and the callbacks, `close` last. All of it on one event
loop's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from ..core.messages import AnyMessage
from ..core.types import NodeId
from .guests import Answer
from .rendezvous import Hello
from .sockets import Address

OnMessage = Callable[[NodeId, AnyMessage], None]
OnLost = Callable[[NodeId, str], None]


class ControlTransport(ABC):
    """Small typed messages between all nodes of a job, in order per pair, over links that fail loudly.

    `on_message(node, message)` is called for each message received; `on_lost(node, reason)` once when the link to
    a node ends, unless the node said Goodbye, or was dropped by us, or the transport is closed, or it dials us again
    because `connect` has not returned yet.
    Once `connect` was called, a node that is not in its table gets no link unless it was admitted (guests.py).
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
    async def visit(self, node: NodeId, address: Address, hello: Hello, timeout_s: float) -> Answer:
        """Announces this host, no member yet, to member `node`; if the answer is Admitted there is a link to it.

        Raises: ConnectionClosed if it does not answer in time; PeerRefused without the secret.
        """

    @property
    @abstractmethod
    def linked(self) -> frozenset[NodeId]:
        """Nodes to which there is a link now."""

    @abstractmethod
    def send(self, node: NodeId, message: AnyMessage) -> None:
        """Queues `message`; without a link it is dropped and counted in `dropped`. Blocks: never."""

    @abstractmethod
    def drop(self, node: NodeId) -> None:
        """Ends the link to `node` and accepts none from it any more: it is lost to the world."""

    @abstractmethod
    async def close(self, goodbye: AnyMessage | None = None) -> None:
        """Sends `goodbye` to everyone, sends what is queued within a short deadline, and ends all links."""
