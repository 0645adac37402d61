"""Locks of C++ builds: a process that is killed while it compiles must not stop all others.

torch's lock around a build is a file that exists: if its maker is killed, others wait for ever. Here the file is locked
besides, which ends with the process. Where files cannot be locked (some network file systems), torch's own way stays.
Looking at finished files takes some seconds: a slot's standby process loads beforehand what a rank has loaded, from
files that are the same here.
Source: torch 2.13, torch/utils/file_baton.py and its use in cpp_extension.py; DeepSpeed 0.19.8, op_builder/builder.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import present
from ..common import Function, in_place_of


def install(tell: Callable[[str], None] = lambda text: None) -> None:
    """Install the lock once, before anything is compiled. `tell`: hears what is built."""
    from torch.utils.file_baton import FileBaton

    @in_place_of(FileBaton, "try_acquire")
    def acquire(original: Function, baton: Any) -> Any:
        folder = Path(baton.lock_file_path).parent
        if any(folder.glob(f"{folder.name}*.so")):
            said = f"loading C++: {folder.name}, built before (seconds, or minutes if it is out of date)"
        else:
            said = f"building C++: {folder.name} (minutes at a host's first start, then seconds)"
        print(f"[deadpool] {said}", file=sys.stderr, flush=True)
        tell(said)
        while True:
            descriptor = os.open(baton.lock_file_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError:
                os.close(descriptor)
                os.remove(baton.lock_file_path)
                return original(baton)
            if _is_current(baton, descriptor):
                baton.locked = descriptor
                return True
            os.close(descriptor)  # whoever had the lock has removed the file

    @in_place_of(FileBaton, "release")
    def release(original: Function, baton: Any) -> Any:
        if (descriptor := getattr(baton, "locked", None)) is None:
            return original(baton)
        if _is_current(baton, descriptor):
            os.remove(baton.lock_file_path)  # a process without us would wait for it
        os.close(descriptor)
        baton.locked = None


def _is_current(baton: Any, descriptor: int) -> bool:
    """Return whether the file we have locked is still the one at its path."""
    try:
        return os.stat(baton.lock_file_path).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def beforehand() -> list[str]:
    """Name how `load` loads each library that DeepSpeed has compiled in a job and this process has loaded."""
    compiled = {name: module for name, module in _loaded().items() if module.__name__ not in sys.modules}
    lessons = []
    for name, module in compiled.items():
        with contextlib.suppress(OSError):  # it has been removed, or is being built again
            lessons.append(f"{__name__}:load:{name}={_digest(module.__file__)}={module.__file__}")
    return lessons


def load(what: str) -> None:
    """Load `name=digest=file`: DeepSpeed finds the library when it is asked for `name`. Never initialises a device.

    A file that is another one on this host is left to DeepSpeed, which looks whether it must be built again.
    """
    name, digest, file = what.split("=", 2)
    if name not in _loaded() and _digest(file) == digest:
        spec = importlib.util.spec_from_file_location(Path(file).name.partition(".")[0], file)
        spec = present(spec, f"{file} is no library")
        module = importlib.util.module_from_spec(spec)
        present(spec.loader, f"{file} cannot be loaded").exec_module(module)
        _loaded()[name] = module


def _digest(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def _loaded() -> dict[str, Any]:
    loaded: dict[str, Any] = importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder._loaded_ops
    return loaded
