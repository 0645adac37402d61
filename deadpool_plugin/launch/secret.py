"""The job's secret, in a file only its owner can read.

Rules of this file: never in argv, in the environment or in a log. Only the default file is ever made, whole or not
at all, so that hosts which share a home directory agree on it whoever comes first.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from ..config import Config
from ..errors import ConfigError
from . import carried

BYTES_MIN = 16


def of_job(config: Config, path: str) -> bytes:
    """The secret of the job whose configuration is the file `path`: the one that was put in place with it, else as
    `ensure`. Raises: ConfigError."""
    found = carried.secret_of(path)
    return ensure(config if found is None else config.model_copy(update={"secret_file": found}))


def secret_files(config: Config, path: str) -> tuple[str, ...]:
    """Return where others find the secret of the job whose configuration is the file `path`: as long as the job runs on
    this host, and where the user has it."""
    found = carried.secret_of(path)
    return (*([] if found is None else [str(found)]), config.told_secret_file)


def ensure(config: Config) -> bytes:
    """The secret of `config.secret_file`; the default file is made if it is absent.

    Raises: ConfigError if it is missing, readable by others, somebody else's, or too short.
    """
    path = config.secret_path
    try:
        if "secret_file" not in config.model_fields_set and not path.exists():
            _make(path)
        status = path.stat()
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"secret_file {path} cannot be read on {os.uname().nodename} ({error.strerror})",
            "a file with the job's secret, the same on every host",
            f"`head -c 32 /dev/urandom | base64 > {path}; chmod 600 {path}`, or name another one",
        ) from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"secret_file {path} has mode {stat.S_IMODE(status.st_mode):04o} and owner {status.st_uid}",
            f"mode 0600 and owner {os.geteuid()}",
            f"`chmod 600 {path}`, and a new secret if others may have read it",
        )
    if len(secret) < BYTES_MIN:
        raise ConfigError(f"secret_file {path} holds {len(secret)} bytes", f"at least {BYTES_MIN}", "make a new one")
    return secret


def _make(path: Path) -> None:
    """Another process may be making it too: the first whole file wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
