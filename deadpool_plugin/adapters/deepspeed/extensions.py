"""Locks of C++ builds: a process that is killed while it compiles must not stop all others.

DeepSpeed compiles its libraries when it is first asked for them, a script its own extensions.

Rules of this file: torch's lock around such a build is a file that exists; whoever finds it waits until it is gone, for
ever if its maker was killed. Here the file is locked besides, which ends with the process. Whoever gets the lock
builds: where another has finished that is a look at the files, where another was killed it is the rest of the work.
Where files cannot be locked (some network file systems), torch's own way stays.

That look takes some seconds a process, and is for nothing in a swap: what a process has loaded its slot's standby
process loads, too, and what is forked there later finds it.
Source: torch 2.13, torch/utils/file_baton.py and its use in cpp_extension.py; DeepSpeed 0.19.8, op_builder/builder.py.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import present


def install(tell: Callable[[str], None] = lambda text: None) -> None:
    """Install the lock once, before anything is compiled. `tell`: hears what is built."""
    from torch.utils.file_baton import FileBaton

    baton: Any = FileBaton
    baton.try_acquire = functools.partialmethod(_acquire, baton.try_acquire, tell)
    baton.release = functools.partialmethod(_release, baton.release)


def beforehand() -> list[str]:
    """For each library that DeepSpeed has compiled in a job and this process has loaded, how `load` loads it."""
    compiled = {name: module for name, module in _loaded().items() if module.__name__ not in sys.modules}
    return [f"{__name__}:load:{name}={module.__file__}" for name, module in compiled.items()]


def load(what: str) -> None:
    """`name=file`: DeepSpeed finds the library loaded when it is asked for `name`. Never initialises a device."""
    name, _, file = what.partition("=")
    if name not in _loaded():
        spec = importlib.util.spec_from_file_location(Path(file).name.partition(".")[0], file)
        spec = present(spec, f"{file} is no library")
        module = importlib.util.module_from_spec(spec)
        present(spec.loader, f"{file} cannot be loaded").exec_module(module)
        _loaded()[name] = module


def _loaded() -> dict[str, Any]:
    """DeepSpeed's own table."""
    loaded: dict[str, Any] = importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder._loaded_ops
    return loaded


def _acquire(baton: Any, otherwise: Callable[[Any], Any], tell: Callable[[str], None]) -> Any:
    """Say what is built, and block until the lock is ours."""
    folder = Path(baton.lock_file_path).parent
    if any(folder.glob(f"{folder.name}*.so")):
        said = f"loading C++: {folder.name}, built before (seconds, or minutes if it is out of date)"
    else:
        said = f"building C++: {folder.name} (minutes at a host's first start, then seconds)"
    print(f"[deadpool] {said}", file=sys.stderr, flush=True)
    tell(said)
    while (acquired := _acquired(baton, otherwise)) is None:
        pass  # whoever had it has removed the file
    return acquired


def _acquired(baton: Any, otherwise: Callable[[Any], Any]) -> Any:
    """Return what `try_acquire` does; None if the file that we have locked is gone."""
    descriptor = os.open(baton.lock_file_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        os.remove(baton.lock_file_path)
        return otherwise(baton)
    if not _is_current(baton, descriptor):  # removed by who had it
        os.close(descriptor)
        return None
    baton.locked = descriptor
    return True


def _release(baton: Any, otherwise: Callable[[Any], Any]) -> None:
    descriptor = getattr(baton, "locked", None)
    if descriptor is None:
        otherwise(baton)
        return
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
