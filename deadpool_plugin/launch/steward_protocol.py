"""Messages between `deadpool launch` and its stewards: JSON lines over ssh's standard input and output.

Rules of this file: plain data; a line that is not one of ours (a login script's greeting) is passed over.
"""

from __future__ import annotations

import msgspec

from .. import events

FateEvent = (
    events.NodeJoined | events.NodeLost | events.SwapPlanned | events.NodeFenced | events.NodeEnded
    | events.JobFinished | events.JobStopped
)  # fmt: skip
"""The events that say what became of a job."""


class Word(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


class Prepare(Word, frozen=True):
    """Launcher -> steward, first: what this host needs for the job."""

    job: str
    node: int
    config: str
    secret: bytes
    command: list[str]
    versions: dict[str, str]


class Ready(Word, frozen=True):
    """Steward -> launcher: all is in place, or `problem` says what is wrong."""

    host: str
    problem: str = ""


class Alive(Word, frozen=True):
    """Launcher -> steward, several times within `patience_s`."""


class Stop(Word, frozen=True):
    """Launcher -> steward: end the job on this host; what is left after `grace_s` is killed."""

    grace_s: float


class Tell(Word, frozen=True):
    """Launcher -> steward: once the job has been on this host and is over here, say what happened, and leave.
    `even_if_unseen`: also if it has never been here."""

    even_if_unseen: bool = False


class Running(Word, frozen=True):
    """Steward -> launcher, several times within `silent_after_s` while processes of the job run on this host: one that
    stands still does not. `formed`: the job's first world has formed here."""

    formed: bool


class Told(Word, frozen=True):
    """Steward -> launcher, last: the events of this host's node, and how many processes had to be killed."""

    events: list[FateEvent]
    killed: int


Said = Prepare | Ready | Alive | Stop | Tell | Running | Told
_decoder: msgspec.json.Decoder[Said] = msgspec.json.Decoder(Said)


def encode(word: Word) -> bytes:
    """Return a line of its own, whatever stands before it."""
    return b"\n" + msgspec.json.encode(word) + b"\n"


def decode(line: bytes) -> Said | None:
    """Read a line; None if it is none of ours."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        return None
