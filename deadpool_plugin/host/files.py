"""Files that others may look at at any moment: each appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def put(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace the content of `path` as a whole: a reader finds the old content or all of the new. Raises: OSError.

    Args: mode: as for open(2), the umask being taken from it.
    """
    draft = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")  # hosts may share the folder
    draft.unlink(missing_ok=True)  # of one that had our number and was killed here
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(content)
    draft.replace(path)
