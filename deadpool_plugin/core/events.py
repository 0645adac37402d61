"""Events that the controller emits, for people and programs.

Rules of this file: events are frozen plain data, names in the past tense, units last. deadpool_plugin.events adds those
of agents and workers, and says when, where and in which generation.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=True, kw_only=True):
    """Base: when, where, in which generation."""

    time: float = 0.0
    node: int = -1
    generation: int = 0


class WorldFormed(Event, frozen=True):
    node_of: tuple[int, ...] = ()
    spares: tuple[int, ...] = ()


class TrainingStarted(Event, frozen=True):
    """Every active rank has reached its first call."""


class SpareReady(Event, frozen=True):
    """A spare has rehearsed one more host, its `ranks`, and gone through their steps. It has `covered` hosts now of
    `hosts`, which all run ranks."""

    spare: int = -1
    ranks: tuple[int, ...] = ()
    covered: int = 1
    hosts: int = -1


class SpareFull(Event, frozen=True):
    """A spare has no memory left to rehearse another host, or could not rehearse it; `covered` hosts are rehearsed."""

    spare: int = -1
    covered: int = 0
    hosts: int = -1


class CoverLost(Event, frozen=True):
    """Ranks that a spare has rehearsed are not any more: their processes have ended."""

    spare: int = -1
    ranks: tuple[int, ...] = ()


class StepCommitted(Event, frozen=True):
    step: int


class StepStored(Event, frozen=True):
    """Every host has written its part of `step` to its store_dir: a job can go on from there if all hosts are lost."""

    step: int


class MirroringPaced(Event, frozen=True):
    """From now on every `every`-th step is mirrored: the mirroring of the newest one took so many `steps`."""

    every: int
    steps: float = 0.0


class NodeLost(Event, frozen=True):
    lost: tuple[int, ...]
    evidence: str = ""


class RankLost(Event, frozen=True):
    rank: int
    reason: str = ""


class ContactRegained(Event, frozen=True):
    duration_s: float = 0.0


class ContactLost(Event, frozen=True):
    reason: str = ""  # why this node's processes stand still: the others may replace it


class HostJoined(Event, frozen=True):
    joined: int


class WaitingForHost(Event, frozen=True):
    reason: str = ""  # why no spare is left; everyone holds its state until a host joins


class SpareCommandStarted(Event, frozen=True):
    hosts: int  # that the job lacks and `spare_command` is to bring
    attempt: int = 1  # since a host has joined last


class SpareCommandDone(Event, frozen=True):
    said: str = ""  # its last line of output
    limit_s: float = 0.0  # for so long its host may take to join


class SpareCommandFailed(Event, frozen=True):
    reason: str = ""  # why no host comes
    retry_s: float = 0.0  # when it is run again


class SpareCommandExhausted(Event, frozen=True):
    """`spare_command` has brought no host in `attempts` within `window_s`, and is not run until they are past."""

    attempts: int
    window_s: float


class SwapPlanned(Event, frozen=True):
    restore_step: int
    lost_nodes: tuple[int, ...] = ()
    lost_ranks: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    takers: dict[str, object] = {}
    duration_s: float = 0.0
    vacated: tuple[int, ...] = ()  # living hosts whose ranks move: errors come back there


class Stalled(Event, frozen=True):
    """In training nothing has got on for `waited_s`: said after seconds, when that doubles, and when it is acted on."""

    step: int  # the newest committed one
    waited_s: float
    limit_s: float = -1.0  # after which it is a hang; -1: never
    ranks: tuple[int, ...] = ()  # for which all others wait, as far as is known
    hosts: tuple[int, ...] = ()  # their nodes
    what: str = ""  # who is where, and who waits for whom
    stack: tuple[str, ...] = ()  # Python frames of the first of `ranks`, innermost first
    cure: str = ""  # what is done about it, "" if nothing is yet


class StepsUndone(Event, frozen=True):
    """Committed steps, `first` to `last`, are done again: `copies` did not cover the loss, and the swap went back."""

    first: int
    last: int
    reason: str = ""


class SwapDone(Event, frozen=True):
    duration_s: float = 0.0


class Unprotected(Event, frozen=True):
    reason: str = ""


class Mirrored(Event, frozen=True):
    """Every rank's state of `step` is on `copies` other hosts."""

    step: int = -1
    uncovered: tuple[int, ...] = ()  # the nodes that no spare can take: while there are any the job is not protected
    reason: str = ""  # why they are uncovered
    spares_left: int = -1  # hosts that stand by, -1 if that is not known
    on_no_spare: str = "stop"  # what happens to a lost node's ranks that have nowhere to go


class Protected(Event, frozen=True):
    """`step` is mirrored, and a spare can take every node; it stays so until Mirrored or Unprotected is emitted."""

    step: int = -1
    spares_left: int = -1


class NodeFenced(Event, frozen=True):
    reason: str = ""


class JobFinished(Event, frozen=True):
    exit_code: int = 0


class JobStopped(Event, frozen=True):
    exit_code: int
    reason: str = ""
    lost_ranks: tuple[int, ...] = ()
    newest_committed: int = -1


class Note(Event, frozen=True):
    """Anything else worth keeping: text for people."""

    text: str = ""
