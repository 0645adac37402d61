"""Messages between the agent of a node and the supervisors, standby processes and workers of that node.

Rules of this file: plain data. A message with `descriptors > 0` travels with so many descriptors (transport/unix.py).
One that is an Input, too, is fed to the controller as it came.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from .api import Input
from .types import Count, ExitCode, Generation, Rank, Step


class LocalMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all node-local messages."""


# ---- supervisor <-> agent


class SupervisorHello(LocalMessage, frozen=True):
    local_rank: Count
    standby_pid: Count
    descriptors: ClassVar[int] = 1  # the read end of the pipe that the standby process and all it forks write to


class StandbyExited(LocalMessage, frozen=True):
    exit_code: ExitCode


class Leaving(LocalMessage, frozen=True):
    signal: Count  # which told the supervisor to end


class End(LocalMessage, frozen=True):
    exit_code: ExitCode  # with which supervisor, standby process and worker are to exit


# ---- standby <-> agent


class StandbyHello(LocalMessage, frozen=True):
    local_rank: Count  # the slot for which this process imports once and forks


class Imports(LocalMessage, frozen=True):
    modules: bytes  # as a rank has told them (RankReady); only the first such message counts


class RunRank(LocalMessage, frozen=True):
    rank: Rank  # of the process to fork, which begins the script or rehearses it
    env: dict[str, str]  # is set before the user's script runs
    order: Count = 0  # how many this node's standby processes were told to fork
    rehearses: bool = False
    stands_in: bool = False  # else the process before it, which runs the slot's rank or is to, is ended first


class RunsRank(LocalMessage, frozen=True):
    order: Count  # whose process, a stand-in so far, is the one that runs the slot's rank from now on


class EndProcess(LocalMessage, frozen=True):
    order: Count  # whose process is to be ended, with all that it has started


class WorkerExited(LocalMessage, frozen=True):
    order: Count  # for which the process was forked
    exit_code: ExitCode


class CannotEnd(LocalMessage, frozen=True):
    reason: str  # the last word of a standby process: what it has forked was killed and does not end


# ---- worker <-> agent


class WorkerHello(LocalMessage, frozen=True):
    local_rank: Count
    pid: Count
    rank: Rank
    rehearsing: bool
    order: Count = 0  # for which the process was forked


class RehearsalOutput(LocalMessage, frozen=True):
    descriptors: ClassVar[int] = 1  # the read end of the pipe that a rehearser writes to until it takes over


class StackFile(LocalMessage, frozen=True):
    """The file to which a signal has the process write its Python stack (host/stacks.py)."""

    descriptors: ClassVar[int] = 1


class ConnectionBroke(LocalMessage, Input, frozen=True):
    rank: Rank  # whose collective failed for a broken connection, though no loss is known; it waits for a swap
    generation: Generation  # whose groups it belongs to
    peers: tuple[Rank, ...]  # one of which is the other end, or a store
    reason: str


class StoreOffer(LocalMessage, frozen=True):
    address: str  # "host:port" of a fresh TCPStore for the next group build


class HostStore(LocalMessage, frozen=True):
    """Groups are built over the store that the worker has offered: it is to host another one."""


class StartGroups(LocalMessage, frozen=True):
    generation: Generation
    store: str  # over which a worker that begins the script is to build groups


class RankReady(LocalMessage, frozen=True):
    rank: Rank  # at its first call
    header_bytes: Count
    payload_bytes: Count
    layout_hash: str
    replicas: tuple[Rank, ...]  # who has the same payload
    recording: bytes  # of its start-up collectives (opaque), which a rehearsal replays
    on_device: bool = False  # it uses a device
    modules: bytes = b""  # names of those that it has imported, then `module:function:argument` to be called; zlib


class ArenaHandOver(LocalMessage, frozen=True):
    rank: Rank  # whose two own slots are in the memfd (mirror/arena.py maps it)
    header_bytes: Count
    payload_bytes: Count
    every: Count = 1  # as in SwapPlan
    fixed: bool = True  # it stays so
    descriptors: ClassVar[int] = 1


class Staged(LocalMessage, frozen=True):
    rank: Rank
    step: Step  # a slot is complete
    generation: Generation
    records: list[bytes]  # of the calls of the steps since the snapshot before, opaque; those of `step` last
    took_steps: float = 0.0  # how many steps the mirroring of the snapshot before took
    most: Count = 0  # how many steps snapshots may be apart, by the memory for what is kept; 0: any


