"""Counts and faults of the stand-in for CUDA in this process; fakecuda.h lists them."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import pytest

REPORT_BYTES = 1 << 20
ILLEGAL_ADDRESS = 700

_library = ctypes.CDLL(None)
only_here = pytest.mark.skipif(
    not hasattr(_library, "fakecuda_report"), reason="needs the stand-in for CUDA: ./scripts/test_cuda.sh"
)


def report() -> dict[str, Any]:
    text = ctypes.create_string_buffer(REPORT_BYTES)
    length = _library.fakecuda_report(text, ctypes.c_ulong(REPORT_BYTES))
    assert length < REPORT_BYTES
    found: dict[str, Any] = json.loads(text.value)
    return found


def order(name: str, value: int) -> None:
    assert _library.fakecuda_order(name.encode(), ctypes.c_long(value)) == 0, f"no such fault: {name}"


def break_context(error: int = ILLEGAL_ADDRESS) -> None:
    _library.fakecuda_break(error)


def call(name: str, *arguments: Any) -> int:
    """Call an entry point by its name. Returns: the error it gives."""
    error: int = getattr(_library, name)(*arguments)
    return error
