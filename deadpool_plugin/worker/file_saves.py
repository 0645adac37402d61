"""Files that a script writes in one call past Python's `open`: `torch.save`, and safetensors' `save_file`.

Rules of this file: such a file is one save. It is written beside its place and renamed, so that doing it again never
endangers what is there. safetensors need not be installed, and is not imported here.
"""

from __future__ import annotations

import functools
import io
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .imports import when_imported
from .output import Mute, reads_data
from .saving import SaveCall, Saves, replace

SAFETENSORS = "safetensors.torch"


class FileSave(SaveCall):
    """`original(obj, path, *args, **kwargs)`, which writes `path`.

    Once it is done, or has failed, it is not done again: what it was given may have changed since, or the script have
    moved the file.
    """

    def __init__(
        self,
        name: str,
        saves: Saves,
        original: Callable[..., Any],
        obj: Any,
        path: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.name, self._saves, self._original = name, saves, original
        self._path = Path(path)
        self._given: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = (obj, args, kwargs or {})

    def __call__(self) -> None:
        if self._given is None:
            return
        obj, args, kwargs = self._given
        began = time.monotonic()
        self._path = Path(self._saves.folders.file(str(self._path)))
        write_beside(self._path, lambda file: self._original(obj, file, *args, **kwargs))
        self._given = None  # the call log would keep it for steps
        self._saves.written(str(self._path), began, whole=False)

    def outcome(self, value: Any) -> bytes:
        """Record where it is."""
        return os.fsencode(self._path)

    def skipped(self, outcome: bytes | None) -> None:
        if outcome is not None:  # else it comes before the first forward
            self._saves.folders.follow(str(self._path), os.fsdecode(outcome))

    def failed(self, error: BaseException) -> Any:
        self._given = None
        return super().failed(error)


def write_beside(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make the file at `path` as a whole: until it is done, what was there stays."""
    if path.exists() and not path.is_file():  # a device or pipe is written to, not replaced
        write(path)
        return
    real = Path(os.path.realpath(path))
    beside = real.parent / f".{real.name}.{os.environ['RANK']}.writing"
    shutil.rmtree(beside, ignore_errors=True)  # of a process that was killed while it wrote
    beside.mkdir()
    try:  # the file's name is part of what torch writes, so it has its own from the start
        write(beside / path.name)
        os.replace(beside / path.name, real)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def install(saves: Saves) -> None:
    """Wrap what writes files; safetensors' as soon as a script imports it. Once, before the script runs."""
    wrappers = {torch.save: _saving_by_torch(saves)}
    if SAFETENSORS in sys.modules:
        save_file = sys.modules[SAFETENSORS].save_file
        wrappers[save_file] = _saving_by_safetensors(saves, save_file)
    else:
        when_imported(SAFETENSORS, lambda module: _wrap(saves, module))
    replace(wrappers)


def _wrap(saves: Saves, module: Any) -> None:
    module.save_file = _saving_by_safetensors(saves, module.save_file)


def _is_muted() -> bool:
    return Mute.active and not reads_data()


def _saving_by_torch(saves: Saves) -> Callable[..., Any]:
    original = torch.save

    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, (str, os.PathLike)) and not saves.foreign():
            return saves.do(FileSave("torch.save", saves, original, obj, os.fspath(f), args, kwargs))
        if _is_muted() and not isinstance(f, io.BytesIO):
            return None
        return original(obj, f, *args, **kwargs)

    return save


def _saving_by_safetensors(saves: Saves, original: Callable[..., Any]) -> Callable[..., Any]:
    """`save_model` writes by `save_file`, too; `safetensors.numpy` is for those who have no torch."""

    @functools.wraps(original)
    def save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        if saves.foreign():
            return None if _is_muted() else original(tensors, filename, *args, **kwargs)
        name = f"{SAFETENSORS}.save_file"
        return saves.do(FileSave(name, saves, original, tensors, os.fspath(filename), args, kwargs))

    return save_file
