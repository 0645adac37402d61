"""Every error of this package, by whose fault it is, and the exit codes processes end with.

Rules of this file: a message says what was found, what was expected and what to do. `invariant` and `present` are for
our own bugs and survive `python -O`. May import nothing of this package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar, cast

T = TypeVar("T")

EXIT_OK = 0
EXIT_RUNNING = 75
"""sysexits' EX_TEMPFAIL, of a command that was to say how a job ended: nobody says that it has; ask again later."""
EXIT_TAKEN = 75
"""sysexits' EX_TEMPFAIL, of a host that wanted to join: another one has taken its node id meanwhile; `deadpool join`
starts again with another."""
EXIT_CONFIG = 78
"""sysexits' EX_CONFIG: nothing was started, the user has something to correct."""
EXIT_UNRECOVERABLE = 86
"""The job was stopped with a verdict: too much was lost, or no spare was left."""
EXIT_FENCED = 87
"""This node left the job (it was lost to the others, or gave up its place); the job may go on elsewhere."""

WHOLE_STEP = "put the whole iteration into a function under @deadpool_plugin.step, which is redone as one"
"""The way out of everything that is refused because of the shape of a script's loop, for messages."""


class DeadpoolError(Exception):
    """Base of the family; joins the three into one line."""

    exit_code = 1

    def __init__(self, found: str, expected: str = "", remedy: str = "", *, exit_code: int | None = None) -> None:
        self.found, self.expected, self.remedy = found, expected, remedy
        self.exit_code = self.exit_code if exit_code is None else exit_code
        parts = (found, expected and f"expected {expected}", remedy and f"to do: {remedy}")
        super().__init__("; ".join(filter(None, parts)))


class ConfigError(DeadpoolError):
    """The user's configuration, hosts or versions do not fit; found before anything is started."""

    exit_code = EXIT_CONFIG


class MemoryShortage(ConfigError):
    """Host memory does not hold the snapshots this node must keep."""


class Unsupported(ConfigError):
    """Something the plugin refuses by name instead of getting it wrong."""


class TransportError(DeadpoolError):
    """A peer or the network between us failed: time-out, reset, missing node."""


class StorageError(DeadpoolError):
    """A job's state cannot be written to disk, or what is there cannot be used."""

    exit_code = EXIT_CONFIG


class CorruptFrame(TransportError):
    """Bytes from a peer do not decode, exceed a limit or fail their checksum."""


class PeerRefused(TransportError):
    """A peer did not prove the job's secret (or refused ours). `address` is the peer's; `job`: the one it says it is
    of, "" if it says nothing."""

    exit_code = EXIT_CONFIG

    def __init__(self, found: str, expected: str = "", remedy: str = "", *, address: str = "", job: str = "") -> None:
        super().__init__(found, expected, remedy)
        self.address, self.job = address, job


class NodeTaken(DeadpoolError):
    """This host wanted to join a job under a node id that another host has had."""

    exit_code = EXIT_TAKEN


class AlreadyEnded(DeadpoolError):
    """This host wanted to join a job that is over. `exit_code`: the job's own, 1 where no member has told it."""


class StaleGeneration(DeadpoolError):
    """A message or byte of an older generation arrived; it was not applied."""


class Divergence(DeadpoolError):
    """A rehearsal did something the recording does not have; the message names the call."""


class InvariantViolated(DeadpoolError):
    """A bug of this package."""


class CheckpointLost(DeadpoolError):
    """An asynchronous save was cancelled by a swap and is not done again; the checkpoint before it stands."""


class GenerationChanged(BaseException):  # `except Exception` in user code cannot eat it
    """Raised in a worker's main thread when its generation is over; unwinds to the entry of the current call."""

    def __init__(self, generation: int) -> None:
        super().__init__(f"generation {generation} begins")
        self.generation = generation


def shell_code(exit_code: int) -> int:
    """Return a child's exit code as a shell says it: 128 + N, not -N, if signal N has ended it."""
    return exit_code if exit_code >= 0 else 128 - exit_code


@contextlib.contextmanager
def refusing(found: str, expected: str, remedy: str) -> Iterator[None]:
    """Turn an OSError of the block into a ConfigError that has its reason, too."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{found} ({error.strerror})", expected, remedy) from error


def invariant(condition: object, message: str) -> None:
    """Raise InvariantViolated unless `condition` holds."""
    if not condition:
        raise InvariantViolated(f"invariant violated: {message}", remedy="this is a bug, please report it")


def present(value: T | None, message: str) -> T:
    """Return `value`, which is never None here. Raises: InvariantViolated."""
    invariant(value is not None, message)
    return cast(T, value)
