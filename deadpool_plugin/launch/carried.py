"""Files that a host gets for one job: configuration and secret in a folder of its memory, which goes with the job.

Rules of this file: only our own user may read them; a folder of somebody else is refused. Whoever is killed outright
leaves the folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError
from ..host import files

SHM = Path("/dev/shm")
CONFIG = "config.yaml"
SECRET = "secret"


def new_job() -> str:
    """A name nobody guesses, which is larger than that of any launch before (by this host's clock)."""
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


def folder_of(job: str) -> Path:
    """Name the job's folder: in the host's memory, never on a disk, gone when it is switched off. On all hosts of a
    launch the name is the same, whoever the user is there."""
    return SHM / f"deadpool-{job}"


def is_carried(config: str) -> bool:
    """Return whether a node's configuration file was put in place for one job: no other host need have it."""
    path = Path(config)
    return path.parent.parent == SHM and path.parent.name.startswith("deadpool-")


def launch_of(config: str) -> str:
    """The name of the launch that has put the configuration in place, "" if none has."""
    return Path(config).parent.name.removeprefix("deadpool-") if is_carried(config) else ""


def secret_of(config: str) -> Path | None:
    """The secret that was put in place with the configuration `config`, if one was."""
    beside = Path(config).with_name(SECRET)
    return beside if is_carried(config) and beside.exists() else None


def last_word(config: str, node: int) -> Path:
    """Name the file for the exit code of `node`'s agent, started with `config`: the event log's disk may be full."""
    return Path(config).with_name(f"exit_code.{node}")


@contextlib.contextmanager
def installed(job: str, config: str, secret: bytes = b"") -> Iterator[Path]:
    """The job's folder with its configuration and, if it is given, its secret, as long as the block runs.

    Raises: ConfigError.
    """
    folder = folder_of(job)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror})", "a folder of our own", "try again") from error
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder} belongs to another user, or others can read it", "a folder of our own", "try again"
        )
    try:
        if secret:
            put(folder / SECRET, secret)
        put(folder / CONFIG, config.encode())
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put(path: Path, content: bytes) -> None:
    """For our eyes only, whole or not at all. Raises: ConfigError."""
    try:
        files.put(path, content, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror})", f"room in {path.parent}", "make some"
        ) from error
