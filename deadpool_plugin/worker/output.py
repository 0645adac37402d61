"""A rehearsing process is not heard and leaves no files: it writes to a private file until it takes over."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch


class Mute:
    """Redirects file descriptors 1 and 2 into `path` until `lift`; works for everything below Python too."""

    active = False

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._saved = [os.dup(fd) for fd in (1, 2)]
        private = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for fd in (1, 2):
            os.dup2(private, fd)
        os.close(private)
        Mute.active = True

    def lift(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, fd)
            os.close(saved)
        Mute.active = False


def save_nothing_while_muted() -> None:
    """A follower's model is untrained until it takes over: what it would save must not replace the job's own files."""
    original = torch.save

    def save(*args: Any, **kwargs: Any) -> None:
        if not Mute.active:
            original(*args, **kwargs)

    torch.save = save
