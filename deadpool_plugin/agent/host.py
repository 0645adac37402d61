"""The machine a node's agent runs on, as the agent sees it. The simulator has a body of its own.

Rules of this file: protocols only. What waits is awaited, and may end in any order, or never; what is said to block is
given to `at_files` or `in_thread`. The clock is the event loop's (transport/tasks.py, `loop_time`). Thread: the event
loop's only, but for what blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from ..core.local import AnyLocalMessage
from ..core.types import Generation, NodeId, Rank, Source, Step, SwapPlan
from ..errors import PeerRefused
from ..host.output import Pipe, Writer
from ..mirror.arena import SlotPair
from ..mirror.peer import SnapshotPush
from ..mirror.server import OnMirrored
from ..mirror.store import SnapshotStore
from ..transport.rendezvous import Hello
from ..transport.sockets import Address, Port
from ..transport.unix import LocalPeer

T = TypeVar("T")
OnMessage = Callable[[LocalPeer, AnyLocalMessage, list[int]], None]


class Bulk(Protocol):
    """Transfers between the stores of this node and of others.

    Whatever waits for another node raises TransportError if it does not answer, RefusedByPeer if it says no. Nothing is
    tried again.
    """

    def serve(self, on_mirrored: OnMirrored, on_refused: Callable[[PeerRefused], None]) -> Port:
        """Let other nodes mirror and ask here from now on, at the port that is returned. Raises: ConfigError.

        `on_mirrored` hears of each snapshot that has arrived whole, before its sender does. `on_refused` hears of
        whoever does not prove the job's secret, once per host.
        """

    def know(self, node: NodeId, address: Address) -> None:
        """Use `address` for `node`, this one included."""

    async def push(self, node: NodeId, push: SnapshotPush) -> None:
        """Mirror an own snapshot at `node`, which has sealed it on return.

        Pushes to one node go in the order in which they were begun.
        Raises: InAnotherGeneration, NotHeld, CorruptSnapshot, TransferFailed.
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

        `running`: local rank -> the process that runs it. `others`: the one that looks after it, which goes on.
        """

    def resume(self) -> None:
        """Let all go on that were paused."""

    def kill_paused(self) -> None:
        """End all that were paused, as they stand."""


class Witness(Protocol):
    """Storage that all hosts share, and that keeps the first plan of each generation. Every method blocks for it, and
    raises OSError. As a string it is its name for people."""

    def keep(self, job: str, plan: SwapPlan) -> SwapPlan:
        """Return the plan that is kept for this job and generation from now on: `plan`, unless there was one."""

    def look(self, job: str, generation: Generation) -> SwapPlan | None:
        """Return the plan that is kept for this job and generation, None if there is none."""

    def share(self, job: str) -> None:
        """Leave a sign for `is_shared`, made as plans are kept."""

    def is_shared(self, job: str) -> bool:
        """Return whether another host's sign is seen here."""


class Host(Protocol):
    """One machine."""

    name: str
    """The host's name, as people know it."""
    where: tuple[str, str]
    """The interface to listen on ("" for all), and the address by which others reach it."""
    output: Writer
    """Log files, and the terminal."""
    store: SnapshotStore
    """The memory for snapshots."""

    @property
    def witness(self) -> Witness | None:
        """The witness of ties; None if the job has none."""

    @property
    def processes(self) -> Processes:
        """The node's processes."""

    @property
    def bulk(self) -> Bulk:
        """The way to other nodes' memory."""

    def pipe(self, descriptor: int) -> Pipe:
        """Read what processes of the node print, from `descriptor`, which is the pipe's from now on."""

    def serve(
        self,
        on_message: Callable[[LocalPeer, AnyLocalMessage, list[int]], None],
        on_closed: Callable[[LocalPeer], None],
    ) -> None:
        """Accept the node's processes; the descriptors that come with a message are the receiver's."""

    def publish(self, hello: Hello, secret_files: tuple[str, ...], job: str) -> None:
        """Name this node where hosts that want to join look for one. Raises: OSError. Blocks: for the files."""

    def withdraw(self) -> None:
        """Name it there no more. Blocks: for the files."""

    async def at_files(self, work: Callable[[], T]) -> T:
        """Return what `work` does, which blocks for files that may be on shared storage: it may never return."""

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return what `work` does, which blocks for memory. If its caller is cancelled it goes on all the same."""

    async def close(self) -> None:
        """Serve other nodes no more, and end what waits for them."""

    def end(self) -> None:
        """Write what is queued, and end (SIGKILL) every process of the node that is left."""
