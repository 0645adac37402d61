"""Descriptors that a test must not leave behind."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator


@contextlib.contextmanager
def none_left_open() -> Iterator[None]:
    """Asserts at the end that no more are open than were at the beginning; fewer may be, as earlier tests have left
    some to the garbage collector."""
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    yield
    left = set(os.listdir("/proc/self/fd")) - before
    assert not left, f"{left} were left open"