class Committed(LocalMessage, frozen=True):
    step: Step  # opens the gate
    snapshots: tuple[Step, ...] = ()  # as in messages.Status
    void: tuple[Step, ...] = ()


class Wanted(LocalMessage, Input, frozen=True):
    rank: Rank  # whose save waits for
    step: Step  # to be committed, of which no snapshot is to be taken so far
    generation: Generation


class Passed(LocalMessage, Input, frozen=True):
    rank: Rank  # which has begun to change the state of
    step: Step  # of which it heard only then that it is to be a snapshot
    generation: Generation


class Abort(LocalMessage, frozen=True):
    generation: Generation  # the one before is over: leave whatever you are in


class Join(LocalMessage, frozen=True):
    generation: Generation  # in which a survivor is to go on, once it has rebuilt its groups
    store: str
    restore_step: Step  # to restore, and to redo its calls from
    every: Count = 1  # as in SwapPlan
    fixed: bool = True  # it stays so


class Recording(LocalMessage, frozen=True):
    rank: Rank
    recording: bytes  # the rank's, in answer to a rehearser's hello


class Rehearsed(LocalMessage, frozen=True):
    rank: Rank
    duration_s: float


class History(LocalMessage, frozen=True):
    records: list[bytes]  # of the calls of the next steps (all committed), from the rank's first one on


class Park(LocalMessage, frozen=True):
    """A rehearser gives back the memory that a restore overwrites, once it has gone through the `History` before."""


class Parked(LocalMessage, frozen=True):
    """Answers `Park`: it has gone through that `History`. In bytes, and 0 without a device:"""

    rank: Rank
    free: Count  # of the device, that no process uses
    total: Count  # of the device
    peak: Count  # that this process has had of it at most, beyond what it has now


class Moved(LocalMessage, frozen=True):
    rank: Rank
    step: Step  # how far a rehearser has come on its way through `History`; said now and then


class WorkerMoved(LocalMessage, Input, frozen=True):
    rank: Rank  # come to its next collective, or further on its way through the past; said now and then


class TakeOver(LocalMessage, frozen=True):
    generation: Generation  # in which a rehearser is to become the rank
    store: str
    restore_step: Step  # up to which `History` has been sent before
    header_bytes: Count
    payload_bytes: Count
    every: Count = 1  # as in SwapPlan
    fixed: bool = True  # it stays so
    descriptors: ClassVar[int] = 1  # the arena, which holds the snapshot of `restore_step`


class Unwound(LocalMessage, frozen=True):
    generation: Generation  # its main thread has left the interrupted call and waits for `Join`


class Saving(LocalMessage, frozen=True):
    generation: Generation  # answer to Abort: its main thread is in a save, which may take long


class WorkerRestored(LocalMessage, Input, frozen=True):
    rank: Rank
    generation: Generation  # it finished its part of the swap into that and goes on training


class OutOfReach(LocalMessage, frozen=True):
    reason: str  # it was told to go back further than it can redo; waits to be ended and replaced


class CheckpointSaved(LocalMessage, Input, frozen=True):
    step: Step
    path: str
    whole: bool = True  # all of it, not a file that may be part of one


class Failing(LocalMessage, frozen=True):
    rank: Rank
    reason: str  # the exception in a line with which the script has ended; the process follows
    differs: bool = False  # it has followed the rank, and read other data than the rank itself
    of_host: bool = False  # the error is the host's, not the script's


class WorkerFinished(LocalMessage, Input, frozen=True):
    rank: Rank  # whose script ended well; the worker waits for `End` and serves swaps, and says so again after one


class WorkerEvent(LocalMessage, frozen=True):
    kind: str  # name of a class of deadpool_plugin.events
    fields: dict[str, object]


AnyLocalMessage = (
    SupervisorHello | StandbyExited | Leaving | End | StandbyHello | Imports | RunRank | RunsRank | EndProcess
    | WorkerExited | CannotEnd | WorkerHello | RehearsalOutput | StackFile | StoreOffer | HostStore | StartGroups
    | RankReady | ArenaHandOver | Staged | Committed | Wanted | Passed | Abort | Join | Recording | Rehearsed | History
    | Park | Parked | Moved | WorkerMoved | ConnectionBroke | TakeOver | Unwound | Saving | WorkerRestored | OutOfReach
    | CheckpointSaved | Failing | WorkerFinished | WorkerEvent
)  # fmt: skip
