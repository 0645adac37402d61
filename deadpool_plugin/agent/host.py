"""The machine a node's agent runs on, as the agent sees it. The simulator has a body of its own.

Rules of this file: protocols only. Nothing of a host blocks the event loop: what waits is awaited, and may end in any
order, or never. The clock is the event loop's (transport/tasks.py, `loop_time`). Thread: the event loop's only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


class Processes(Protocol):
    """The processes of this machine that belong to the node."""

    def watch(self, pid: int, on_end: Callable[[int], None], on_stopped: Callable[[float], None]) -> None:
        """Call `on_end(exit_code)` once `pid` ends (negative for a signal, as in subprocess; 0 is not told), and
        `on_stopped(seconds)` once it has stood still for the job's patience."""

    def forget(self, pid: int) -> None:
        """Watch `pid` no more."""

    def is_gone(self, pid: int) -> bool:
        """Return whether `pid` has ended, or is ending."""

    def catches(self, pid: int, number: int) -> bool:
        """Return whether `pid` has a handler of its own for signal `number`."""

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of `pid`, as in subprocess, if it is ending and that is known; 0 never is."""

    def kill(self, pid: int) -> None:
        """End `pid` (SIGKILL) if it is there."""

    def sweep(self, local_rank: int) -> None:
        """End (SIGKILL) all that was started for `local_rank`, also what that has started."""

    def pause(self, running: Mapping[int, int], others: Mapping[int, int]) -> None:
        """Stop processes and all that they have started. They do nothing at all until `resume`, whatever they were in.

        Args:
            running: local rank -> the process that runs its rank.
            others: local rank -> the process that looks after it, which goes on.
        """

    def resume(self) -> None:
        """Let all go on that were paused."""

    def kill_paused(self) -> None:
        """End all that were paused, as they stand."""


class Host(Protocol):
    """One machine."""

    @property
    def processes(self) -> Processes:
        """The node's processes."""

    @property
    def store(self) -> SnapshotStore:
        """The memory for snapshots."""

    @property
    def bulk(self) -> Bulk:
        """The way to other nodes' memory."""

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return what `work` does, which blocks (for memory, for a disk). Cancelled, its caller goes on and it does,
        too."""
