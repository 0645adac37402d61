"""Events of a job, for people and programs: one JSON object a line in `output_dir/events.<node>.jsonl`.

What recurs with every step or minute stands apart, in `events.<node>.recent0.jsonl` and `events.<node>.recent1.jsonl`,
which keep the newest only. Rules of this file: names in the past tense, units last; every event says when (epoch
seconds), on which node and in which generation. Durations are measured with a monotonic clock by whoever reports them.
May import errors and core/events.py, which has those of the protocol.
"""

# ruff: noqa: F403, F405

from __future__ import annotations

import time
from pathlib import Path
from typing import TypeVar, Union

import msgspec

from .core.events import *  # all of them are here, too
from .errors import invariant

E = TypeVar("E", bound=Event)

ALIVE_S = 60.0
"""How often the job says that it has not ended."""


class NodeJoined(Event, frozen=True):
    host: str = ""
    ranks: tuple[int, ...] = ()
    spare: bool = False


class RanksAwaited(Event, frozen=True):
    """The job's first step, or its first one after a swap, has waited so long for ranks. `ranks_of`: those of each node
    by its number, whoever the others wait for first; `of`: the ranks of the job."""

    ranks_of: dict[str, tuple[int, ...]]
    of: int
    waited_s: float


class StepDone(Event, frozen=True):
    """`rank` is the first on its node to have done `step`, or the first there that knows its loss."""

    rank: int
    step: int
    loss: float | None = None


class Alive(Event, frozen=True):
    """The job has not ended: every `ALIVE_S`, from the coordinator; later from every node whose scripts still work."""


class CheckpointSaved(Event, frozen=True):
    step: int
    path: str = ""
    duration_s: float = 0.0


class CheckpointCancelled(Event, frozen=True):
    """A save that was under way when a swap began; it is done again, or `reason` says why it is not."""

    step: int
    path: str = ""
    reason: str = ""


class WorkerUnblocked(Event, frozen=True):
    rank: int
    duration_s: float = 0.0


class GroupsRebuilt(Event, frozen=True):
    rank: int
    groups: int = 0
    duration_s: float = 0.0


class SnapshotFetched(Event, frozen=True):
    rank: int
    step: int
    nbytes: int = 0
    duration_s: float = 0.0


class StateRestored(Event, frozen=True):
    rank: int
    step: int
    duration_s: float = 0.0


class WorkerResumed(Event, frozen=True):
    rank: int
    step: int
    duration_s: float = 0.0


class FirstStepDone(Event, frozen=True):
    rank: int
    step: int
    duration_s: float = 0.0


class Rehearsed(Event, frozen=True):
    rank: int
    duration_s: float = 0.0


class CatchingUp(Event, frozen=True):
    """A process that takes a rank over and that nobody had rehearsed is on its way through past steps; others wait.
    `target`: the last of these steps, -1 if that is not known; `left_s`: the seconds to it at the pace so far."""

    rank: int
    step: int
    target: int = -1
    left_s: float = -1.0


class RankTakenOver(Event, frozen=True):
    """A process on this node has been handed a rank of a plan. `covered`: it had gone through the start of the rank's
    script and its steps before the plan came; otherwise everybody has waited for that."""

    rank: int
    covered: bool


class RehearsalFailed(Event, frozen=True):
    rank: int
    reason: str = ""


class HistoryFilling(Event, frozen=True):
    """The call records of a rank's past steps take four fifths of `history_limit_mib`; or all of it (`full`), and the
    oldest are dropped: from `step` on nobody who has not followed can take the rank over."""

    rank: int
    step: int
    full: bool = False


class StateWritten(Event, frozen=True):
    """The state of `step` that this node held is on disk, in the job's folder `path`: another job can go on from it."""

    step: int
    path: str
    gib: float = 0.0
    duration_s: float = 0.0


class StateLost(Event, frozen=True):
    """The state that this node held could not be written to disk when the job ended."""

    reason: str = ""


class JobResumed(Event, frozen=True):
    """This job goes on from `step` of an earlier one, whose files are in `path`."""

    step: int
    path: str


class PeerRefused(Event, frozen=True):
    address: str = ""
    reason: str = ""


class NodeEnded(Event, frozen=True):
    """The last word of a node's agent: how its supervisors end."""

    exit_code: int


RECURRING = (StepDone, StepCommitted, CheckpointSaved, Alive)
"""The kinds of events that come with every step, checkpoint or minute: only the newest are kept."""

FATE = (
    NodeJoined, WorldFormed, TrainingStarted, SpareReady, CoverLost, Mirrored, Protected, Unprotected, HistoryFilling,
    NodeLost, SwapPlanned, SwapDone, WaitingForHost, NodeFenced, NodeEnded, JobFinished, JobStopped, StateWritten,
    StateLost, JobResumed,
)  # fmt: skip
"""The kinds of events that say how the job stands, or what became of it: kept however much else has happened."""


def log_of(folder: Path, node: int) -> Path:
    return folder / f"events.{node}.jsonl"


def recent_of(folder: Path, node: int) -> tuple[Path, Path]:
    """The two files of the newest recurring events of `node`, written in turns."""
    return folder / f"events.{node}.recent0.jsonl", folder / f"events.{node}.recent1.jsonl"


KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}

decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Union[tuple(KINDS.values())])  # noqa: UP007 (of a list)


def make(kind: str, fields: dict[str, object], *, node: int, generation: int) -> Event:
    """Make the event `kind` of `fields`, which are checked; `time`, `node` and `generation` are filled in unless given.

    Raises: InvariantViolated for an unknown kind; msgspec.ValidationError for wrong fields.
    """
    invariant(kind in KINDS, f"unknown event kind {kind!r}")
    base = {"time": time.time(), "node": node, "generation": generation}
    return msgspec.convert({**base, **fields, "event": kind}, KINDS[kind])


def stamped(event: E, *, node: int, generation: int) -> E:
    """Return `event` with the time of now, the node and the generation it is of."""
    return msgspec.structs.replace(event, time=time.time(), node=node, generation=generation)


def encode(event: Event) -> bytes:
    return msgspec.json.encode(event) + b"\n"
