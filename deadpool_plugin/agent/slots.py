"""The agent's view of its node's processes: one slot per local rank, each with a standby process and its worker.

Rules of this file: values only. An active node's slots and a spare's differ in nothing but `rank`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core import local
from ..core.types import Rank, Step
from ..host.output import Pipe
from ..transport.unix import LocalPeer


@dataclass(eq=False)
class Process:
    """The worker process a standby process was last told to fork. `peer` and `pid` come with its hello.

    `in_training`: it has reached its first call, or has restored what it took over. `unwound_for`: the newest
    generation it waits for with nothing under way; `saving_for`: the newest one that found it in a save. `failing`:
    what its script failed with, if it said so. `stores`: the addresses of those it has offered. `moved_from`: when
    (monotonic seconds) it first told of its way through past steps, and how far it was.
    """

    order: int
    rank: Rank
    rehearses: bool
    pid: int = 0
    peer: LocalPeer | None = None
    took_over: bool = False
    in_training: bool = False
    unwound_for: int = 0
    saving_for: int = 0
    failing: str = ""
    stores: list[str] = field(default_factory=list)
    moved_from: tuple[float, Step] | None = None
    ended: bool = False


@dataclass(eq=False)
class Slot:
    """One local rank. `rank` is what it runs in this world, -1 on a node that stands by."""

    local_rank: int
    rank: Rank = -1
    supervisor: LocalPeer | None = None
    standby: LocalPeer | None = None
    standby_pid: int = 0
    standby_ended: bool = False
    order: local.RunRank | local.RehearseRank | None = None
    process: Process | None = None
    pipe: Pipe | None = None

    @property
    def living(self) -> Process | None:
        """The process ordered last, unless it has ended."""
        return self.process if self.process is not None and not self.process.ended else None

    @property
    def serving(self) -> LocalPeer | None:
        """The connection to the process that runs the slot's rank, if there is one now."""
        process = self.living
        if process is None or process.rank != self.rank or (process.rehearses and not process.took_over):
            return None
        return process.peer
