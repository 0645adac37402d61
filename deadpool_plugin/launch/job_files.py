"""The files of a job: its secret, and what a host gets for one job, in a folder of its memory that goes with the job.

Rules of this file: the secret is never in argv, in the environment or in a log. Only its owner can read it, and the
folder. Only the default secret file is ever made, whole or not at all, so that hosts which share a home directory agree
on it whoever comes first. A process that is killed outright leaves its folder.
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

from ..config import Config
from ..errors import ConfigError, refusing
from ..host import files, output

SHM = Path("/dev/shm")
PREFIX = "deadpool-"
CONFIG = "config.yaml"
SECRET = "secret"
SECRET_BYTES_MIN = 16


def new_job() -> str:
    """Make a name that nobody guesses, larger than that of any launch before (by this host's clock)."""
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


def folder_of(job: str) -> Path:
    """Name the job's folder, the same on all hosts: in the host's memory, never on a disk."""
    return SHM / f"{PREFIX}{job}"


def job_of(config: str) -> str:
    """Name the job that the configuration file was put in place for; "" if it is a user's own."""
    folder = Path(config).parent
    return folder.name.removeprefix(PREFIX) if folder.parent == SHM and folder.name.startswith(PREFIX) else ""


def exit_code_file(config: str, node: int) -> Path:
    """Name the file for the exit code of `node`'s agent, started with `config`: the event log's disk may be full."""
    return Path(config).with_name(f"exit_code.{node}")


@contextlib.contextmanager
def installed(job: str, config: str, secret: bytes = b"") -> Iterator[Path]:
    """Keep the job's folder, with configuration and secret, as long as the block runs. Raises: ConfigError."""
    folder = folder_of(job)
    with refusing(f"{folder} cannot be made", "a folder of our own", "try again"):
        folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        found = f"{folder} belongs to another user, or others can read it"
        raise ConfigError(found, "a folder of our own", "try again")
    try:
        for name, content in (*([(SECRET, secret)] if secret else []), (CONFIG, config.encode())):
            with refusing(f"{folder / name} cannot be written", f"room in {folder}", "make some"):
                files.put(folder / name, content, 0o600)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def secret_of(config: Config, path: str) -> bytes:
    """Return the secret that was put in place with the configuration `path`, else as `ensure_secret`."""
    if beside := secret_beside(path):
        return ensure_secret(config.model_copy(update={"secret_file": beside}))
    is_new = not config.secret_path.exists()
    secret = ensure_secret(config)
    if is_new:  # plain `deepspeed`, which copies nothing
        here = os.uname().nodename
        output.say(f"{here} had no secret_file: {config.secret_path} is new. All hosts of a job need the same one")
    return secret


def secret_beside(config: str) -> Path | None:
    """Find the secret that was put in place with the configuration file, for as long as the job runs on this host."""
    beside = Path(config).parent / SECRET
    return beside if job_of(config) and beside.exists() else None


def ensure_secret(config: Config) -> bytes:
    """Return the secret of `config.secret_file`; the default file is made if it is absent. Raises: ConfigError."""
    path = config.secret_path
    with refusing(
        f"secret_file {path} cannot be read on {os.uname().nodename}",
        "a file with the job's secret, the same on every host",
        f"`head -c 32 /dev/urandom | base64 > {path}; chmod 600 {path}`, or name another one",
    ):
        if "secret_file" not in config.model_fields_set and not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.put_once(path, f"{secrets.token_urlsafe(32)}\n".encode())
        status = path.stat()
        secret = path.read_bytes().strip()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"secret_file {path} has mode {stat.S_IMODE(status.st_mode):04o} and owner {status.st_uid}",
            f"mode 0600 and owner {os.geteuid()}",
            f"`chmod 600 {path}`, and a new secret if others may have read it",
        )
    if len(secret) < SECRET_BYTES_MIN:
        found = f"secret_file {path} holds {len(secret)} bytes"
        raise ConfigError(found, f"at least {SECRET_BYTES_MIN}", "make a new one")
    return secret
