"""Messages between the agent and the supervisors and workers of its own node (abstract Unix stream socket).

Rules of this file: plain data. A frame is a 4-byte big-endian length and a msgpack body; descriptors travel as
SCM_RIGHTS with the first byte of the frame whose struct says `descriptors > 0`.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

import msgspec

from .unix import Connection, connect_unix
from .unix_server import Peer, Server


class LocalMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all node-local messages."""


# ---- supervisor <-> agent


class SupervisorHello(LocalMessage, frozen=True):
    """Supervisor -> agent, once per worker it started; carries the read end of the worker's output pipe."""

    local_rank: int
    pid: int
    worker_pid: int
    descriptors: int = 1


class WorkerExited(LocalMessage, frozen=True):
    """Supervisor -> agent: `exit_code` is negative for a signal, as in subprocess."""

    local_rank: int
    exit_code: int


class Leaving(LocalMessage, frozen=True):
    """Supervisor -> agent: it was told to end by `signal`."""

    local_rank: int
    signal: int


class EndSupervisor(LocalMessage, frozen=True):
    """Agent -> supervisor: kill what is left of your worker and exit with `exit_code`."""

    exit_code: int


# ---- worker <-> agent


class WorkerHello(LocalMessage, frozen=True):
    local_rank: int
    pid: int


class RehearserHello(LocalMessage, frozen=True):
    """A process forked by a spare's worker to rehearse `rank` introduces itself on a connection of its own."""

    local_rank: int
    pid: int
    rank: int


class Assign(LocalMessage, frozen=True):
    """Agent -> worker: who you are. `rank` is -1 for a spare. `env` is set before the user's script runs."""

    rank: int
    world_size: int
    generation: int
    env: dict[str, str]


class StoreOffer(LocalMessage, frozen=True):
    """Worker -> agent: a fresh TCPStore for the next group build listens here."""

    host: str
    port: int


class StartGroups(LocalMessage, frozen=True):
    """Agent -> worker (generation 0): build groups over this store."""

    generation: int
    store: str


class RankReady(LocalMessage, frozen=True):
    """Worker -> agent at its first call: sizes of its snapshots, who has the same payload, and the recording of its
    start-up collectives (opaque bytes) which a rehearsal replays."""

    rank: int
    header_bytes: int
    payload_bytes: int
    layout_hash: str
    replicas: tuple[int, ...]
    recording: bytes


class ArenaHandOver(LocalMessage, frozen=True):
    """Agent -> worker: the memfd of its two own slots (mirror/arena.py maps it)."""

    rank: int
    header_bytes: int
    payload_bytes: int
    descriptors: int = 1


class Staged(LocalMessage, frozen=True):
    """Worker -> agent: slot `step % 2` is complete. `records`: its call records (opaque), also in the header."""

    rank: int
    step: int
    generation: int
    records: bytes


class Committed(LocalMessage, frozen=True):
    """Agent -> worker: opens the gate."""

    step: int


class Abort(LocalMessage, frozen=True):
    """Agent -> worker: leave whatever you are in; generation - 1 is over."""

    generation: int


class Join(LocalMessage, frozen=True):
    """Agent -> survivor: rebuild groups for `generation` over `store`, restore `restore_step`, redo, go on."""

    generation: int
    store: str
    restore_step: int


class RehearseRank(LocalMessage, frozen=True):
    """Agent -> spare's worker: fork a process that rehearses `rank` (killing the one that rehearsed another)."""

    rank: int
    world_size: int
    env: dict[str, str]


class Rehearsal(LocalMessage, frozen=True):
    """Agent -> rehearser, answer to its hello: the rank's recording."""

    rank: int
    world_size: int
    recording: bytes


class Rehearsed(LocalMessage, frozen=True):
    rank: int
    layout_hash: str
    duration_s: float


class RehearsalRefused(LocalMessage, frozen=True):
    rank: int
    reason: str


class History(LocalMessage, frozen=True):
    """Agent -> rehearser: call records of the steps first_step, first_step + 1, ... (all committed)."""

    first_step: int
    records: list[bytes]


class TakeOver(LocalMessage, frozen=True):
    """Agent -> rehearser: become the rank in `generation`. The arena (descriptor) holds the snapshot of `restore_step`;
    `History` up to it has been sent before."""

    rank: int
    generation: int
    store: str
    restore_step: int
    header_bytes: int
    payload_bytes: int
    descriptors: int = 1


class Restored(LocalMessage, frozen=True):
    rank: int
    generation: int


class Finished(LocalMessage, frozen=True):
    """Worker -> agent: the user's script ended well; waits for `EndWorker`, serves swaps meanwhile."""

    rank: int


class EndWorker(LocalMessage, frozen=True):
    exit_code: int


class WorkerEvent(LocalMessage, frozen=True):
    """Worker -> agent: an event for the event log (name of a class of deadpool_plugin.events, its fields)."""

    kind: str
    fields: dict[str, object]


AnyLocalMessage = (
    SupervisorHello | WorkerExited | Leaving | EndSupervisor | WorkerHello | RehearserHello | Assign | StoreOffer
    | StartGroups | RankReady | ArenaHandOver | Staged | Committed | Abort | Join | RehearseRank | Rehearsal | Rehearsed
    | RehearsalRefused | History | TakeOver | Restored | Finished | EndWorker | WorkerEvent
)  # fmt: skip


# ---- connections

LocalPeer = Peer[AnyLocalMessage]
_decode = msgspec.msgpack.Decoder(AnyLocalMessage).decode
_log = logging.getLogger(__name__)


class LocalConnection(Connection[AnyLocalMessage]):
    """A supervisor's or worker's connection to its agent (see unix.Connection)."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, _decode)

    @classmethod
    def to(cls, name: str) -> LocalConnection:
        """Connects to the agent that listens at the abstract name."""
        return cls(connect_unix(name))


class LocalServer(Server[AnyLocalMessage]):
    """The agent's listener for supervisors and workers (see unix.Server)."""

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[LocalPeer, AnyLocalMessage, list[int]], None],
        on_closed: Callable[[LocalPeer], None],
        on_refused: Callable[[str], None] = _log.warning,
    ) -> None:
        super().__init__(sock, _decode, on_message, on_closed, on_refused)
