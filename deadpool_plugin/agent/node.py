"""One node as all parts of its agent share it: its place and machine, its world, and its processes.

Rules of this file: values only. An active node's slots and a spare's differ in nothing but `rank`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..config import Config
from ..core import api, local
from ..core.types import NodeId, Rank, Step, World
from ..host.machine import Machine
from ..host.output import Pipe
from ..host.stacks import Stacks
from ..transport.handshake import Credentials
from ..transport.unix import LocalPeer
from .reports import Reports
from .world import Job, Place


@dataclass(eq=False)
class Process:
    """A worker process that a standby process was told to fork. `peer` and `pid` come with its hello."""

    order: int
    rank: Rank
    rehearses: bool
    pid: int = 0
    peer: LocalPeer | None = None
    took_over: bool = False
    in_training: bool = False  # it has reached its first call, or has restored what it took over
    unwound_for: int = 0  # the newest generation it waits for with nothing under way
    saving_for: int = 0  # the newest generation that found it in a save
    failing: str = ""  # the error of its script, if it reported one
    of_host: bool = False  # that is its host's fault
    stores: list[str] = field(default_factory=list)  # their addresses, which it has offered
    moved_from: tuple[float, Step] | None = None  # when, and at which step, it first told of its way
    stacks: Stacks | None = None
    ended: bool = False


@dataclass(eq=False)
class Slot:
    """One local rank: a standby process and its workers. `rank`: what it runs in this world, -1 on a spare.

    `process` runs that rank, or is to. `stand_ins` rehearse ranks, or have rehearsed them and wait: a spare's, or the
    slot's own rank beside the process that runs it.
    """

    local_rank: int
    rank: Rank = -1
    supervisor: LocalPeer | None = None
    standby: LocalPeer | None = None
    standby_pid: int = 0
    standby_ended: bool = False
    imports: bool = False  # the standby process has been told what to import
    order: local.RunRank | None = None
    process: Process | None = None
    stand_ins: dict[Rank, Process] = field(default_factory=dict)
    pipe: Pipe | None = None

    @property
    def processes(self) -> list[Process]:
        """All that have not ended."""
        every = (self.process, *self.stand_ins.values())
        return [process for process in every if process is not None and not process.ended]

    @property
    def living(self) -> Process | None:
        """The process that runs the rank, or is to, unless it has ended."""
        return self.process if self.process is not None and not self.process.ended else None

    def of_peer(self, peer: LocalPeer) -> Process | None:
        every = (self.process, *self.stand_ins.values())
        return next((process for process in every if process is not None and process.peer is peer), None)

    def of_order(self, order: int) -> Process | None:
        return next((process for process in self.processes if process.order == order), None)

    @property
    def running(self) -> Process | None:
        """The connected process that runs the slot's rank, if there is one now."""
        process = self.living
        if process is None or process.rank != self.rank or (process.rehearses and not process.took_over):
            return None
        return process if process.peer is not None else None

    @property
    def serving(self) -> LocalPeer | None:
        return self.running.peer if self.running is not None else None


@dataclass(eq=False)
class LocalNode:
    """This node. `credentials.job` is filled in when the nodes have met. `feed` gives the controller one input."""

    place: Place
    host: Machine
    config: Config
    credentials: Credentials
    job: Job
    reports: Reports
    feed: Callable[[api.Input], None]
    world: World | None = None  # the last one that this node has entered
    slots: list[Slot] = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [Slot(local_rank) for local_rank in range(self.place.local_size)]

    @property
    def id(self) -> NodeId:
        return self.place.node
