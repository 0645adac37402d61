"""What `deadpool launch` and its stewards say to each other: JSON lines over ssh's standard input and output.

Rules of this file: plain data; a line that is not one of ours (a login script's greeting) is passed over.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from .. import events
from ..agent import contacts

SHM = Path("/dev/shm")

Outcome = (
    events.NodeJoined | events.SwapPlanned | events.NodeFenced | events.NodeEnded | events.JobFinished
    | events.JobStopped
)  # fmt: skip
"""The events that say what became of a job."""


class Word(msgspec.Struct, frozen=True, tag=True):
    """Base of everything said."""


class Prepare(Word, frozen=True):
    """Launcher -> steward, first: what this host needs for the job. `script` is "" for a module.

    `for_guests`: the same configuration with the user's own secret_file, for hosts that join later.
    """

    job: str
    node: int
    config: str
    secret: bytes
    script: str
    versions: dict[str, str]
    for_guests: str


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
    """Launcher -> steward: when the job is over on this host, say what happened, and leave."""


class Told(Word, frozen=True):
    """Steward -> launcher, last: the events of this host's node, and how many processes had to be killed."""

    events: list[Outcome]
    killed: int


Said = Prepare | Ready | Alive | Stop | Tell | Told
_decoder: msgspec.json.Decoder[Said] = msgspec.json.Decoder(Said)


def encode(word: Word) -> bytes:
    """A line of its own, whatever stands before it."""
    return b"\n" + msgspec.json.encode(word) + b"\n"


def decode(line: bytes) -> Said | None:
    """None if the line is none of ours."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        return None


def new_job() -> str:
    """A name nobody guesses."""
    return secrets.token_hex(8)


def folder(job: str) -> Path:
    """Where a host keeps what it was given for `job`: its own memory, never a disk, gone when it is switched off. The
    name is the same on all hosts, whoever the user is there."""
    return SHM / f"deadpool-{job}"


def is_carried(config: str) -> bool:
    """Whether a node's configuration file is one that a steward has put in place: no other host need have it."""
    path = Path(config)
    return path.parent.parent == SHM and path.parent.name.startswith("deadpool-")


def last_word(config: str, node: int) -> Path:
    """Where the agent of `node`, started with `config`, leaves its exit code: the event log's disk may be full."""
    return Path(config).with_name(f"exit_code.{node}")


def for_guests(output_dir: Path, config: str) -> Path:
    """Where hosts that join find what stewards were given as `for_guests`. `config`: the one they put in place."""
    return output_dir / contacts.FOLDER / f"{Path(config).parent.name}.yaml"
