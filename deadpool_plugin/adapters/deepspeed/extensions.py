"""DeepSpeed compiles its C++ when it is first asked for; a process that is killed meanwhile must not stop all others.

Rules of this file: torch's lock around such a build is a file that exists; whoever finds it waits until it is gone, for
ever if its maker was killed. Here the file is locked besides, which ends with the process. Whoever gets the lock
builds: where another has finished that is a look at the files, where another was killed it is the rest of the work.
Where files cannot be locked (some network file systems), torch's own way stays.
Source: torch 2.13, torch/utils/file_baton.py and its use in cpp_extension.py.
"""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Once, before anything is compiled."""
    from torch.utils.file_baton import FileBaton

    baton: Any = FileBaton
    baton.try_acquire = functools.partialmethod(_acquire, baton.try_acquire)
    baton.release = functools.partialmethod(_release, baton.release)


def _acquire(baton: Any, otherwise: Callable[[Any], Any]) -> Any:
    """Block until the lock is ours."""
    descriptor = os.open(baton.lock_file_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        os.remove(baton.lock_file_path)
        return otherwise(baton)
    if not _is_current(baton, descriptor):  # removed by who had it
        os.close(descriptor)
        return _acquire(baton, otherwise)
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
    """Whether the file we have locked is still the one at its path."""
    try:
        return os.stat(baton.lock_file_path).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False
