"""DeepSpeed compiles its C++ when it is first asked for; a process that is killed meanwhile must not stop all others.

Rules of this file: torch's lock around such a build is a file that exists; whoever finds it waits until it is gone, for
ever if its maker was killed. Here the file is locked besides, which ends with the process, and its mere existence
means nothing.
Source: torch 2.13, torch/utils/file_baton.py and its use in cpp_extension.py.
"""

from __future__ import annotations

import fcntl
import os
from typing import Any


def install() -> None:
    """Once, before anything is compiled."""
    from torch.utils.file_baton import FileBaton

    baton: Any = FileBaton
    baton.try_acquire, baton.wait, baton.release = _try_acquire, _wait, _release


def _open(baton: Any) -> int:
    return os.open(baton.lock_file_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)


def _try_acquire(baton: Any) -> bool:
    descriptor = _open(baton)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    if not _is_current(baton, descriptor):  # removed by who had it, between our two calls
        os.close(descriptor)
        return _try_acquire(baton)
    baton.fd = descriptor
    return True


def _wait(baton: Any) -> None:
    """Block until nobody builds any more, whether it was finished or not."""
    descriptor = _open(baton)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        _remove(baton, descriptor)
    finally:
        os.close(descriptor)


def _release(baton: Any) -> None:
    if baton.fd is not None:
        _remove(baton, baton.fd)
        os.close(baton.fd)
        baton.fd = None


def _remove(baton: Any, descriptor: int) -> None:
    """A process without us would wait for it."""
    if _is_current(baton, descriptor):
        os.remove(baton.lock_file_path)


def _is_current(baton: Any, descriptor: int) -> bool:
    """Whether the file we have locked is still the one at its path."""
    try:
        return os.stat(baton.lock_file_path).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False
