"""The machine a node's agent runs on, as the agent sees it. The simulator has a body of its own.

Rules of this file: protocols only. Nothing of a host blocks the event loop: what waits is awaited, and may end in any
order, or never. The clock is the event loop's (transport/tasks.py, `loop_time`). Thread: the event loop's only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from ..core.types import Generation, NodeId, Rank, Source, Step
from ..mirror.arena import SlotPair
from ..mirror.store import SnapshotStore
from ..transport.sockets import Address

T = TypeVar("T")


class Bulk(Protocol):
    """Transfers between the stores of this node and of others.

    Whatever waits for another node raises TransportError if it does not answer, RefusedByPeer if it says no. Nothing is
    tried again.
    """

    def know(self, node: NodeId, address: Address) -> None:
        """Use `address` for `node`, this one included."""

    async def push(
        self,
        node: NodeId,
        rank: Rank,
        step: Step,
        generation: Generation,
        with_payload: bool,
        replicas: tuple[Rank, ...],
        layout_hash: str,
        records: bytes,
    ) -> None:
        """Mirror own snapshot (rank, step) at `node`, its payload only if asked; `node` has sealed it on return.

        Pushes to one node go in the order in which they were begun. `records`: those of `step`; records of earlier
        steps that `node` lacks go along. Raises: InAnotherGeneration, NotHeld, CorruptSnapshot, TransferFailed.
        """

    async def push_recording(self, node: NodeId, rank: Rank, generation: Generation, recording: bytes) -> None:
        """Have `node` hold the recording of the rank's start-up collectives."""

    async def get_recording(self, node: NodeId, rank: Rank) -> bytes:
        """Ask `node` for a recording."""

    async def get_history(self, node: NodeId, rank: Rank, first: Step, last: Step) -> list[bytes]:
        """Ask `node` for the call records of first..last."""

    async def fetch(self, source: Source, step: Step, into: SlotPair, generation: Generation) -> None:
        """Make `into` hold snapshot (source.rank, step), its header and its payload from the nodes that `source` names.

        Raises: StaleGeneration once `generation` is over; the slot is then invalid, or as it was. If the caller is
        cancelled it goes on writing until it fails or is done.
        """

    async def forget(self, nodes: tuple[NodeId, ...]) -> None:
        """End everything that still waits for `nodes`, which are lost."""


class Host(Protocol):
    """One machine."""

    @property
    def store(self) -> SnapshotStore:
        """The memory for snapshots."""

    @property
    def bulk(self) -> Bulk:
        """The way to other nodes' memory."""

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return what `work` does, which blocks (for memory, for a disk). Cancelled, its caller goes on and it does,
        too."""
